"""Machines that die, fall silent, come and go: how long until training goes on, ours and torchrun's.

Three hosts (network namespaces with an sshd each) train the same small model with one worker each. In turn a
job of each side lives through the same: a machine is added, a worker is killed, a machine is cut off; and on
our side one leaves by plan. A time is from the moment of the fault to the end of the first step after it.
On our side, a second job does the same in place: workers keep their processes and their state.

torchrun is tuned as far as it still works:

- `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`: else no restart succeeds, since it finds keys of the dead attempt.
- Its store is held by the process that measures, on a machine that stays.
- `--nnodes=1:3`: with all three there a rendezvous is complete at once, else after `last_call_timeout=1`, the
  least that there is.
- `keep_alive_interval=1`, `keep_alive_max_attempt=3`. With 2 it fell apart in trials: living machines were
  taken for dead, and two jobs trained side by side.
- `--monitor-interval=0.05`, and `--max-restarts=1000`, since survivors spend one, too.
- Workers give up on a silent peer after 2 s (`timeout` of the group that reduces); the default is 30 minutes.
- The script uses plain PyTorch there: see `morphing_train`.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec
import torch.distributed as dist

from benchmarks.arrivals import measure_arrivals
from benchmarks.heartbeats import DEVICES, manager_share
from benchmarks.measure import measured_within, spread
from benchmarks.report import Row
from tests.launch.jobs import environment
from varuna.chaos.hosts.lab import ROOT, Host, Lab

Job = TypeVar("Job", bound="Contender")
SCRIPT = Path(__file__).with_name("morphing_train.py")
STEADY_STEPS = 30
"""Between two faults: more than between two checkpoints."""
LIVES_SECONDS = 540.0
"""No life begins later than this after the first one."""
RENDEZVOUS = {
    "is_host": "false",
    "join_timeout": "60",
    "last_call_timeout": "1",
    "close_timeout": "1",
    "keep_alive_interval": "1",
    "keep_alive_max_attempt": "3",
}


class Note(msgspec.Struct, frozen=True):
    """One note of a worker."""

    at: float
    what: str
    start: float  # tells the worker's starts apart
    world: int
    step: int = 0
    seconds: float = 0.0
    rank: int = 0
    pid: int = 0
    host: str = ""


class Contender:
    """A job on the first hosts of a lab, known by what its workers note in its folder."""

    patience_seconds = 120.0

    def __init__(self, lab: Lab, folder: Path, num_hosts: int) -> None:
        self.lab = lab
        self.folder = folder
        self.num_hosts = num_hosts
        self.processes: list[subprocess.Popen[bytes]] = []
        self.begin(lab.hosts[:num_hosts])

    def begin(self, hosts: Sequence[Host]) -> None:
        raise NotImplementedError

    def add(self, host: Host) -> None:
        raise NotImplementedError

    def run(self, argv: Sequence[str]) -> None:
        with (self.folder / "output").open("ab") as output:
            self.processes.append(
                subprocess.Popen(
                    argv,
                    cwd=self.folder,
                    env=environment(self.folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )

    def close(self) -> None:
        """All machines go, and come back as new ones."""
        for process in self.processes:
            process.kill()
            process.wait()
        for host in self.lab.hosts:
            host.kill()
            host.reconnect()
            host.boot()

    def read(self, what: str) -> list[Note]:
        path = self.folder / "notes.jsonl"
        data = path.read_bytes() if path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        found = [msgspec.json.decode(line, type=Note) for line in lines]
        return [note for note in found if note.what == what]

    def wait(self, find: Callable[[list[Note]], Note | None]) -> Note:
        """For a step that is found among all that were done."""
        deadline = time.time() + self.patience_seconds
        while time.time() < deadline:
            if found := find(self.read("step")):
                return found
            time.sleep(0.01)
        said = (self.folder / "output").read_text()[-5000:]
        raise RuntimeError(
            f"training does not go on within {self.patience_seconds:.0f} s; the job's last words:\n{said}"
        )

    def steady(self) -> Note:
        """The last step, when all hosts have gone on for a while."""

        def find(steps: list[Note]) -> Note | None:
            same = [n for n in steps if n.start == steps[-1].start and n.world == self.num_hosts]
            return same[-1] if len(same) >= STEADY_STEPS else None

        return self.wait(find)

    def back(self, since: float) -> Note:
        """The first step of all hosts together whose workers were started after that moment."""

        def find(steps: list[Note]) -> Note | None:
            return next((n for n in steps if n.start > since and n.world == self.num_hosts), None)

        return self.wait(find)

    def worker(self, rank: int) -> int:
        """The process id, as it is outside of its host."""
        note = [note for note in self.read("begun") if note.rank == rank][-1]
        (host,) = (host for host in self.lab.hosts if host.name == note.host)
        (pid,) = (pid for pid in host.processes() if inner_pid(pid) == note.pid)
        return pid


def inner_pid(pid: int) -> int:
    """In the namespace of a process itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("NSpid:")[2].splitlines()[0].split()[-1])


