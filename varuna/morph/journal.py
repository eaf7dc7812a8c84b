"""What a manager must not forget: a file of JSON lines, each on disk before it counts.

A manager that was killed reads it and goes on; its last line may be torn, which is as if it had never
been written. Heartbeats are not in it: agents that still run will say so when they dial in again.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from varuna.morph.state import Generation, JobState, Member, Settings, Verdict


class Record(msgspec.Struct, frozen=True, tag=True):
    pass


class Begun(Record, frozen=True):
    """A job has begun; what stands before it is another's."""

    job: str
    port: int  # that the manager listens on: agents will look for it there again
    log_dir: str


class Launched(Record, frozen=True):
    generation: Generation


class Saving(Record, frozen=True):
    """The generation's workers are asked to save and to end: that they do is not the end of the job."""

    generation: int


class StoreSeen(Record, frozen=True):
    store: str


class Counted(Record, frozen=True):
    """Crashes and losses so far, in a time, and how far the job had come."""

    crashes: int
    losses: int
    iteration: int
    iteration_at_crash: int
    seconds: float  # that this was watched for, by all managers


class Over(Record, frozen=True):
    verdict: Verdict


_decoder = msgspec.json.Decoder(Begun | Launched | Saving | StoreSeen | Counted | Over)


class Journal:
    """The file, open for writing; one manager at a time, which its owner has to see to."""

    def __init__(self, path: Path) -> None:
        whole = _whole_part(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, whole)  # a torn line must not run into the next

    def write(self, record: Record) -> None:
        os.write(self._fd, msgspec.json.encode(record) + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _whole_part(path: Path) -> int:
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except FileNotFoundError:
        return 0


def read(path: Path) -> tuple[Record, ...]:
    """The records of the last job; a line that is no record, which only a torn one can be, ends them."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return ()
    records: list[Record] = []
    for record in _decoded(lines):
        if isinstance(record, Begun):
            records.clear()
        records.append(record)
    return tuple(records)


def _decoded(lines: Iterable[bytes]) -> Iterator[Record]:
    for line in lines:
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError:
            return


def counts_anew(before: JobState, after: JobState) -> bool:
    """Whether what has happened is worth a line; a step after the first is not."""

    def told(state: JobState) -> tuple[int, ...]:
        return state.crashes, state.losses, state.iteration_at_crash, int(state.best_iteration > 0)

    return told(before) != told(after)


def count(state: JobState, seconds: float) -> Counted:
    return Counted(
        state.crashes,
        state.losses,
        state.best_iteration,
        state.iteration_at_crash,
        state.seconds_before + seconds,
    )


def restore(records: Iterable[Record], *, settings: Settings, now: float) -> JobState:
    """The state of a manager that was killed: its agents are expected to dial in again."""
    state = JobState(settings=settings, since=now, attach_until=now + settings.attach_seconds)
    for record in records:
        if isinstance(record, Launched):
            state = _launched(state, record.generation, now)
        elif isinstance(record, Saving):
            deadline = state.attach_until + settings.save_seconds
            state = msgspec.structs.replace(state, phase="saving", deadline=deadline)
        elif isinstance(record, StoreSeen):
            state = msgspec.structs.replace(state, store=record.store)
        elif isinstance(record, Counted):
            state = msgspec.structs.replace(
                state,
                crashes=record.crashes,
                losses=record.losses,
                best_iteration=record.iteration,
                iteration_at_crash=record.iteration_at_crash,
                seconds_before=record.seconds,
            )
        elif isinstance(record, Over):
            state = msgspec.structs.replace(state, phase="over", verdict=record.verdict)
    return state


def _launched(state: JobState, generation: Generation, now: float) -> JobState:
    # They count as connected and are given time: those that do not show up in it are lost.
    seen = now + state.settings.attach_seconds - state.settings.lost_seconds
    members = {
        name: Member(name, agent=agent, seen=seen, warm=True, workers=generation.number)
        for name, agent in zip(generation.machines, generation.agents, strict=True)
    }
    return msgspec.structs.replace(
        state,
        phase="running",
        reason="the manager was started again",
        generation=generation,
        next_number=generation.number + 1,
        members=members,
        progressed_at=now,
    )
