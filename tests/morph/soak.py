"""A soak test: one job on separate hosts survives one fault after the other.

    python -m tests.morph.soak --faults 50 --seed 7

After each fault the job must make a step. At the end it must have finished by itself, with the losses of
one undisturbed process, every sample of every step used once, no process left on any host, and only
complete checkpoints. A failed soak reports the seed, the faults so far and the manager's last output.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import msgspec

from benchmarks.report import machine
from tests.launch.jobs import environment
from tests.morph.hosts.lab import ROOT, Host, Lab, command
from tests.morph.jobs import Job
from varuna.checkpoint.load import all_checkpoints
from varuna.checkpoint.store.store import open_store
from varuna.morph.clock import SuspendAwareClock

PATIENCE_SECONDS = 120.0
"""The soak fails after this time without the expected output; a flapping machine waits half a minute."""
SLOW_SECONDS = 0.05
"""A step takes at least this long while faults are injected."""
SAVE_EVERY = 10
DATA, BATCH, CHUNK = 144, 48, 4
"""Every number of replicas up to 4 has the same micro-batches, which BatchNorm needs for equal losses."""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.cut, self.drop = CutPoint(), nn.Dropout(0.2)

    def forward(self, x, y):
        hidden = self.drop(torch.tanh(self.norm(self.first(x))))
        return ((self.last(self.cut(hidden)) - y) ** 2).mean()
"""

SCRIPT = f"""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from varuna import CutPoint, SampleOrder, Varuna


{NET}

def slow_fsync(fd, fsync=os.fsync):  # the disk blocks while the file exists
    while Path("slow_disk").exists():
        Path("in_save").touch()
        time.sleep(0.01)
    fsync(fd)


def last_step():
    try:
        return int(Path("stop_at").read_text())
    except FileNotFoundError:
        return sys.maxsize


os.fsync = slow_fsync
torch.set_default_dtype(torch.float64)  # a difference is a mistake, not rounding
torch.manual_seed(1)
x = torch.randn({DATA}, 4)
y = x.sum(1, keepdim=True)
stage_map = os.environ.get("VARUNA_STAGE_TO_RANK_MAP", "0;")
model = Varuna(Net(), stage_map, {{"x": x[:4], "y": y[:4]}}, {BATCH}, {CHUNK}, device="cpu", seed=3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.set_optimizer(optimizer)
generation = int(os.environ.get("VARUNA_GENERATION", 0))
if generation:
    model.resume("store")
    resumed = os.environ.get("VARUNA_RESUME_STEP")  # a newer one may be broken
    assert resumed is None or int(resumed) >= model.iteration, (resumed, model.iteration)
    print("begins at", model.iteration)
order = SampleOrder({DATA}, batch_size={BATCH}, seed=5)
while model.iteration < last_step():
    step = model.iteration
    share = order.replica(step=step, replica=model.rank_within_stage, num_replicas=model.data_depth)
    if model.stage == 0 and generation:
        print("uses", step, *share)
    loss, _ = model.step({{"x": x[share], "y": y[share]}})
    optimizer.step()
    model.zero_grad()
    print("step", step, "loss", loss, "generation", generation)
    if generation and model.iteration % {SAVE_EVERY} == 0:
        # Alternate between blocking and background saves, since both must survive the faults.
        now = model.iteration // {SAVE_EVERY} % 2 == 1
        model.checkpoint("store", keep_last=2, shard=True, tempdir=None if now else "scratch")
        if now:
            print("saved", model.iteration)
    if generation and not Path("stop_at").exists():
        time.sleep({SLOW_SECONDS})
print("trained")
"""

SAVING = "varuna: saving: "
KEPT = "varuna: machines kept: "  # a machine is off the list, but works on until others replace it
STEP = re.compile(r"\[rank 0\] step (\d+) loss \S+ generation (\d+)")
CHATTER = re.compile(r"\[rank 0\] (step|uses|saved|\[W)")
LAUNCHED = re.compile(r"varuna: generation: (\d+): .* on ([^(]*)")


clock = SuspendAwareClock(time.monotonic)
"""Does not count time in which the whole soak was suspended."""


