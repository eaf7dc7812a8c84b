"""Plays a trace of spot machines on a real job: machines are added, announced and taken away in real time."""

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from varuna.chaos.hosts.lab import Host
from varuna.chaos.injector import InjectedFault, Injector
from varuna.chaos.job import JobStuck, clock
from varuna.chaos.machines import ChaosMachine, LoopbackMachine
from varuna.files import write_atomic
from varuna.secure.framing import FramingError
from varuna.simulate.job_events import Removal, note_removal
from varuna.simulate.traces import MachineChange, MarketTrace

Progress = Callable[[float, float], None]
"""Called with the seconds that were played, and with all of them."""

POLL_SECONDS = 0.02
NOTICE_POLL_SECONDS = 0.25
"""Repeat a notice after this time, until the manager runs and has read the machine in its list."""


def fit_trace(trace: MarketTrace, *, most: int, speedup: float) -> MarketTrace:
    """Return the trace of every k-th machine, `speedup` times as fast, from its first machine on.

    k is the smallest number with at most `most` machines at any time.
    """
    names = list(dict.fromkeys(name for change in trace.changes for name in change.added))
    for k in range(1, len(names) + 1):
        kept = set(names[::k])
        changes = [_only(change, kept) for change in trace.changes]
        found = msgspec.structs.replace(trace, changes=tuple(c for c in changes if _matters(c)))
        if found.most_machines <= most:
            break
    else:
        raise ValueError(f"{trace.source} has no machine")
    start = found.changes[0].at
    scaled = tuple(
        msgspec.structs.replace(change, at=(change.at - start) / speedup) for change in found.changes
    )
    return msgspec.structs.replace(found, changes=scaled, end=(trace.end - start) / speedup)


def _only(change: MachineChange, kept: set[str]) -> MachineChange:
    return msgspec.structs.replace(
        change,
        removed=tuple(name for name in change.removed if name in kept),
        added=tuple(name for name in change.added if name in kept),
        noticed=tuple(name for name in change.noticed if name in kept),
    )


def _matters(change: MachineChange) -> bool:
    return bool(change.removed or change.added or change.noticed)


def names_of(trace: MarketTrace) -> list[str]:
    """Return the machines of a trace, in the order in which they appear."""
    return list(dict.fromkeys(name for change in trace.changes for name in change.added))


def has_faults(trace: MarketTrace) -> bool:
    """Return whether machines come or go after the start: then a run without any change proves nothing."""
    _, *later = trace.changes
    return any(change.removed or change.added for change in later)


