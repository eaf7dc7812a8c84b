"""Injects faults into a job, one after the other, and waits for its next step after each."""

import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.chaos.hosts.lab import Host
from varuna.chaos.job import ChaosJob, clock, within_patience
from varuna.chaos.machines import ChaosMachine
from varuna.files import write_atomic
from varuna.morph.protocol.messages import MachineStatus

PRESENT = ("at work", "spare", "warming up")
LOST = "varuna: machine lost: "
LEFT_OUT = "left out: "
SETTLE_STEPS = 3
"""Steps after a fault before the next one."""


class FaultRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to inject. None: a default of the fault, or a random choice."""

    kind: str
    machine: int | None = None  # number from 1 on, in the order of the list
    seconds: float | None = None  # duration, or the deadline of a notice
    rate: str | None = None  # of a slow link, in the units of tc


class InjectedFault(msgspec.Struct):
    """One injected fault and its outcome."""

    fault: str
    what: str
    at: float = 0.0  # seconds since the first fault could happen
    seconds: float | None = None  # until the next step; None if it never came
    steps_redone: int = 0
    samples_redone: int = 0

    @property
    def happened(self) -> bool:
        return bool(self.what) and not self.what.startswith(LEFT_OUT)

    def __str__(self) -> str:
        seconds = "-" if self.seconds is None else f"{self.seconds:.2f}"
        return f"{seconds:>7} s  {self.fault}: {self.what}"


class FaultSkipped(Exception):
    """The fault cannot happen to this job; the message says why."""


def pause(seconds: float) -> None:
    until = clock.now() + seconds
    while clock.now() < until:
        time.sleep(0.01)


class MachineListing:
    """The machine list of the job: a file that the manager watches."""

    def __init__(self, path: Path, machines: Sequence[ChaosMachine]) -> None:
        self.off: list[ChaosMachine] = []
        self._path = path
        self._machines = machines

    def remove(self, *machines: ChaosMachine) -> None:
        """Take machines off the list."""
        self.off += [machine for machine in machines if machine not in self.off]
        self._write()

    def add(self, *machines: ChaosMachine) -> None:
        """Put machines on the list again."""
        self.off = [machine for machine in self.off if machine not in machines]
        self._write()

    def addresses(self) -> list[str]:
        return [machine.address for machine in self._machines if machine not in self.off]

    def _write(self) -> None:
        self.write_text("".join(f"{address}\n" for address in self.addresses()))

    def write_text(self, text: str) -> None:
        write_atomic(self._path, text)


def goes_on_without(machines: Sequence[ChaosMachine], line: str) -> bool:
    """Return whether a line of the manager announces a generation on other machines only."""
    is_generation = line.startswith("varuna: generation: ")
    at_work = re.split(r"[ ,]+", line.partition(" on ")[2].partition(" (")[0])
    return is_generation and not any(machine.address in at_work for machine in machines)


class Injector:
    """The job, its machines, and what the faults need from both."""

    def __init__(
        self,
        job: ChaosJob,
        machines: Sequence[ChaosMachine],
        *,
        machine_list: Path,
        seed: int,
        stages: int,
        batch_size: int = 0,
    ) -> None:
        """`stages`: the machines without which the job cannot run."""
        self.job = job
        self.all_machines = list(machines)
        self.random = random.Random(seed)
        self.seed = seed
        self.stages = stages
        self.history: list[InjectedFault] = []
        self.request = FaultRequest(kind="")
        self.listing = MachineListing(machine_list, self.all_machines)
        self.flipped: set[int] = set()  # steps of checkpoints that a fault has damaged
        self._batch_size = batch_size
        self._started = clock.now()
        self._began = 0.0
        self._generation = 0
        self._redone = 0

    def now(self) -> float:
        """Return the seconds since the first fault could happen."""
        return clock.now() - self._started

    def start_clock(self) -> None:
        self._started = clock.now()

    # ------------------------------------------------------------ one fault

    def do(self, request: FaultRequest, inject: Callable[["Injector"], None]) -> InjectedFault:
        self.count_redone()
        self.request = request
        self.history.append(InjectedFault(request.kind, "", at=round(clock.now() - self._started, 2)))
        inject(self)
        self.count_redone()
        return self.history[-1]

    def count_redone(self) -> None:
        """Book steps that were run again under the last fault."""
        self.job.read_steps()
        redone = self.job.steps_redone
        if self.history:
            self.history[-1].steps_redone += redone - self._redone
            self.history[-1].samples_redone = self.history[-1].steps_redone * self._batch_size
        self._redone = redone

    def happens(self, what: str, *victims: ChaosMachine) -> None:
        """Note the fault; earlier output does not count."""
        self.job.read_all()
        self.history[-1].what = " ".join([what, *(machine.name for machine in victims)])
        self._generation = self.job.generation
        self._began = clock.now()
        self.history[-1].at = round(self._began - self._started, 2)

    def recovers(self, *, restarts: bool = True) -> None:
        """Wait for a step; if the job `restarts`, of a new generation."""
        if restarts:
            self.job.wait_for_generation(self._generation)
        self.job.wait_for_steps(1)
        self.history[-1].seconds = round(clock.now() - self._began, 2)
        self.job.wait_for_steps(SETTLE_STEPS)

    def wait_until_left(self, machines: Sequence[ChaosMachine]) -> None:
        """Wait until these machines have no workers."""
        addresses = {machine.address for machine in machines}
        complaint = f"workers on {', '.join(machine.name for machine in machines)}, which have to leave,"
        for _ in within_patience(complaint, seconds=self.job.patience_seconds, pause_seconds=0.1):
            self.job.read_all()
            status = self.job.answering()
            if status and not any(one.workers for one in status.machines if one.machine in addresses):
                return

    # ------------------------------------------------------------ machines

    @property
    def log_dir(self) -> Path:
        return Path(self.job.status().log_dir)

    def machines(self, *states: str) -> list[ChaosMachine]:
        """Return the machines that the manager knows, in these states."""
        by_address = {machine.address: machine for machine in self.all_machines}
        return [
            by_address[one.machine]
            for one in self.job.status().machines
            if one.machine in by_address and (not states or one.state in states)
        ]

    def at_work(self, count: int = 1, *, phase: str = "") -> list[ChaosMachine]:
        """Return some machines with workers, the wanted one first; wait if the job is restarting.

        `phase`: wait until the job is in this phase.
        """
        complaint = f"fewer than {count} machines are at work"
        for _ in within_patience(complaint, seconds=self.job.patience_seconds, pause_seconds=0.1):
            self.job.read_all()
            status = self.job.answering()
            if status is None or (phase and status.phase != phase):
                continue
            working = [one for one in status.machines if one.state == "at work"]
            found = [one.machine for one in working if any(worker.pid > 0 for worker in one.workers)]
            if count <= len(found) == len(working):  # a resumed manager may not have heard of all workers yet
                return self._choose([one for one in self.all_machines if one.address in found], count)
        raise AssertionError("patience ends before the loop does")

    def _choose(self, found: list[ChaosMachine], count: int) -> list[ChaosMachine]:
        chosen = self.random.sample(found, count)
        if self.request.machine is not None:
            wanted = self.all_machines[self.request.machine - 1]
            if wanted in found:
                chosen = [wanted, *(one for one in chosen if one is not wanted)][:count]
        return chosen

    def enough_without(self, gone: Sequence[ChaosMachine]) -> bool:
        there = [machine for machine in self.machines(*PRESENT) if machine not in gone]
        return len(there) >= self.stages

    def status_of(self, machine: ChaosMachine) -> MachineStatus:
        (found,) = (one for one in self.job.status().machines if one.machine == machine.address)
        return found

    def worker_pid(self, machine: ChaosMachine) -> int:
        """Return the process of the machine's first worker; wait if the job is restarting."""
        complaint = f"{machine.name} has no worker"
        for _ in within_patience(complaint, seconds=self.job.patience_seconds, pause_seconds=0.1):
            if pids := [worker.pid for worker in self.status_of(machine).workers if worker.pid > 0]:
                return machine.outer_pid(pids[0])
        raise AssertionError("patience ends before the loop does")

    def agent_pid(self, machine: ChaosMachine) -> int:
        pid = self.status_of(machine).agent_pid
        if pid is None:
            raise ProcessLookupError(f"{machine.name} has no agent")
        return machine.outer_pid(pid)

    def kill_worker(self, machine: ChaosMachine) -> None:
        os.kill(self.worker_pid(machine), signal.SIGKILL)

    # ------------------------------------------------------------ losing machines

    def lose(self, machines: Sequence[ChaosMachine], *, dies: bool) -> None:
        for machine in machines:
            machine.kill() if dies else as_host(machine).cut()

    def bring_back(self, machines: Sequence[ChaosMachine], *, died: bool) -> None:
        for machine in machines:
            machine.boot() if died else as_host(machine).reconnect()

    def lose_and_bring_back(self, machines: Sequence[ChaosMachine], *, dies: bool) -> None:
        self.outlive(
            machines,
            lambda: self.lose(machines, dies=dies),
            repair=lambda: self.bring_back(machines, died=dies),
        )

    def outlive(
        self,
        machines: Sequence[ChaosMachine],
        damage: Callable[[], object],
        *,
        repair: Callable[[], object],
        sign: str = LOST,
    ) -> None:
        """Repair the machines when the job continues without them, or has stopped as too few are left."""
        left = self.enough_without(machines)
        damage()
        if left:
            self.recovers()
        else:  # unless another machine is ready in time
            self.job.wait_for(lambda line: sign in line or goes_on_without(machines, line))
        repair()
        if not left:
            self.recovers()

    def any_death(self) -> bool:
        """Choose between the death of a machine and a cut. A loopback machine cannot be cut off."""
        return not isinstance(self.all_machines[0], Host) or self.random.random() < 0.5

    def resume_manager(self, *, restarts: bool = False) -> None:
        """Start the manager again; wait until it manages the job."""
        self.job.start("--resume")
        self.at_work()
        self.recovers(restarts=restarts)


def as_host(machine: ChaosMachine) -> Host:
    """Return a machine that has a network and disks of its own."""
    if not isinstance(machine, Host):
        raise ValueError(f"{machine.name} has no network and no disk of its own (use hosts: --hosts)")
    return machine


def fill(path: Path) -> None:
    """Write a file until its disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