class Stuck(AssertionError):
    """The job makes no progress."""


def within_patience(
    complaint: str, *, seconds: float = PATIENCE_SECONDS, pause_seconds: float = 0.0
) -> Iterator[None]:
    """Retry until PATIENCE_SECONDS have passed."""
    deadline = clock.now() + seconds
    while clock.now() < deadline:
        yield
        time.sleep(pause_seconds)
    raise Stuck(f"{complaint} for {seconds:.0f} s")


def wait(seconds: float) -> None:
    until = clock.now() + seconds
    while clock.now() < until:
        time.sleep(0.01)


class SoakedJob(Job):
    """Fails if its output does not come in time."""

    generation = 0
    morphing = True  # no generation runs, or it is ending
    step = -1

    def wait_for(self, wanted: str | Callable[[str], bool]) -> str:
        for line in self._lines_in_time():
            if wanted(line) if callable(wanted) else wanted in line:
                return line
        raise Stuck(f"the manager ended without {wanted!r}")

    def _lines_in_time(self) -> Iterator[str]:
        for _ in within_patience("the job says nothing that was waited for"):
            with suppress(Empty):
                while (line := self._queue.get(timeout=0.1)) is not None:
                    self._note(line)
                    yield line
                return

    def read_all(self) -> None:
        """Read the output so far."""
        with suppress(Empty):
            while (line := self._queue.get_nowait()) is not None:
                self._note(line)
            raise Stuck("the manager ended")

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if line.startswith(("varuna: saving: ", "varuna: generation ended: ")):
            self.morphing = True
        elif found := LAUNCHED.match(line):
            self.generation, self.morphing = int(found[1]), False
        elif (found := STEP.match(line)) and int(found[2]) == self.generation:
            self.step = int(found[1])

    def is_step(self, line: str) -> bool:
        """Return True for a step of the current generation, not of a machine that was cut off before."""
        found = STEP.match(line)
        return found is not None and int(found[2]) == self.generation

    def wait_for_steps(self, count: int) -> None:
        for _ in range(count):
            self.wait_for(self.is_step)

    def wait_for_ended(self) -> int:
        for _ in self._lines_in_time():
            pass
        return self.process.wait()


class InjectedFault(msgspec.Struct):
    """One injected fault and its outcome."""

    fault: str
    what: str
    seconds: float | None = None  # until the next step; None if it never came

    def __str__(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.2f}"
        return f"{seconds:>7} s  {self.fault}: {self.what}"