class MarketPlayer:
    """Adds and removes the machines of a job as a trace says."""

    def __init__(
        self, run: Injector, trace: MarketTrace, machines: dict[str, ChaosMachine], *, notice_seconds: float
    ) -> None:
        """`machines`: by their names in the trace. Those of the first change are there already."""
        self._run = run
        self._trace = trace
        self._machines = machines
        self._notice_seconds = notice_seconds
        self._started = 0.0
        self._pending: list[tuple[InjectedFault, float, int]] = []  # fault, its time, its generation
        self._rows: list[tuple[float, str, str]] = []  # what was played
        self._played_until = trace.end
        self._unannounced: dict[str, float] = {}  # machines that the manager must hear of, and their removals
        self._announce_at = 0.0
        self._leaving: set[ChaosMachine] = set()  # those with a notice
        self._num_steps = 0
        self._waits_since = clock.now()  # for a step
        self._has_changed = False  # no step came since the last change

    def play(self, *, started: float, on_progress: Progress) -> bool:
        """Play the trace from the time `started` on; return False if the job has ended before.

        Raise JobStuck if no step comes in time although there are enough machines.
        """
        self._started = started
        first, *later = self._trace.changes
        self._rows += [(0.0, "add", self._machines[name].address) for name in first.added]
        events: list[tuple[float, Callable[[], None]]] = [
            (change.at, partial(self._change, change)) for change in later
        ]
        events += [
            (notice.at, partial(self._notice, notice.machine, notice.deadline))
            for notice in (*self._trace.announced(), *self._trace.notices(self._notice_seconds))
        ]
        for at, happen in sorted(events, key=lambda event: event[0]):
            if not self._wait_until(at, on_progress):
                return False
            happen()
        if not self._wait_until(self._trace.end, on_progress):
            return False
        recovered = self._wait_while(lambda _: self._has_changed and self._enough_machines(), on_progress)
        self._played_until = max(self._trace.end, time.monotonic() - self._started)
        return recovered

    def write_played(self, path: Path, *, begun_at: float) -> None:
        """Write what was played, as a trace that `varuna simulate` reads.

        Its time starts with the manager, at `begun_at` seconds since 1970.
        """
        late = max(0.0, begun_at - (time.time() - (time.monotonic() - self._started)))
        rows = [*self._rows, (self._played_until, "end", "")]
        lines = [f"{max(0.0, at - late):.2f},{event},{machine}" for at, event, machine in rows]
        write_atomic(path, "\n".join(["seconds,event,machine", *lines, ""]))

    # ------------------------------------------------------------ one change

    def _wait_until(self, at: float, on_progress: Progress) -> bool:
        return self._wait_while(lambda now: now < at, on_progress)

    def _wait_while(self, waits: Callable[[float], bool], on_progress: Progress) -> bool:
        while waits(now := time.monotonic() - self._started):
            if self._run.job.read_output():
                self._played_until = now
                return False
            self._settle()
            self._check_steps()
            self._keep_away()
            self._announce()
            on_progress(min(now, self._trace.end), self._trace.end)
            time.sleep(POLL_SECONDS)
        return True

    def _check_steps(self) -> None:
        """Raise JobStuck if no step comes in time, counted from when there were enough machines."""
        job, now = self._run.job, clock.now()
        if len(job.steps) > self._num_steps:
            self._num_steps, self._has_changed, self._waits_since = len(job.steps), False, now
        elif not self._enough_machines():
            self._waits_since = now
        elif now - self._waits_since > job.patience_seconds:
            raise JobStuck(f"no step for {job.patience_seconds:.0f} s, although there are enough machines")

    def _enough_machines(self) -> bool:
        """Return True if the job can run. A machine with a notice may have left already."""
        leaving = {machine.address for machine in self._leaving}
        return len(set(self._run.listing.addresses()) - leaving) >= self._run.stages

    def _change(self, change: MachineChange) -> None:
        run = self._run
        removed = [self._machines[name] for name in change.removed]
        added = [self._machines[name] for name in change.added]
        status = run.job.answering()
        working = {one.machine for one in status.machines if one.state == "at work"} if status else set()
        for name in change.removed:
            self._unannounced.pop(name, None)
        self._leaving.difference_update(removed)
        if removed:
            self._note("removed:", "remove", removed, restarts=any(one.address in working for one in removed))
            for machine in removed:
                removal = Removal(time.time(), machine.address)
                machine.kill()
                if status is not None:
                    note_removal(Path(status.log_dir), removal)
        if added:
            self._note("added:", "add", added, restarts=False)
            for machine in added:
                if isinstance(machine, Host):
                    machine.boot()
        run.listing.remove(*removed)
        run.listing.add(*added)
        run.count_redone()  # reads the steps so far
        self._num_steps, self._has_changed = len(run.job.steps), True

    def _keep_away(self) -> None:
        """End agents that the manager starts on machines that are gone, before they connect."""
        for machine in self._run.listing.off:
            if isinstance(machine, LoopbackMachine):
                machine.kill_started(self._run.job.process.pid)

    def _notice(self, name: str, deadline: float) -> None:
        self._unannounced[name] = deadline
        self._leaving.add(self._machines[name])
        self._announce_at = 0.0
        self._announce()

    def _announce(self) -> None:
        """Send the notices that the manager has not accepted: it may still start, or read its list."""
        now = time.monotonic() - self._started
        if not self._unannounced or now < self._announce_at:
            return
        self._announce_at = now + NOTICE_POLL_SECONDS
        job = self._run.job
        for name, deadline in list(self._unannounced.items()):
            machine = self._machines[name]
            with suppress(OSError, FramingError, ValueError):  # it does not answer yet
                reply = job.request(
                    "drain", machine=machine.address, seconds=max(0.0, deadline - now), why="the trace"
                )
                if reply.ok:
                    del self._unannounced[name]
                    self._note("a notice for", "notice", [machine], restarts=True)

    def _note(self, what: str, event: str, machines: list[ChaosMachine], *, restarts: bool) -> None:
        run = self._run
        run.count_redone()  # reads the steps so far: those that end later are next steps
        now = time.monotonic()
        names = " ".join(machine.name for machine in machines)
        fault = InjectedFault(event, f"{what} {names}", at=round(now - self._started, 2))
        run.history.append(fault)
        self._pending.append((fault, now, run.job.generation if restarts else -1))
        self._rows += [(fault.at, event, machine.address) for machine in machines]

    def _settle(self) -> None:
        """Note the time of the next step after each change; after a loss, that of a new generation."""
        job = self._run.job
        if not self._pending or not job.steps:
            return
        (generation, _), seen = next(reversed(job.steps.items()))
        for fault, at, old in list(self._pending):
            if seen > at and generation > old:
                fault.seconds = round(seen - at, 2)
                self._pending.remove((fault, at, old))
        self._run.count_redone()
