"""A job under attack by strangers: finds every listening socket of the job, and attacks each of them.

A stranger has a shell of another user on a machine of the job, or on another machine of its network, and it
can record what the machines send. It does not have the job's credential.
"""

import os
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tests.morph.jobs import TRAIN, Job
from tests.morph.stranger_attacks import ATTACKS, Order, Target, listening_sockets
from varuna.chaos.hosts.lab import ROOT, Host, Lab

SECONDS = 10.0
"""Duration of an attack that nobody refuses: longer than any time limit for strangers."""
PATIENCE_SECONDS = 60.0
MOST_RECORDED = 1 << 16
SECRET = "AKIA-not-for-strangers-7f3a91"
"""A secret in the env file of the job."""
OWN_CHANNELS = ("agent", "manager", "store")
"""Listeners of this library's own channels; the others are gloo's."""


class Door(msgspec.Struct, frozen=True):
    """A listening socket of a process of the job."""

    owner: str  # "manager", "store", "worker", ...
    host: str  # name of its host; "" is the manager's
    address: str
    port: int  # 0: an abstract Unix socket

    @property
    def name(self) -> str:
        place = self.host or "manager's host"
        return f"{self.owner} on {place}, {self.port or self.address}"


def sockets_of(pid: int) -> set[tuple[str, int]]:
    """Return the listening sockets of a process."""
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
        inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
        return listening_sockets(str(pid), inodes)
    except OSError:
        return set()  # gone meanwhile


# ---------------------------------------------------------------- recording


class Recorder:
    """Records the first bytes of every TCP connection from and to the hosts of a lab."""

    def __init__(self, lab: Lab) -> None:
        self._flows: dict[tuple[str, int, str, int], bytearray] = defaultdict(bytearray)
        self._over = threading.Event()
        self._sockets = []
        for host in lab.hosts:
            listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
            listener.bind((host._link, 0))
            listener.settimeout(0.2)
            self._sockets.append(listener)
        self._threads = [threading.Thread(target=self._record, args=(one,)) for one in self._sockets]
        for thread in self._threads:
            thread.start()

    def _record(self, listener: socket.socket) -> None:
        while not self._over.is_set():
            with suppress(TimeoutError):
                self._note(listener.recv(1 << 17)[14:])

    def _note(self, packet: bytes) -> None:
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        start = (packet[0] & 15) * 4
        source, target = struct.unpack_from("!HH", packet, start)
        (total,) = struct.unpack_from("!H", packet, 2)
        data = packet[start + (packet[start + 12] >> 4) * 4 : total or None]
        key = (socket.inet_ntoa(packet[12:16]), source, socket.inet_ntoa(packet[16:20]), target)
        if data and len(self._flows[key]) < MOST_RECORDED:
            self._flows[key] += data

    def sent_to(self, address: str, port: int) -> tuple[bytes, ...]:
        """Return the bytes of each recorded connection to a port, the callers' side."""
        return tuple(
            bytes(data[:8192])
            for (_, _, target, number), data in list(self._flows.items())
            if (target, number) == (address, port)
        )

    def contains(self, text: str) -> bool:
        return any(text.encode() in data for data in list(self._flows.values()))

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for data in list(self._flows.values()))

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for listener in self._sockets:
            listener.close()


# ---------------------------------------------------------------- attackers


class Strangers:
    """The process that attacks (`stranger_attacks.py`)."""

    def __init__(self) -> None:
        # Not in pytest's folder, which other users cannot enter.
        self._folder = tempfile.TemporaryDirectory(prefix="varuna-strangers-")
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        self.markers, self._results = folder / "markers", folder / "results"
        for one in (self.markers, self._results):
            one.mkdir()
            one.chmod(0o1777)
        self._num_orders = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.morph.stranger_attacks", str(self._results)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # pages of torch about servers that refuse it
            text=True,
        )

    def order(self, attack: str, namespace: str, targets: Sequence[Target], seconds: float) -> str:
        """Start an attack on all targets; return its id."""
        assert self._process.stdin is not None
        self._num_orders += 1
        order = Order(str(self._num_orders), attack, namespace, tuple(targets), str(self.markers), seconds)
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()
        return order.id

    def outcomes(self, order: str) -> dict[str, str]:
        """Wait for the outcomes of an attack, by target."""
        path = self._results / f"{order}.json"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not path.exists():
            assert time.monotonic() < deadline, f"attack {order} did not end"
            time.sleep(0.02)
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])

    def marks(self) -> list[str]:
        """Return the files that loaded pickles have left."""
        return sorted(path.name for path in self.markers.iterdir())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._folder.cleanup()


# ---------------------------------------------------------------- the job