class Led(Contender):
    """Ours."""

    options: tuple[str, ...] = ("--no-hot",)
    arguments: tuple[str, ...] = ()  # of the script

    def begin(self, hosts: Sequence[Host]) -> None:
        (self.folder / "varuna").symlink_to(ROOT / "varuna")  # the machines find it in the code's folder
        self.write_list(hosts)
        self.run(
            [
                *[sys.executable, "-m", "varuna.run_varuna", "--machine_list", "machines"],
                *["--gpus_per_node", "1", "--batch_size", "12", "--chunk_size", "2", "--nstages", "1"],
                *["--ssh", shlex.join(self.lab.ssh), *self.options, str(SCRIPT), *self.arguments],
            ]
        )

    def write_list(self, hosts: Sequence[Host]) -> None:
        self.listed = list(hosts)
        part = self.folder / "machines.part"
        part.write_text("".join(f"{host.address}\n" for host in hosts))
        part.replace(self.folder / "machines")

    def add(self, host: Host) -> None:
        self.num_hosts += 1
        self.write_list([*self.listed, host])

    def remove(self, host: Host) -> None:
        self.num_hosts -= 1
        self.write_list([other for other in self.listed if other is not host])

    def told_at(self, what: str, since: float) -> float:
        """When its manager first spoke of it."""
        (log,) = self.folder.glob("**/events.jsonl")
        events = [msgspec.json.decode(line) for line in log.read_bytes().splitlines()]
        times = [datetime.fromisoformat(event["at"]).timestamp() for event in events if event["what"] == what]
        return next(at for at in times if at > since)


class InPlaceJob(Contender):
    """A job whose workers keep their processes when others come and go."""

    def back(self, since: float) -> Note:
        """The first step of that many hosts after that moment."""

        def find(steps: list[Note]) -> Note | None:
            return next((n for n in steps if n.at > since and n.world == self.num_hosts), None)

        return self.wait(find)

    def steady(self) -> Note:
        """The last step, when all hosts have trained together for a while."""

        def find(steps: list[Note]) -> Note | None:
            same = steps[-STEADY_STEPS:]
            return same[-1] if [n.world for n in same] == [self.num_hosts] * STEADY_STEPS else None

        return self.wait(find)

    def worker_of(self, host: Host) -> int:
        """The process id of the newest worker of a host, as it is outside of it."""
        note = [note for note in self.read("begun") if note.host == host.name][-1]
        (pid,) = (pid for pid in host.processes() if inner_pid(pid) == note.pid)
        return pid

    def pause(self, since: float) -> float:
        """Seconds between the last step before the change and the first one after it."""
        after = self.back(since)
        before = [note for note in self.read("step") if note.at < after.at][-1]
        return after.at - before.at


class Hot(InPlaceJob, Led):
    """Ours, with workers that keep their processes."""

    options = ("--save-every", "off")
    arguments = ("--fetch",)


class Elastic(Contender):
    """torchrun."""

    def begin(self, hosts: Sequence[Host]) -> None:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # torch declares it elsewhere
            self.lab.address, 0, is_master=True, wait_for_workers=False
        )
        for host in hosts:
            self.start(host)

    def add(self, host: Host) -> None:
        self.num_hosts += 1
        self.start(host)

    def start(self, host: Host) -> None:
        options = {
            "nnodes": f"1:{len(self.lab.hosts)}",
            "nproc-per-node": "1",
            "max-restarts": "1000",
            "monitor-interval": "0.05",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"{self.lab.address}:{self.store.port}",
            "rdzv-id": "job",
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in RENDEZVOUS.items()),
        }
        there = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.folder)]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        torchrun += [f"--{name}={value}" for name, value in options.items()]
        told = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.run(host.command([*there, *torchrun, str(SCRIPT), "--plain"], told))


# ---------------------------------------------------------------- what happens to them