class Soak:
    """The job, its hosts, and the faults: `FAULTS` lists the methods that inject one."""

    def __init__(self, folder: Path, lab: Lab, *, seed: int, stages: int) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        self.stages = stages
        self.folder = folder
        self.lab = lab
        self.history: list[InjectedFault] = []
        self.log_dirs: list[Path] = []
        (folder / "varuna").symlink_to(ROOT / "varuna")  # other machines find the library here
        (folder / "scratch").mkdir()
        (folder / "home").mkdir()  # the manager's, on a small disk
        command(["mount", "-t", "tmpfs", "-o", "size=4m", "soak", str(folder / "home")])
        for host in lab.hosts:
            host.mount(folder / "scratch", 32 << 20)
        self.job = SoakedJob(
            folder,
            machines=len(lab.hosts),
            stages=stages,
            script=SCRIPT,
            addresses=[host.address for host in lab.hosts],
            options=["--ssh", shlex.join(lab.ssh), "--batch_size", str(BATCH), "--chunk_size", str(CHUNK)],
        )
        self.flipped: set[int] = set()  # steps of checkpoints that a fault has damaged
        self._began = 0.0
        self._generation = 0

    # ------------------------------------------------------------ running

    def begin(self) -> None:
        self.job.wait_for_steps(SAVE_EVERY + 2)
        self.log_dirs.append(self.log_dir)

    def do(self, fault: str) -> InjectedFault:
        self.history.append(InjectedFault(fault, ""))
        getattr(self, fault)()
        done = self.history[-1]
        assert done.seconds is not None, fault
        return done

    def happens(self, what: str, *victims: Host) -> None:
        """Note the fault; earlier output does not count."""
        self.job.read_all()
        self.history[-1].what = " ".join([what, *(host.name for host in victims)])
        self._generation = self.job.generation
        self._began = clock.now()

    def recovers(self, *, restarts: bool = True) -> None:
        """Wait for a step; if the job `restarts`, of a new generation."""
        if restarts:
            self.job.wait_for(lambda line: self.job.generation > self._generation)
        self.job.wait_for_steps(1)
        self.history[-1].seconds = round(clock.now() - self._began, 2)
        self.job.wait_for_steps(3)

    # ------------------------------------------------------------ helpers

    @property
    def log_dir(self) -> Path:
        return Path(self.job.status()["log_dir"])

    def machines(self, *states: str) -> list[Host]:
        by_address = {host.address: host for host in self.lab.hosts}
        return [
            by_address[one["machine"]]
            for one in self.job.status()["machines"]
            if not states or one["state"] in states
        ]

    def at_work(self, count: int = 1) -> list[Host]:
        """Return some machines with workers; wait if the job is restarting."""
        for _ in within_patience(f"fewer than {count} machines are at work", pause_seconds=0.1):
            self.job.read_all()
            found = self.machines("at work")
            workers = [worker for one in self.job.status()["machines"] for worker in one["workers"]]
            if len(found) >= count and sum(worker["pid"] > 0 for worker in workers) >= len(found):
                return self.random.sample(found, count)
        raise AssertionError("patience ends before the loop does")

    def enough_without(self, gone: Sequence[Host]) -> bool:
        there = [host for host in self.machines("at work", "spare", "warming up") if host not in gone]
        return len(there) >= self.stages

    def signal_worker(self, host: Host, number: int) -> None:
        inner = self.job.worker(self.lab.hosts.index(host) + 1)
        os.kill(host.outer_pid(inner), number)

    def signal_agent(self, host: Host, number: int) -> None:
        inner = self.job.agent(self.lab.hosts.index(host) + 1)
        os.kill(host.outer_pid(inner), number)

    def lose(self, hosts: Sequence[Host], *, dies: bool) -> None:
        for host in hosts:
            host.kill() if dies else host.cut()

    def bring_back(self, hosts: Sequence[Host], *, died: bool) -> None:
        for host in hosts:
            if died:
                host.boot()
                host.mount(self.folder / "scratch", 32 << 20)
            else:
                host.reconnect()

    def lose_and_bring_back(self, hosts: Sequence[Host], *, dies: bool) -> None:
        self.outlive(
            hosts, lambda: self.lose(hosts, dies=dies), repair=lambda: self.bring_back(hosts, died=dies)
        )

    def outlive(
        self,
        hosts: Sequence[Host],
        damage: Callable[[], object],
        *,
        repair: Callable[[], object],
        sign: str = "varuna: machine lost: ",
    ) -> None:
        """Repair the hosts when the job continues without them, or has stopped because too few are left."""
        left = self.enough_without(hosts)
        damage()
        if left:
            self.recovers()
        else:
            self.job.wait_for(sign)
        repair()
        if not left:
            self.recovers()

    def write_list(self, hosts: Sequence[Host]) -> None:
        self.job.write_list(*(self.lab.hosts.index(host) + 1 for host in hosts))

    # ------------------------------------------------------------ processes

    def worker_is_killed(self) -> None:
        (host,) = self.at_work()
        self.happens("kill -9 of the worker of", host)
        self.signal_worker(host, signal.SIGKILL)
        self.recovers()

    def agent_is_killed(self) -> None:
        (host,) = self.at_work()
        self.happens("kill -9 of the agent of", host)
        self.signal_agent(host, signal.SIGKILL)
        self.recovers()

    def manager_is_killed(self) -> None:
        self.at_work()
        self.job.wait_for_steps(1)  # a generation whose start was not sent to all machines cannot train
        log = self.log_dirs[-1] / f"generation_{self.job.generation}" / "rank_0.out"
        self.happens("kill -9 of the manager")
        self.job.process.kill()
        self.job.wait_for_ended()
        seen = log.read_text().count("\nstep ")
        for _ in within_patience("nothing is trained without the manager", pause_seconds=0.02):
            if self.job.morphing or log.read_text().count("\nstep ") >= seen + 5:
                break
        self.job.start("--resume")
        self.recovers(restarts=False)

    def manager_is_killed_while_morphing(self) -> None:
        """Kill it after it has requested a save; the job must continue afterwards."""
        (host,) = self.at_work()
        pause = self.random.choice([0.0, 0.1, 0.3, 1.0])
        self.happens(f"kill -9 of the manager {pause:g} s after it wanted to leave", host)
        self.write_list([other for other in self.lab.hosts if other is not host])
        kept = KEPT in self.job.wait_for(lambda line: line.startswith((SAVING, KEPT)))
        wait(pause)
        self.job.process.kill()
        self.job.wait_for_ended()
        self.write_list(self.lab.hosts)
        self.job.start("--resume")
        self.recovers(restarts=not kept)

    def manager_and_a_machine_are_lost(self) -> None:
        (host,) = self.at_work()
        dies = self.random.random() < 0.5
        self.happens("kill -9 of the manager, and the end of", host)
        self.job.process.kill()
        self.lose([host], dies=dies)
        self.job.wait_for_ended()
        self.job.start("--resume")
        self.job.wait_for("is resumed")
        self.bring_back([host], died=dies)
        self.recovers(restarts=dies)

    def agent_stands_still(self) -> None:
        (host,) = self.at_work()
        self.happens("SIGSTOP of the agent of", host)
        pid = host.outer_pid(self.job.agent(self.lab.hosts.index(host) + 1))
        self.outlive(
            [host],
            lambda: os.kill(pid, signal.SIGSTOP),
            repair=lambda: os.kill(pid, signal.SIGCONT),
        )

    def worker_stands_still(self) -> None:
        (host,) = self.at_work()
        self.happens("SIGSTOP of a worker, and SIGCONT after a while, on", host)
        pid = host.outer_pid(self.job.worker(self.lab.hosts.index(host) + 1))
        os.kill(pid, signal.SIGSTOP)
        wait(3)  # longer than the limit for silent machines; nothing must restart
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        self.recovers(restarts=False)

    def manager_stands_still(self) -> None:
        self.happens("SIGSTOP of the manager, and SIGCONT after a while")
        self.job.process.send_signal(signal.SIGSTOP)
        wait(3)
        self.job.process.send_signal(signal.SIGCONT)
        self.recovers(restarts=False)

    def worker_hangs(self) -> None:
        (host,) = self.at_work()
        self.happens("SIGSTOP for good of the worker of", host)
        self.signal_worker(host, signal.SIGSTOP)
        self.recovers()

    # ------------------------------------------------------------ machines

    def machine_dies(self) -> None:
        hosts = self.at_work()
        self.happens("the end of", *hosts)
        self.lose_and_bring_back(hosts, dies=True)

    def machine_is_cut_off(self) -> None:
        hosts = self.at_work()
        self.happens("a cut to", *hosts)
        self.lose_and_bring_back(hosts, dies=False)

    def two_machines_are_lost(self) -> None:
        hosts = self.at_work(min(2, len(self.machines("at work"))))
        dies = self.random.random() < 0.5
        self.happens("the end of" if dies else "a cut to", *hosts)
        self.lose_and_bring_back(hosts, dies=dies)

    def machine_is_lost_within_a_save(self) -> None:
        hosts = self.at_work()
        dies = self.random.random() < 0.5
        (self.folder / "in_save").unlink(missing_ok=True)
        (self.folder / "slow_disk").touch()
        for _ in within_patience("nothing is saved", pause_seconds=0.002):
            if (self.folder / "in_save").exists():
                break
        self.happens(f"in the middle of a save, {'the end of' if dies else 'a cut to'}", *hosts)

        def lose_for_good() -> None:
            self.lose(hosts, dies=dies)
            self.job.wait_for("varuna: generation ended: ")
            (self.folder / "slow_disk").unlink()

        self.outlive(hosts, lose_for_good, repair=lambda: self.bring_back(hosts, died=dies), sign="")

    def machine_is_lost_while_morphing(self) -> None:
        """Lose it when the workers save, when they restart, or shortly before or after."""
        leaver, *others = self.at_work(min(2, len(self.machines("at work"))))
        sign = self.random.choice([SAVING, "varuna: generation: "])
        pause = self.random.choice([0.0, 0.05, 0.2, 0.5])
        dies = self.random.random() < 0.5
        victims = others or [leaver]
        self.happens(f"while morphing ({sign.split()[1]} + {pause:g} s), the end of", *victims)
        self.write_list([host for host in self.lab.hosts if host is not leaver])
        self.job.wait_for(lambda line: line.startswith((sign, KEPT)))
        wait(pause)
        self.lose(victims, dies=dies)
        if others:  # otherwise it may have left before it was lost
            self.job.wait_for(f"machine lost: {victims[0].address}")
        self.bring_back(victims, died=dies)
        self.write_list(self.lab.hosts)
        self.recovers()

    def all_machines_are_lost(self) -> None:
        dies = self.random.random() < 0.5
        hosts = list(self.lab.hosts)
        self.random.shuffle(hosts)
        some = self.random.randint(self.stages, len(hosts) - 1)
        self.at_work()
        self.happens("the end of all" if dies else "a cut to all")
        self.lose(hosts, dies=dies)
        self.job.wait_for("generation ended")
        self.bring_back(hosts[:some], died=dies)
        self.recovers()
        self.bring_back(hosts[some:], died=dies)

    def link_is_slow(self) -> None:
        (host,) = self.at_work()
        self.happens("a link of 256 kbit/s to", host)
        host.slow("256kbit")
        try:
            self.recovers(restarts=False)
            self.job.wait_for_steps(2 * SAVE_EVERY)
        finally:
            host.unslow()

    # ------------------------------------------------------------ clocks and disks

    def clock_jumps(self) -> None:
        (host,) = self.at_work()
        seconds = self.random.choice([-86400.0, -600.0, 600.0, 86400.0])
        self.happens(f"a clock that jumps by {seconds:+.0f} s, then kill -9 of the worker of", host)
        host.set_clock(seconds)
        self.signal_worker(host, signal.SIGKILL)
        self.recovers()
        self.job.wait_for_steps(SAVE_EVERY)

    def scratch_disk_is_full(self) -> None:
        """The disk for snapshots of saves is full when workers start."""
        (host,) = self.at_work()
        filling = host.path(self.folder / "scratch") / "fill"
        self.happens("a full scratch disk, then kill -9 of the worker of", host)
        fill(filling)
        self.signal_worker(host, signal.SIGKILL)
        self.recovers()
        self.job.wait_for_steps(3 * SAVE_EVERY)
        filling.unlink()

    def log_disk_is_full(self) -> None:
        """The machine cannot run workers; the job continues without it until the disk is free."""
        (host,) = self.at_work()
        logs = self.log_dirs[-1]
        self.happens("a full disk for the logs, then kill -9 of the worker of", host)
        host.mount(logs, 4096)
        fill(host.path(logs) / "fill")
        self.outlive(
            [host], lambda: self.signal_worker(host, signal.SIGKILL), repair=lambda: host.unmount(logs)
        )

    def newest_checkpoint_is_flipped(self) -> None:
        """One bit changes in the newest checkpoint; then a worker is killed."""
        (host,) = self.at_work()
        store = open_store(str(self.folder / "store"))
        for _ in within_patience("fewer than two checkpoints are complete", pause_seconds=0.05):
            whole = [one for one in all_checkpoints(store) if one.manifest and not one.problem]
            if len(whole) >= 2:
                break
        newest = whole[-1].manifest
        assert newest is not None
        key, entry = self.random.choice(sorted(newest.tensors.items()))
        self.happens(f"a flipped bit in {key} of checkpoint {newest.facts.step}, then kill -9 of", host)
        self.flipped.add(newest.facts.step)
        with suppress(FileNotFoundError):  # a newer one has replaced it
            flip(self.folder / "store" / f"varuna_ckpt_{newest.facts.step}" / entry.file, entry.first)
        self.signal_worker(host, signal.SIGKILL)
        self.recovers()

    def home_disk_is_full(self) -> None:
        """The manager cannot write its journal; the job restarts nevertheless."""
        (host,) = self.at_work()
        filling = self.folder / "home" / "fill"
        restart = self.random.random() < 0.5
        self.happens(f"a full disk of the manager, {'its kill -9, ' * restart}then kill -9 of", host)
        fill(filling)
        self.signal_worker(host, signal.SIGKILL)
        if restart:
            self.job.process.kill()
            self.job.wait_for_ended()
            filling.unlink()
            self.job.start("--resume")
            self.recovers()
        else:
            self.recovers()
            filling.unlink()

    def journal_is_cut(self) -> None:
        """The end of the journal is lost while the manager is down."""
        self.at_work()
        (journal,) = (self.folder / "home").glob("jobs/*/journal.jsonl")
        self.happens("kill -9 of the manager, and a journal that lost its end")
        self.job.process.kill()
        self.job.wait_for_ended()
        size = journal.stat().st_size
        left = self.random.randrange(size // 2, size)
        os.truncate(journal, left)
        self.history[-1].what += f" ({left} of {size} bytes are left)"
        self.job.start("--resume")
        self.recovers(restarts=False)

    def stores(self, host: Host) -> list[int]:
        return [pid for pid in host.processes() if comm_of(pid) == "varuna-store"]

    def store_is_killed(self) -> None:
        """Kill the store of the next generation, or that of the running one."""
        hosts = [host for host in self.machines("at work") if self.stores(host)]
        host = self.random.choice(hosts or self.at_work())
        # The running store has connections of all ranks.
        found = sorted(self.stores(host), key=lambda pid: len(os.listdir(f"/proc/{pid}/fd")))
        which = self.random.choice(["spare", "running"])
        pid = found[0 if which == "spare" else -1]
        self.happens(f"kill -9 of a {which} store on", host)
        os.kill(pid, signal.SIGKILL)
        self.job.wait_for(lambda line: ("store" in line and "has ended" in line) or "store ended" in line)
        self.recovers(restarts=False)

    # ------------------------------------------------------------ the list

    def list_flaps(self) -> None:
        """A machine is taken off the list and put back, again and again."""
        (host,) = self.at_work()
        times = self.random.randint(2, 4)
        self.happens(f"taken off the list and put back {times} times:", host)
        for _ in range(times):
            self.write_list([other for other in self.lab.hosts if other is not host])
            wait(self.random.choice([0.2, 1.0, 2.0]))
            self.write_list(self.lab.hosts)
            wait(self.random.choice([0.2, 1.0]))
        self.recovers(restarts=False)

    def list_is_nonsense(self) -> None:
        """Write an empty or invalid list, or each machine twice: the manager only logs it."""
        path = self.folder / "machines"
        addresses = [host.address for host in self.lab.hosts]
        text, log_line = self.random.choice(
            [
                ("", "list ignored"),
                ("\0\1 rm -rf\n-oProxyCommand=no\n", "is not a machine address"),
                ("\n".join([*addresses, *addresses]), "appears more than once"),
            ]
        )
        self.happens(f"a list that reads {text[:20]!r}")
        path.write_text(text)
        self.job.wait_for(log_line)
        self.recovers(restarts=False)
        self.write_list(self.lab.hosts)

    def machines_are_unlisted_and_listed(self) -> None:
        """A machine leaves only if enough others are left."""
        hosts = self.at_work()
        self.happens("taken off the list:", *hosts)
        left = self.enough_without(hosts)
        self.write_list([host for host in self.lab.hosts if host not in hosts])
        if left:
            self.recovers()
        else:
            self.job.wait_for(KEPT)
        self.write_list(self.lab.hosts)
        if not left:
            self.recovers(restarts=False)

    # ------------------------------------------------------------ notices and signals

    def machine_is_noticed(self) -> None:
        """The job drops the machine in time, then the machine dies."""
        (host,) = self.at_work()
        self.happens("a notice of 20 s for", host)

        def go_and_return() -> None:
            host.kill()
            self.bring_back([host], died=True)

        self.outlive(
            [host],
            lambda: self.job.varuna("drain", host.address, "--seconds", "20"),
            repair=go_and_return,
            sign="varuna: saving: ",
        )

    def agent_gets_sigterm(self) -> None:
        (host,) = self.at_work()
        self.happens("SIGTERM to the agent of", host)
        self.signal_agent(host, signal.SIGTERM)
        self.recovers()

    def job_gets_sigusr1(self) -> None:
        """Send SIGUSR1 to the manager or to a worker; then start the job again."""
        (host,) = self.at_work()
        to_manager = self.random.random() < 0.5
        self.happens(f"SIGUSR1 to {'the manager' if to_manager else f'the worker of {host.name}'}")
        if to_manager:
            self.job.process.send_signal(signal.SIGUSR1)
        else:
            self.signal_worker(host, signal.SIGUSR1)
        code = self.job.wait_for_ended()
        assert code == 0 and "varuna: stopped: " in self.job.text, code
        self.job.generation = self._generation = 0
        self.job.start("--resume")
        self.recovers()
        self.log_dirs.append(self.log_dir)

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """V34, V42, V47: the checks at the top of this file."""
        self.wait_for_returns()
        last = self.job.step + 50
        part = self.folder / "stop_at.part"
        part.write_text(str(last))
        part.rename(self.folder / "stop_at")
        code = self.job.wait_for_ended()
        assert code == 0 and "finished: every worker ended normally" in self.job.text, code
        self.check_losses(last)
        verified = self.job.varuna("checkpoint", "verify", "--all", str(self.folder / "store"))
        broken = {int(step) for step in re.findall(r"^checkpoint (\d+): broken$", verified.stdout, re.M)}
        assert broken <= self.flipped, verified.stdout + verified.stderr
        assert self.job.processes_left() == []
        for _ in within_patience("processes are left on hosts", seconds=10, pause_seconds=0.1):
            if not any(host.processes() for host in self.lab.hosts):
                break

    def wait_for_returns(self) -> None:
        """Wait until machines that were cut off have killed their workers."""
        for _ in within_patience("some machines do not come back", pause_seconds=0.1):
            self.job.read_all()
            back = self.machines("at work", "spare", "warming up")
            if all(host in back or not host.processes() for host in self.lab.hosts):
                return

    def check_losses(self, last: int) -> None:
        losses: dict[int, float] = {}
        samples: dict[int, list[int]] = {}
        saved = 0
        for folder in self.generation_folders():
            logs = {path.name: path.read_text() for path in folder.glob("rank_*.out")}
            begun = re.search(r"^begins at (\d+)$", logs.get("rank_0.out", ""), re.M)
            if begun is None:
                continue  # it was lost before it had loaded a checkpoint
            first = int(begun[1])
            assert first >= saved, f"{folder} goes on from {first}, though {saved} had been saved"
            for step in [step for step in samples if step >= first]:
                del samples[step]
                losses.pop(step, None)
            for name, text in logs.items():
                for step, share in re.findall(r"^uses (\d+) (.*)$", text, re.M):
                    samples.setdefault(int(step), []).extend(int(sample) for sample in share.split())
                if name == "rank_0.out":
                    losses |= read_losses(text)
                    done = {int(step) for step in re.findall(r"^saved (\d+)$", text, re.M)}
                    saved = max([saved, *(done - self.flipped)])
        reference = reference_losses(self.folder)
        assert sorted(losses) == sorted(reference) == list(range(last)), (last, len(losses), len(reference))
        off = {
            step: (losses[step], reference[step])
            for step in reference
            if not close(losses[step], reference[step])
        }
        assert not off, f"{len(off)} losses differ, such as {dict(list(off.items())[:5])}"
        self.worst = max(abs(losses[step] - reference[step]) / reference[step] for step in reference)
        per_epoch = -(-DATA // BATCH)
        for epoch in range(last // per_epoch):
            steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
            used = Counter(sample for step in steps for sample in samples[step])
            assert used == dict.fromkeys(range(DATA), 1), f"epoch {epoch}: {used}"

    def generation_folders(self) -> list[Path]:
        return [
            folder
            for logs in self.log_dirs
            for folder in sorted(logs.glob("generation_*"), key=lambda path: int(path.name.split("_")[1]))
        ]

    def report(self) -> str:
        rows = [f"{number:3}{done}" for number, done in enumerate(self.history, start=1)]
        return "\n".join([f"seed {self.seed}, {self.stages} stages, {len(self.lab.hosts)} hosts", *rows])


_NAMES = list(vars(Soak))
_BETWEEN = _NAMES[_NAMES.index("worker_is_killed") : _NAMES.index("end")]
FAULTS = tuple(name for name in _BETWEEN if name != "stores")


def close(one: float, other: float) -> bool:
    """Compare with a tolerance: another number of replicas sums in another order."""
    return abs(one - other) <= 1e-5 * abs(other) + 1e-9


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def comm_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def reference_losses(folder: Path) -> dict[int, float]:
    """Return the losses of one undisturbed process."""
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return read_losses(done.stdout)


def read_losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+) ", text, re.M)}


@contextmanager
def soaking(folder: Path, *, seed: int, stages: int, hosts: int) -> Iterator[Soak]:
    """Run a soak; add the seed, the faults so far and the manager's last output to any error."""
    with Lab(hosts) as lab:
        soak = Soak(folder, lab, seed=seed, stages=stages)
        with unmounting(folder / "home"), soak.job:
            try:
                soak.begin()
                yield soak
            except BaseException as error:
                (folder / "home" / "fill").unlink(missing_ok=True)
                tail = [line for line in soak.job.lines if not CHATTER.match(line)][-60:]
                error.add_note("\n".join(["", soak.report(), "", *tail]))
                raise


@contextmanager
def unmounting(folder: Path) -> Iterator[None]:
    try:
        yield
    finally:
        command(["umount", "--lazy", str(folder)])


def choose(chooser: random.Random, count: int) -> list[str]:
    """Choose each fault equally often, but a hang, which takes a minute, only once."""
    often = [fault for fault in FAULTS if fault != "worker_hangs"]
    chosen = [*often, "worker_hangs"]
    while len(chosen) < count:
        chosen += often
    chosen = chosen[:count]
    chooser.shuffle(chosen)
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=FAULTS, help="these, in this order")
    parser.add_argument("--out", type=Path, help="a JSON file that gets the result")
    parser.add_argument("--keep", action="store_true", help="leave the folder where it is")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="varuna-soak-"))
    print(folder, flush=True)
    faults = options.only or choose(random.Random(options.seed), options.faults)
    began = time.monotonic()
    try:
        with soaking(folder, seed=options.seed, stages=options.stages, hosts=options.hosts) as soak:
            for fault in faults:
                done = soak.do(fault)
                print(f"{len(soak.history):3}{done}", flush=True)
            soak.end()
        print(f"clean: {len(faults)} faults in {time.monotonic() - began:.0f} s, {soak.job.step + 1} steps")
        if options.out:
            add_result(soak, time.monotonic() - began, options.out)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)


def add_result(soak: Soak, seconds: float, path: Path) -> None:
    """Add the result to those of the same machine."""
    known = json.loads(path.read_text()) if path.exists() else {}
    runs = known.get("runs", []) if known.get("machine") == machine() else []
    found = {"machine": machine(), "runs": [*runs, result(soak, seconds)]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def result(soak: Soak, seconds: float) -> dict[str, Any]:
    return {
        "seed": soak.seed,
        "stages": soak.stages,
        "hosts": len(soak.lab.hosts),
        "outcome": "clean",
        "steps": soak.job.step + 1,
        "generations": len(soak.generation_folders()),
        "worst_relative_loss": soak.worst,
        "seconds": round(seconds, 1),
        "faults": [msgspec.structs.asdict(done) for done in soak.history],
    }


if __name__ == "__main__":
    main()