class BesiegedJob:
    """A job of two stages with two workers on each of two hosts; strangers are on these and on a third."""

    def __init__(self, folder: Path) -> None:
        (folder / "varuna").symlink_to(ROOT / "varuna")  # other machines find the library here
        (folder / "varuna.env").write_text(f"AWS_SECRET_ACCESS_KEY={SECRET}\n")
        self.lab = Lab(3)
        self.recorder = Recorder(self.lab)
        self.strangers = Strangers()
        self.job = Job(
            folder,
            machines=2,
            stages=2,
            script=TRAIN,
            addresses=[host.address for host in self.lab.hosts[:2]],
            options=["--gpus_per_node", "2", "--ssh", shlex.join(self.lab.ssh)],
        )

    @property
    def outside(self) -> Host:
        """The host that has no part in the job."""
        return self.lab.hosts[2]

    def doors(self) -> list[Door]:
        """Return all listening sockets of all processes of the job."""
        found = []
        for pid in self.job.processes():
            if os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                found += self._doors_of(pid, "manager", "", self.lab.address)
        status = self.job.status()
        for host in self.lab.hosts[:2]:
            (machine,) = (one for one in status["machines"] if one["machine"] == host.address)
            workers = {host.outer_pid(one["pid"]) for one in machine["workers"] if one["pid"]}
            for pid, line in host.processes().items():
                if pid in workers:
                    owner = "worker"
                elif "forkserver.py" in line:
                    owner = "store" if is_child_of_a_fork_server(pid) else "fork server"
                else:
                    owner = "agent" if "varuna.morph.run.agent" in line else line.split()[0]
                found += self._doors_of(pid, owner, host.name, host.address)
        return sorted(set(found), key=lambda door: (door.owner, door.host, door.port, door.address))

    def _doors_of(self, pid: int, owner: str, host: str, own: str) -> Iterator[Door]:
        for address, port in sockets_of(pid):
            yield Door(owner, host, own if address in ("0.0.0.0", "::") else address, port)

    def targets(self, doors: Sequence[Door]) -> list[Target]:
        return [
            Target(door.name, door.address, door.port, self.recorder.sent_to(door.address, door.port))
            for door in doors
        ]

    def attack(self, attack: str, host: str, doors: Sequence[Door], seconds: float = SECONDS) -> str:
        """Start an attack by a stranger on a host ("": the manager's); return its id."""
        namespace = f"{self.lab.name}-{host}" if host else ""
        targets = self.targets(doors) or [Target("all", "", 0)]
        return self.strangers.order(attack, namespace, targets, seconds)

    def attack_from_everywhere(self, attack: str, doors: Sequence[Door]) -> list[tuple[str, str]]:
        """Attack as another user of the same host, and from another host; return (place, id)."""
        away = [door for door in doors if door.port and not door.address.startswith("127.")]
        orders = [("other host", self.attack(attack, self.outside.name, away))]
        for host in sorted({door.host for door in doors}):
            here = [door for door in doors if door.host == host]
            orders.append(("same host", self.attack(attack, host, here)))
        return orders

    def attack_all(self, doors: Sequence[Door], attacks: Iterable[str] = ATTACKS) -> "Matrix":
        """Run the attacks on all doors at the same time."""
        started = {attack: self.attack_from_everywhere(attack, doors) for attack in attacks}
        matrix: Matrix = defaultdict(dict)
        for attack, orders in started.items():
            self.collect(matrix, attack, orders)
        return matrix

    def collect(self, matrix: "Matrix", attack: str, orders: Sequence[tuple[str, str]]) -> None:
        for place, order in orders:
            for door, outcome in self.strangers.outcomes(order).items():
                matrix[door, place][attack] = outcome

    def is_used(self, door: Door) -> bool:
        """Return True if a member of the job has connected to it from another host."""
        return bool(self.recorder.sent_to(door.address, door.port))

    def listed_processes(self) -> bytes:
        """Return the arguments and environments of all processes of the job, as `ps` shows them."""
        pids = [*self.job.processes(), *(pid for host in self.lab.hosts for pid in host.processes())]
        found = b""
        for pid in pids:
            with suppress(OSError):  # gone meanwhile
                found += Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        return found

    def events(self) -> list[dict[str, str]]:
        (log,) = self.job.folder.glob("varuna_logs/*/events.jsonl")
        return [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.strangers.close()
        self.job.__exit__(kind, error, trace)
        self.recorder.close()
        self.lab.close()


Matrix = dict[tuple[str, str], dict[str, str]]
"""Outcome by (door, place of the stranger) and attack."""


def is_child_of_a_fork_server(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text()
    parent = int(stat.rpartition(")")[2].split()[1])
    return "forkserver.py" in Path(f"/proc/{parent}/cmdline").read_text()


def draw(matrix: Mapping[tuple[str, str], Mapping[str, str]]) -> str:
    """Return the matrix as text, equal rows once."""
    rows: dict[tuple[str, ...], int] = defaultdict(int)
    for (door, place), outcomes in matrix.items():
        owner = door.split(" on ")[0] + (" (Unix socket)" if "varuna-" in door else "")
        rows[(owner, place, *(outcomes.get(attack, "") for attack in ATTACKS))] += 1
    lines = [("sockets", "listener", "stranger", *ATTACKS)]
    lines += [(str(count), *row) for row, count in sorted(rows.items())]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


@contextmanager
def besieged(folder: Path) -> Iterator[BesiegedJob]:
    with BesiegedJob(folder) as siege:
        try:
            siege.job.wait_for_steps(12)
            yield siege
        except BaseException as error:
            error.add_note("\n".join(siege.job.lines[-60:]))
            raise