class Planned(msgspec.Struct, frozen=True):
    """A machine is taken off the list."""

    seconds: float  # to the end of the first step without it
    checkpoint: float
    load: float
    lost_steps: int


def take_off(job: Led, host: Host) -> Planned:
    before, now = job.steady(), time.time()
    job.remove(host)
    after = job.back(now)
    done = [note for note in job.read("step") if note.start == before.start][-1]
    saves = [note.seconds for note in job.read("saved")]
    loads = [note.seconds for note in job.read("loaded") if note.start > now]
    return Planned(after.at - now, median(saves), max(loads), done.step + 1 - after.step)


def put_on(job: Contender, host: Host) -> float:
    """Seconds to the end of the first step with it."""
    job.steady()
    now = time.time()
    job.add(host)
    return job.back(now).at - now


def kill_worker(job: Contender, rank: int) -> float:
    job.steady()
    pid, now = job.worker(rank), time.time()
    os.kill(pid, signal.SIGKILL)
    return job.back(now).at - now


def cut_off(job: Contender, host: Host) -> tuple[float, float]:
    """Seconds to the end of the first step without it, and when it was."""
    job.steady()
    now = time.time()
    host.cut()
    job.num_hosts -= 1
    return job.back(now).at - now, now


class Faults(msgspec.Struct, frozen=True):
    """Seconds from each to the end of the first step after it."""

    added: float
    killed: float
    cut: float
    detected: float  # that a machine was cut off, where somebody tells


class InPlace(msgspec.Struct, frozen=True):
    """Seconds of a job whose workers keep their processes, and steps that it did twice."""

    joined: float  # pause between two steps
    left: float
    killed: float  # from the kill of a worker to the end of the next step
    cut: float  # from the silence of a machine to the end of the next step
    detected: float  # of this, until the manager noticed it
    redone: int


def morph_in_place(lab: Lab) -> InPlace:
    last = lab.hosts[-1]
    with under_way(Hot, lab, len(lab.hosts)) as job:
        job.steady()
        now = time.time()
        job.remove(last)
        left = job.pause(now)
        job.steady()
        now = time.time()
        job.add(last)
        joined = job.pause(now)
        pid = job.worker_of(lab.hosts[1])
        killed, _ = lose_in_place(job, lambda: os.kill(pid, signal.SIGKILL))
        cut, cut_at = lose_in_place(job, last.cut)
        steps = [note.step for note in job.read("step")]
        redone = len(steps) - len(set(steps))
        return InPlace(joined, left, killed, cut, job.told_at("machine lost", cut_at) - cut_at, redone)


def lose_in_place(job: InPlaceJob, lose: Callable[[], object]) -> tuple[float, float]:
    """Seconds to the end of the first step of the survivors, and when the loss was."""
    job.steady()
    now = time.time()
    lose()
    job.num_hosts -= 1
    seconds = job.back(now).at - now
    job.num_hosts += 1  # it comes back
    return seconds, now


class Life(msgspec.Struct, frozen=True):
    """Run the faults on Varuna jobs and on a torchrun job in turn, and return all records."""

    ours: Faults
    planned: Planned
    in_place: InPlace
    torchruns: Faults


def live(lab: Lab) -> Life:
    last = lab.hosts[-1]
    with under_way(Led, lab, len(lab.hosts)) as job:
        planned = take_off(job, last)
        added, killed, (cut, cut_at) = put_on(job, last), kill_worker(job, 1), cut_off(job, last)
        ours = Faults(added, killed, cut, job.told_at("machine lost", cut_at) - cut_at)
    in_place = morph_in_place(lab)
    with under_way(Elastic, lab, len(lab.hosts) - 1) as other:
        added, killed, (cut, _) = put_on(other, last), kill_worker(other, 1), cut_off(other, last)
        return Life(ours, planned, in_place, Faults(added, killed, cut, 0.0))


@contextmanager
def under_way(kind: type[Job], lab: Lab, num_hosts: int) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder:
        job = kind(lab, Path(folder), num_hosts)
        try:
            yield job
        finally:
            job.close()


# ---------------------------------------------------------------- the report

TORCHRUN = "torchrun's elastic restart, tuned"
WANTED = "what is to be reached"


def morphing(repeats: int, *, quick: bool) -> list[Row]:
    if quick:
        return glimpse()
    with Lab(3, own_environment()) as lab:
        lives = measured_within(LIVES_SECONDS, repeats, lambda: live(lab))
        return [*rows_of(lives), *rows_in_place(lives)]


