"""The manager's journal: JSON lines that let a restarted manager continue the job.

Each line is on disk before the manager acts on it. The last line may be incomplete after a crash and
is then ignored. Heartbeats are not recorded: live agents reconnect and report their state.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from varuna.morph.state import Generation, JobState, JobVerdict, ManagerSettings, Member


class JournalRecord(msgspec.Struct, frozen=True):
    """One line. The tags are part of the file format."""


class JobBegun(JournalRecord, frozen=True, tag="Begun"):
    """A job starts. Earlier records belong to another job."""

    job: str
    port: int  # port of the manager; agents look for a restarted manager there
    log_dir: str


class GenerationLaunched(JournalRecord, frozen=True, tag="Launched"):
    generation: Generation


class SaveRequested(JournalRecord, frozen=True, tag="Saving"):
    """Workers save and exit, and the job continues afterwards."""

    generation: int


class StoreSeen(JournalRecord, frozen=True, tag="StoreSeen"):
    store: str


class CountsChanged(JournalRecord, frozen=True, tag="Counted"):
    """Crashes, losses and progress so far."""

    crashes: int
    losses: int
    iteration: int
    iteration_at_crash: int
    seconds: float  # run time of all managers of this job


class JobOver(JournalRecord, frozen=True, tag="Over"):
    verdict: JobVerdict


_decoder = msgspec.json.Decoder(
    JobBegun | GenerationLaunched | SaveRequested | StoreSeen | CountsChanged | JobOver
)


class Journal:
    """The journal file, open for writing. Only one manager may have it open."""

    def __init__(self, path: Path) -> None:
        complete = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, complete)  # remove an incomplete last line

    def write(self, record: JournalRecord) -> None:
        os.write(self._fd, msgspec.json.encode(record) + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def read_journal(path: Path) -> tuple[JournalRecord, ...]:
    """Return the records of the last job, up to the first line that cannot be read."""
    records: list[JournalRecord] = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else ():
        try:
            record = _decoder.decode(line)
        except msgspec.DecodeError:
            break
        if isinstance(record, JobBegun):
            records.clear()
        records.append(record)
    return tuple(records)


def counts_changed(before: JobState, after: JobState) -> bool:
    """Return True if a new `CountsChanged` record is needed; of the steps, only the first matters."""
    old, new = (
        (state.crashes, state.losses, state.iteration_at_crash, state.best_iteration > 0)
        for state in (before, after)
    )
    return old != new


def counts_record(state: JobState, seconds: float) -> CountsChanged:
    return CountsChanged(
        state.crashes,
        state.losses,
        state.best_iteration,
        state.iteration_at_crash,
        state.seconds_before + seconds,
    )


def restore_state(records: Iterable[JournalRecord], *, settings: ManagerSettings, now: float) -> JobState:
    """Return the state of a restarted manager, which expects its agents to reconnect."""
    state = JobState(settings=settings, since=now, attach_until=now + settings.attach_seconds)
    for record in records:
        if isinstance(record, GenerationLaunched):
            state = _with_generation(state, record.generation, now)
        elif isinstance(record, SaveRequested):
            deadline = state.attach_until + settings.save_seconds
            state = msgspec.structs.replace(state, phase="saving", deadline=deadline)
        elif isinstance(record, StoreSeen):
            state = msgspec.structs.replace(state, store=record.store)
        elif isinstance(record, CountsChanged):
            state = msgspec.structs.replace(
                state,
                crashes=record.crashes,
                losses=record.losses,
                best_iteration=record.iteration,
                iteration_at_crash=record.iteration_at_crash,
                seconds_before=record.seconds,
            )
        elif isinstance(record, JobOver):
            state = msgspec.structs.replace(state, phase="over", verdict=record.verdict)
    return state


def _with_generation(state: JobState, generation: Generation, now: float) -> JobState:
    # The agents count as connected until `attach_until`; those that do not reconnect by then are lost.
    seen = state.attach_until - state.settings.lost_seconds
    members = {
        name: Member(name, agent=agent, seen=seen, warm=True, workers=generation.number)
        for name, agent in zip(generation.machines, generation.agents, strict=True)
    }
    return msgspec.structs.replace(
        state,
        phase="running",
        reason="the manager was restarted",
        generation=generation,
        next_number=generation.number + 1,
        members=members,
        progressed_at=now,
    )
