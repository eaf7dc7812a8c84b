"""The recorded intervals of a worker's last steps, in two files of bounded size in the log folder.

generation_1/rank_0.trace      the newest steps, appended by the worker: a length and a message for each
generation_1/rank_0.trace.old  the steps before; replaced when the newer file is full
"""

import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from varuna.addresses import machine_identity
from varuna.codec import UNDECODABLE
from varuna.environment import VarunaEnvironment
from varuna.files import write_all
from varuna.observe.record import Entry, Snapshot, merge, shifted, step_ends, to_timeline
from varuna.types import Timeline

FILE_BYTES = 2 * 2**20
"""Size at which a file is replaced; a worker keeps at most two."""
SUFFIX, OLD_SUFFIX = ".trace", ".trace.old"
BETWEEN_STEPS = ("save", "morph", "between")
LEAST_SECONDS = 1e-3
"""Other work between two steps appears if it takes longer."""
WRITE_SECONDS = 0.25
"""Shorter steps are written together: after this time, and at most so many."""
MAX_WAITING = 16
MAX_FILES = 1000
"""Files that a log folder is asked for, those of the newest generations."""
_NAME = re.compile(r"(?:generation_(\d{1,9})/)?rank_(\d{1,9})\.(trace(?:\.old)?)")
_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
"""Bytes of the length before each step."""


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """The intervals of one rank in one step, on its own clock."""

    step: int
    rank: int
    stage: int
    num_ranks: int  # of the job in this step
    written: float  # seconds since 1970, to find the newest of a step that ran twice
    machine: str  # whose clock it is; a host name in files of earlier versions
    generation: int  # 0: of a job without a manager
    entries: list[Entry]


