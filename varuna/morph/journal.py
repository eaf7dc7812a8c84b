"""The manager's journal: lines that let a restarted manager continue the job.

    8f3a01c2 {"type":"Launched","generation":{"number":2,...}}

Each line holds the CRC-32 of a record and the record as JSON. It is on disk before the manager acts on it.
A line that a crash has cut or a disk has changed is skipped; the others still count. Heartbeats are not
recorded: live agents reconnect and report their state.

If the disk is full, the manager continues without the journal. It tries again later, and then writes all
records that are still needed.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from varuna.codec import UNDECODABLE
from varuna.files import LineFile, write_atomic
from varuna.morph import commands
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


class MorphBegun(JournalRecord, frozen=True, tag="Morphing"):
    """Workers enter a generation in place. `GenerationLaunched` follows when all of them have."""

    generation: Generation
    last: Generation
    lost: tuple[int, ...]  # ranks of the last generation
    whole: bool  # each replica of a stage held the whole state of the stage
    why: str
    base: Generation | None = None  # the last generation that was entered
    holds: tuple[tuple[int, ...], ...] = ()  # ranks of it whose state each rank has


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


_decoder: msgspec.json.Decoder[JournalRecord] = msgspec.json.Decoder(
    JobBegun | GenerationLaunched | MorphBegun | SaveRequested | StoreSeen | CountsChanged | JobOver
)


RETRY_SECONDS = 5.0
"""Time between attempts to write a journal that could not be written."""


class JournalReading(msgspec.Struct, frozen=True):
    """The content of a journal file."""

    records: tuple[JournalRecord, ...] = ()  # of the last job
    num_damaged: int = 0  # lines that were skipped


class Journal:
    """The journal file, open for writing. Only one manager may have it open."""

    def __init__(self, path: Path, records: Sequence[JournalRecord] = ()) -> None:
        """Replace the file by `records`, which are all that a restarted manager needs to know."""
        self.problem = ""  # why the file lacks records; "": it is complete
        self._file = LineFile(path, fsync=True)
        self._needed: list[JournalRecord] = []
        self._retry_at = 0.0
        for record in records:
            self._keep(record)
        self._write_needed()

    def write(self, record: JournalRecord) -> None:
        """Append a record. If that fails, `problem` says why, and `retry` writes it later."""
        self._keep(record)
        if self.problem:
            self._write_needed()
            return
        try:
            self._file.append(_line(record))
        except OSError as error:
            self._fail(error)

    def retry(self, now: float) -> None:
        """Write what is missing, if something is."""
        if self.problem and now >= self._retry_at:
            self._retry_at = now + RETRY_SECONDS
            self._write_needed()

    def close(self) -> None:
        self._file.close()

    def _keep(self, record: JournalRecord) -> None:
        """Keep the last record of each kind, in order; drop those that `record` replaces."""
        if isinstance(record, JobBegun):
            self._needed.clear()
        replaced: tuple[type[JournalRecord], ...] = (type(record),)
        if isinstance(record, GenerationLaunched):
            replaced = (GenerationLaunched, MorphBegun, SaveRequested)
        elif isinstance(record, MorphBegun):
            replaced = (MorphBegun, SaveRequested)
        self._needed = [*(kept for kept in self._needed if not isinstance(kept, replaced)), record]

    def _write_needed(self) -> None:
        """Replace the file, atomically, by the records that are still needed."""
        self._file.close()
        text = b"".join(_line(record) + b"\n" for record in self._needed).decode()
        try:
            write_atomic(self._file.path, text, private=True)
            self.problem = ""
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.problem = f"{self._file.path} cannot be written: {error.strerror or error}"


def _line(record: JournalRecord) -> bytes:
    data = msgspec.json.encode(record)
    return b"%08x %b" % (zlib.crc32(data), data)


def _read_line(line: bytes) -> JournalRecord | None:
    """Return the record, or None if the line is damaged. Earlier releases wrote no checksum."""
    if not line.startswith(b"{"):
        checksum, _, line = line.partition(b" ")
        if checksum != b"%08x" % zlib.crc32(line):
            return None
    try:
        return _decoder.decode(line)
    except UNDECODABLE:
        return None


def read_journal(path: Path) -> JournalReading:
    """Return the records of the last job. Skip damaged lines."""
    records: list[JournalRecord] = []
    num_damaged = 0
    for line in filter(None, path.read_bytes().split(b"\n")) if path.exists() else ():
        record = _read_line(line)
        if record is None:
            num_damaged += 1
            continue
        if isinstance(record, JobBegun):
            records.clear()
        records.append(record)
    return JournalReading(tuple(records), num_damaged)


def records_of(
    before: JobState, after: JobState, found: Iterable[commands.Command], *, seconds: float
) -> Iterator[JournalRecord]:
    """Yield the records of one decision and its commands. The manager has run for `seconds`."""
    if after.store != before.store:
        yield StoreSeen(after.store)
    if counts_changed(before, after):
        yield counts_record(after, seconds)
    if before.phase == "morphing" != after.phase and before.generation is not None:
        yield GenerationLaunched(before.generation)
    for command in found:
        if isinstance(command, commands.Launch):
            yield GenerationLaunched(command.generation)
        elif isinstance(command, commands.Morph):
            whole = after.morph_whole
            base, holds = after.morph_base, after.morph_holds
            yield MorphBegun(
                command.generation, command.last, command.lost, whole, command.why, base=base, holds=holds
            )
        elif isinstance(command, commands.SaveAndEnd):
            yield SaveRequested(command.generation)
        elif isinstance(command, commands.Finish):
            yield JobOver(command.verdict)


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


def restore_state(
    records: Iterable[JournalRecord], *, settings: ManagerSettings, now: float, last_number: int = 0
) -> JobState:
    """Return the state of a restarted manager, which expects its agents to reconnect.

    The journal may lack its last records. So the next generation gets a number above all known ones:
    those of the records, `last_number`, and those that the agents report when they connect.
    """
    state = JobState(
        settings=settings,
        since=now,
        attach_until=now + settings.attach_seconds,
        next_number=last_number + 1,
        save_requested=True,
        failed_before=-1,
    )
    for record in records:
        if isinstance(record, GenerationLaunched):
            state = _with_generation(state, record.generation, now)
        elif isinstance(record, MorphBegun):
            state = _with_morph(state, record)
        elif isinstance(record, SaveRequested):
            if state.generation is not None and state.generation.number == record.generation:
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


def last_logged_number(log_dir: Path) -> int:
    """Return the highest generation that has a log folder on this machine; 0 if there is none."""
    numbers = [path.name.removeprefix("generation_") for path in log_dir.glob("generation_*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


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
        next_number=max(state.next_number, generation.number + 1),
        members=members,
        progressed_at=now,
        morphed_from=None,
        morph_lost=(),
        morph_whole=True,
        morph_base=None,
        leaving=(),
    )


def _with_morph(state: JobState, record: MorphBegun) -> JobState:
    """Return the state in the middle of a morph. Machines that leave are members until they are free."""
    seen, last = state.attach_until - state.settings.lost_seconds, record.last
    state = _with_generation(state, record.generation, state.since)
    leaving = {
        name: Member(name, listed=False, agent=agent, seen=seen, warm=True, workers=last.number)
        for name, agent, ranks in zip(last.machines, last.agents, last.ranks, strict=True)
        if name not in state.members and not set(ranks) <= set(record.lost)
    }
    return msgspec.structs.replace(
        state,
        phase="morphing",
        reason=record.why,
        members={**state.members, **leaving},
        leaving=tuple(leaving),
        leaving_since=state.since,
        morphed_from=last,
        morph_lost=record.lost,
        morph_whole=record.whole,
        morph_base=record.base,
        morph_holds=record.holds,
    )
