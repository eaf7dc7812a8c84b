"""Losses and joins in place: ours and torchft's, which drops a lost replica and goes on with the others.

Three hosts train the same small model with one replica each, as in `morphing`, in turn with each library.
torchft is tuned as far as it still works: heartbeats every 100 ms, a silent replica is lost after 1 s, a
quorum waits 100 ms for late replicas, and a collective gives up after 2 s. It does less: the batch shrinks
with the replicas, the step that was interrupted is dropped with its samples, and nothing starts a lost worker
again.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks.measure import measured_within
from benchmarks.morphing import (
    SCRIPT,
    Hot,
    InPlace,
    InPlaceJob,
    lose_in_place,
    morph_in_place,
    own_environment,
    row,
    under_way,
)
from benchmarks.report import Row
from tests.environments import environment
from varuna.chaos.hosts.lab import Host, Lab

T = TypeVar("T")
TORCHFT = "torchft 0.2, tuned"
TRIES = 3
TURNS_SECONDS = 110.0
"""No turn begins later than this after the first one."""
LIGHTHOUSE = {
    "min_replicas": "1",
    "join_timeout_ms": "100",
    "quorum_tick_ms": "20",
    "heartbeat_timeout_ms": "1000",
    "bind": "0.0.0.0:29510",
}


class Replicas(InPlaceJob):
    """torchft: a lighthouse on this machine, and one replica on each host."""

    patience_seconds = 40.0

    def begin(self, hosts: Sequence[Host]) -> None:
        folder = environment("torchft", Path(__file__).with_name("torchft-constraints.txt"))
        (packages,) = folder.glob("lib/python*/site-packages")
        self.packages = str(packages)
        options = [f"--{name}={value}" for name, value in LIGHTHOUSE.items()]
        launcher = self.folder / "lighthouse.py"
        path = f"import sys; sys.path.append({self.packages!r})"
        launcher.write_text(f"{path}\nfrom torchft._torchft import lighthouse_main\nlighthouse_main()\n")
        self.run([sys.executable, str(launcher), *options])
        for host in hosts:
            self.start(host)

    def add(self, host: Host) -> None:
        self.num_hosts += 1
        self.start(host)

    def start(self, host: Host) -> None:
        port = LIGHTHOUSE["bind"].rpartition(":")[2]
        told = {
            "TORCHFT_LIGHTHOUSE": f"http://{self.lab.address}:{port}",
            "TORCHFT_PACKAGES": self.packages,
            "MASTER_ADDR": host.address,
            "MASTER_PORT": "29511",
        }
        there = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.folder)]
        self.run(host.command([*there, sys.executable, str(SCRIPT), "--torchft"], told))


def kill_replica(job: InPlaceJob) -> float:
    """Seconds from the kill of a worker to the end of the survivors' next step."""
    job.steady()
    pid = job.worker_of(job.lab.hosts[1])
    return lose_in_place(job, lambda: os.kill(pid, signal.SIGKILL))[0]


def live(lab: Lab) -> InPlace:
    """A replica is killed and started again; another host falls silent. torchft has no planned leave."""
    with under_way(Replicas, lab, len(lab.hosts)) as job:
        killed = kill_replica(job)
        now = time.time()
        job.start(lab.hosts[1])
        joined = job.pause(now)
        cut, _ = lose_in_place(job, lab.hosts[-1].cut)
        steps = [note.step for note in job.read("step")]
        return InPlace(joined, 0.0, killed, cut, 0.0, len(steps) - len(set(steps)))


def measured_again(measure: Callable[[], T]) -> T:
    """Measure torchft. Its survivors may fail, too (an assertion in its reduction): then start again."""
    for left in range(TRIES - 1, -1, -1):
        try:
            return measure()
        except RuntimeError as error:
            if not left:
                raise
            print(f"torchft's survivors failed, and it is measured again: {error}", file=sys.stderr)
    raise AssertionError("unreachable")


def torchft(repeats: int, *, quick: bool) -> list[Row]:
    if quick:
        return glimpse()
    with Lab(3, own_environment()) as lab:
        turns = measured_within(
            TURNS_SECONDS, repeats, lambda: (morph_in_place(lab), measured_again(lambda: live(lab)))
        )
    ours, theirs = zip(*turns, strict=True)
    cases: dict[str, tuple[Callable[[InPlace], float], float | None]] = {
        "kill -9 of a worker → next step": (lambda one: one.killed, 1.0),
        "machine cut off silently → next step": (lambda one: one.cut, None),
        "machine added, pause between two steps": (lambda one: one.joined, None),
    }
    return [
        torchft_row(case, [field(one) for one in ours], [field(one) for one in theirs], target)
        for case, (field, target) in cases.items()
    ]


def torchft_row(case: str, ours: Sequence[float], theirs: Sequence[float], target: float | None) -> Row:
    found = row(case, ours, theirs, against=TORCHFT)
    return msgspec.structs.replace(found, benchmark="torchft", target=target)


def glimpse() -> list[Row]:
    """A kill on each side, with two hosts."""
    with Lab(2, own_environment()) as lab:
        with under_way(Hot, lab, 2) as job:
            ours = kill_replica(job)

        def kill_one() -> float:
            with under_way(Replicas, lab, 2) as other:
                return kill_replica(other)

        theirs = measured_again(kill_one)
    return [torchft_row("kill -9 of a worker → next step", [ours], [theirs], 1.0)]