class TraceFile(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A file of a worker, named by the generation and rank in which its process was started."""

    generation: int  # 0: of a job without a manager
    rank: int
    stream: Literal["trace", "trace.old"]

    def path(self, folder: Path) -> Path:
        folder = folder / f"generation_{self.generation}" if self.generation else folder
        return folder / f"rank_{self.rank}.{self.stream}"


Pending = tuple[int, int, int, int, int, Snapshot]
"""Step, rank, stage, number of ranks, generation, and the intervals of the step."""


class StepTracer:
    """Writes the intervals of each step after the next one has started, and of short steps together.

    A full disk ends the trace, not the job.
    """

    def __init__(
        self, path: Path | None, *, file_bytes: int = FILE_BYTES, write_seconds: float = WRITE_SECONDS
    ) -> None:
        self._path, self._file_bytes, self._write_seconds = path, file_bytes, write_seconds
        self._fd, self._size = -1, 0
        self._pending: Pending | None = None
        self._extra: list[Entry] = []  # before the pending step and after it
        # Steps, when each was over, when its optimizer was if nothing came between, and its extra intervals.
        self._waiting: list[tuple[Pending, float, float | None, list[Entry]]] = []
        self._write_at = float("-inf")
        self._encoder = msgspec.msgpack.Encoder()
        self._machine = machine_identity()

    @property
    def is_on(self) -> bool:
        return self._path is not None

    def note(self, what: str, started: float) -> None:
        """Add an interval between two steps that ends now: a save or a morph."""
        if self._path is not None:
            self._extra.append((what, -1, started, time.perf_counter()))
            self.flush()

    def note_between(self, started: float) -> None:
        """Add the time from `started` to now that is neither a save nor a morph, where it is long."""
        if self._path is None or (now := time.perf_counter()) - started <= LEAST_SECONDS:
            return
        for _, _, start, stop in [*sorted(self._extra, key=lambda entry: entry[2]), ("", -1, now, now)]:
            if start - started > LEAST_SECONDS:
                self._extra.append(("between", -1, started, start))
            started = max(started, stop)

    def leave(
        self, step: int, rank: int, stage: int, num_ranks: int, recorded: Snapshot, *, generation: int = 0
    ) -> None:
        """End a step. Its intervals are written later: a device may not have finished them."""
        if self._path is not None:
            self._pending = (step, rank, stage, num_ranks, generation, recorded)

    def enter(self, now: float, *, uninterrupted: bool) -> None:
        """Start a step and write the previous one. `uninterrupted`: only its optimizer has run since."""
        if self._pending is None:
            return
        optimized = now if uninterrupted else None
        self._waiting.append((self._pending, time.time(), optimized, self._extra))
        self._pending, self._extra = None, []
        if now >= self._write_at or len(self._waiting) >= MAX_WAITING:
            self._write_at = now + self._write_seconds
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait, because the next one may come late."""
        waiting, self._waiting = self._waiting, []
        try:
            self._write(b"".join(self._encode(*step) for step in waiting))
        except OSError:
            self._path = None

    def _encode(
        self, step: Pending, written: float, optimized: float | None, extra: Sequence[Entry]
    ) -> bytes:
        number, rank, stage, num_ranks, generation, recorded = step
        entries = recorded()
        if optimized is not None and entries:
            stop = max(entry[3] for entry in entries)
            entries.append(("optimizer", -1, stop, max(stop, optimized)))
        entries += extra
        trace = StepTrace(number, rank, stage, num_ranks, written, self._machine, generation, entries)
        record = self._encoder.encode(trace)
        return _LENGTH.pack(len(record)) + record

    def _write(self, data: bytes) -> None:
        if not data or self._path is None:
            return
        if self._fd < 0 or self._size + len(data) > self._file_bytes:
            if self._fd >= 0:
                full, self._fd = self._fd, -1
                os.close(full)
                with suppress(FileNotFoundError):  # somebody has deleted it
                    os.replace(self._path, self._path.with_suffix(OLD_SUFFIX))
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
            self._size = 0
        write_all(self._fd, data)
        self._size += len(data)

    def close(self) -> None:
        """Write the last steps, and close the file."""
        self.enter(time.perf_counter(), uninterrupted=False)
        self.flush()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def open_tracer(environment: VarunaEnvironment, rank: int) -> StepTracer:
    """Return the tracer of a worker; without a log folder it writes nothing."""
    if environment.log_dir is None:
        return StepTracer(None)
    folder, number = Path(environment.log_dir), environment.generation
    return StepTracer(
        (folder if number is None else folder / f"generation_{number}") / f"rank_{rank}{SUFFIX}"
    )


def split_records(data: bytes) -> Iterator[bytes]:
    """Yield the encoded steps of a file. An incomplete last one, of a worker that was killed, is left out."""
    start = 0
    while start + LENGTH_BYTES <= len(data):
        (length,) = _LENGTH.unpack_from(data, start)
        start += LENGTH_BYTES
        if start + length > len(data):
            return
        yield data[start : start + length]
        start += length


def decode_traces(data: bytes) -> list[StepTrace]:
    """Return the steps of a file, up to the first one that is damaged."""
    found = []
    decoder = msgspec.msgpack.Decoder(StepTrace)
    with suppress(*UNDECODABLE):
        for record in split_records(data):
            found.append(decoder.decode(record))
    return found


def list_traces(folder: Path) -> list[TraceFile]:
    """Return the files of a log folder, those of a worker's newest steps first. Raise OSError."""
    found = []
    for path in (*folder.glob("rank_*.trace*"), *folder.glob("generation_*/rank_*.trace*")):
        if name := _NAME.fullmatch(path.relative_to(folder).as_posix()):
            stream: Literal["trace", "trace.old"] = "trace" if name[3] == "trace" else "trace.old"
            found.append(TraceFile(int(name[1] or 0), int(name[2]), stream))
    return sorted(found)[-MAX_FILES:]


def read_traces(folder: Path) -> list[StepTrace]:
    """Return all steps that the workers of a log folder have kept. Raise OSError."""
    found = []
    for file in list_traces(folder):
        with suppress(FileNotFoundError):  # its worker replaces it now
            found += decode_traces(file.path(folder).read_bytes())
    return found


def choose_steps(traces: Iterable[StepTrace], first: int, stop: int) -> dict[int, list[StepTrace]]:
    """Return the steps `first` to `stop - 1` by number, each with one trace of every rank.

    A step that ran twice, because its results were lost, is shown as it ran last.
    """
    newest: dict[int, dict[int, StepTrace]] = {}
    for trace in sorted(traces, key=lambda trace: (trace.generation, trace.written)):
        if first <= trace.step < stop:
            ranks = newest.setdefault(trace.step, {})
            if any(
                o.generation != trace.generation or o.num_ranks != trace.num_ranks for o in ranks.values()
            ):
                ranks.clear()
            ranks[trace.rank] = trace
    return {step: [newest[step][rank] for rank in sorted(newest[step])] for step in sorted(newest)}


def step_timeline(traces: Sequence[StepTrace]) -> Timeline:
    """Return a step of all ranks on one clock. It starts at zero."""
    return whole_timeline([traces])


def whole_timeline(steps: Sequence[Sequence[StepTrace]]) -> Timeline:
    """Return several steps one after the other, on the clock of the first one's first machine.

    A step ends on all ranks together, which aligns the clocks of its machines. If a step has no machine of
    the steps before, the times at which the steps were written tell how far apart they are.
    """
    shifts: dict[str, float] = {}  # seconds from the clock of each machine to the common one
    timelines: list[Timeline] = []
    end, written = 0.0, 0.0
    for traces in filter(None, steps):
        own = [to_timeline(trace.entries, trace.rank, trace.stage) for trace in traces]
        ends = step_ends(own, [trace.machine for trace in traces])
        known = [ends[machine] + shifts[machine] for machine in ends if machine in shifts]
        if known or not shifts:
            end = (known or list(ends.values()) or [0.0])[0]
        else:
            end += traces[0].written - written
        written = traces[0].written
        shifts.update({machine: end - stop for machine, stop in ends.items()})
        for timeline, trace in zip(own, traces, strict=True):
            timelines.append(shifted(timeline, shifts.get(trace.machine, 0.0)))
    return merge(timelines)