def rows_of(lives: Sequence[Life]) -> list[Row]:
    cut = [life.ours.cut for life in lives]
    planned = [life.planned for life in lives]
    return [
        row(
            "kill -9 of a worker → next step",
            [life.ours.killed for life in lives],
            [life.torchruns.killed for life in lives],
            0.5,
        ),
        row("machine cut off silently → next step", cut, [life.torchruns.cut for life in lives], 0.4),
        row("machine cut off silently → next step", cut, [4.0], against=WANTED),
        row(
            "machine cut off silently → detected",
            [life.ours.detected for life in lives],
            [2.0],
            against=WANTED,
        ),
        row(
            "machine added → first step with it",
            [life.ours.added for life in lives],
            [life.torchruns.added for life in lives],
            0.5,
        ),
        row(
            "planned change → next step",
            [change.seconds for change in planned],
            [2.0 + change.checkpoint + change.load for change in planned],
            against="2 s + one checkpoint + one load",
        ),
        row(
            "steps lost at a planned change",
            [change.lost_steps for change in planned],
            [0.0],
            against="none",
            unit="steps",
        ),
    ]


def rows_in_place(lives: Sequence[Life]) -> list[Row]:
    found = [life.in_place for life in lives]
    return [
        row(
            "in place: machine added, pause between two steps",
            [one.joined for one in found],
            [0.3],
            against=WANTED,
        ),
        row(
            "in place: machine removed, pause between two steps",
            [one.left for one in found],
            [0.3],
            against=WANTED,
        ),
        row(
            "in place: kill -9 of a worker → next step",
            [one.killed for one in found],
            [life.torchruns.killed for life in lives],
            0.05,
        ),
        row(
            "in place: kill -9 of a worker → next step", [one.killed for one in found], [0.3], against=WANTED
        ),
        row("in place: machine cut off → next step", [one.cut for one in found], [1.6], against=WANTED),
        row("in place: machine cut off → detected", [one.detected for one in found], [1.4], against=WANTED),
        row("in place: steps redone", [one.redone for one in found], [0.0], against="none", unit="steps"),
    ]


def glimpse() -> list[Row]:
    """The shortest life of each side: one machine, whose worker is killed."""
    with Lab(1, own_environment()) as lab:
        with under_way(Led, lab, 1) as job:
            ours = kill_worker(job, 0)
        with under_way(Elastic, lab, 1) as other:
            torchruns = kill_worker(other, 0)
    return [row("kill -9 of a worker → next step", [ours], [torchruns], 0.5)]


def own_environment() -> dict[str, str]:
    """Hosts are machines of their own, but what is set here is meant for all that is measured."""
    return {
        name: value for name, value in os.environ.items() if name != "PATH" and not {'"', "\n"} & set(value)
    }


def row(
    case: str,
    ours: Sequence[float],
    others: Sequence[float],
    target: float = 1.0,
    *,
    against: str = TORCHRUN,
    unit: str = "s",
) -> Row:
    """Make rows from the k-th turn of both sides, or from all of our turns against one number."""
    pairs = zip(ours, [*others] * len(ours) if len(others) == 1 else others, strict=True)
    # Where nothing is allowed, one is one too many.
    ratios = [mine / other if other else 1.0 + mine for mine, other in pairs]
    return Row(
        benchmark="morphing",
        case=case,
        against=against,
        unit=unit,
        ours=spread(ours),
        other=spread(others),
        ratio=spread(ratios),
        target=target,
        runs=len(ours),
    )


def manager(repeats: int, *, quick: bool) -> list[Row]:
    machines, seconds = (20, 0.5) if quick else (1000, 3.0)
    shares = [100 * share for share in manager_share(machines, seconds=seconds, repeats=repeats)]
    case = f"the manager's share of a core, {machines} machines with {DEVICES} workers each"
    runs = [measure_arrivals(machines) for _ in range(min(repeats, 3))]
    change = f"{machines} agents join in a second and half of them leave at once"
    rows = [
        row(case, shares, [20.0], against=WANTED, unit="%"),
        row(
            f"slowest status while {change}", [r.slowest_status_seconds for r in runs], [1.0], against=WANTED
        ),
        row(f"cores of the manager while {change}", [r.cores for r in runs], [1.0], against=WANTED, unit=""),
    ]
    return [msgspec.structs.replace(one, benchmark="manager") for one in rows]
