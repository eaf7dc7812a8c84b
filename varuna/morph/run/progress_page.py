"""Progress of a worker in a memory page that it shares with its agent, through a small file.

The worker writes numbers in each step, in about a microsecond. The agent reads them at each heartbeat.
There is no locking: a reader may see numbers of two moments, which is good enough for progress.
"""

import mmap
import os
import struct
import time
from functools import cache
from pathlib import Path

from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import open_private
from varuna.morph.state import CodeIdentity, MorphParts, WorkerProgress

PAGE = 8192
_NUMBERS = struct.Struct("<qqqqqqqddddqqqdqdddqqddq")  # in the order of SharedProgressWriter._write
_COPY_OF = struct.Struct("<q")
_COPY_OF_AT = 19 * _COPY_OF.size  # its place in _NUMBERS, whose fields have 8 bytes each
_TEXT = struct.Struct("<H")
_TEXT_AT = 192
MAX_TEXT = 2048
_NOTE_AT = 2304
MAX_NOTE = 1536
_SAVE_PROBLEM_AT = 4096
_WHY_NOT_AT = 5760
_CODE_AT = 7312
MAX_CODE = 768


class ProgressWriter:
    """Ignores progress: no agent reads it."""

    watched = False
    _left = 0.0

    def enter(self) -> None:
        """Note the start of a step."""
        self._left = self._left or time.monotonic()

    def leave(self, iteration: int, compute_seconds: float, *, missing_samples: int = 0) -> float:
        """Note the end of a step, which was so many samples short of a full batch.

        Return the seconds since the end of the last one.
        """
        left, self._left = self._left, time.monotonic()
        return self._left - left

    def alive(self) -> None:
        """Note other progress, such as an evaluation."""

    def meets(self, now: bool) -> None:
        """Note that this worker waits for the others between two steps: not for long, as in a step."""

    def on_demand(self, now: bool) -> None:
        """Note that a requested save is running: a worker that exits meanwhile exits on demand."""

    def save_failed(self, why: str) -> None:
        """Note that a save that the manager requested has failed, and that training continues."""

    def uses(self, store: str | None) -> None:
        """Note the store that the job saves to or has loaded from."""

    def note(self, text: str) -> None:
        """Note what the user must know about the loaded checkpoint; the manager logs it."""

    def saved(self, step: int, seconds: float, *, write_seconds: float = 0.0) -> None:
        """Note a complete checkpoint that blocked training for `seconds`, and was written after that."""

    def saves_every(self, seconds: float) -> None:
        """Note the autosave interval; 0: off."""

    def script_saves(self) -> None:
        """Note that the library cannot save on request: the script may, in a handler of its own."""

    def hot(self, yes: bool, why_not: str = "", *, replicated: bool = True) -> None:
        """Note whether this worker can morph in place, why not, and if replicas hold their whole stage."""

    def runs(self, code: CodeIdentity) -> None:
        """Note the code of this worker."""

    def waits(self, now: bool) -> None:
        """Note that this worker waits for a morph order."""

    def holds_copy_of(self, rank: int | None) -> None:
        """Note the rank whose state this worker has a copy of; None: none. Any thread may call this."""

    def morphed(
        self, generation: int, parts: MorphParts, *, seconds: float, num_bytes: int, iteration: int
    ) -> None:
        """Note that an order is carried out: its generation, the pause, the received bytes, the last step."""


class SharedProgressWriter(ProgressWriter):
    """Writes progress to the page."""

    watched = True

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._steps = self._iteration = self._activity = self._failed_saves = self._missing_samples = 0
        self._in_step = self._on_demand = self._script_saves = False
        self._saved_step = -1
        self._compute_seconds = self._step_seconds = self._save_every_seconds = 0.0
        self._save_seconds = self._write_seconds = 0.0
        self._hot, self._waits = 0, False
        self._copy_of: int | None = None
        environment = VarunaEnvironment.read(os.environ)
        self._generation = 0 if environment.joins else environment.generation or 0
        self._morph_seconds, self._morph_bytes, self._morph_parts = 0.0, 0, MorphParts()
        self._entered = self._left = 0.0  # by the monotonic clock, which all processes of a machine share
        self._store = ""
        self.alive()  # from now on a hang is detected

    def enter(self) -> None:
        now = time.monotonic()
        if self._entered:
            self._step_seconds = now - self._entered
        self._entered = now
        self._in_step = True
        self._write()

    def leave(self, iteration: int, compute_seconds: float, *, missing_samples: int = 0) -> float:
        now = time.monotonic()
        seconds = now - (self._left or self._entered)
        self._left = now
        self._in_step = False
        self._iteration = iteration
        self._compute_seconds = compute_seconds
        self._steps += 1
        self._missing_samples += missing_samples
        if self._steps == 1:
            self._step_seconds = seconds
        self.alive()
        return seconds

    def alive(self) -> None:
        self._activity += 1
        self._write()

    def meets(self, now: bool) -> None:
        self._in_step = now
        self._write()

    def on_demand(self, now: bool) -> None:
        self._on_demand = now
        self.alive()

    def save_failed(self, why: str) -> None:
        self._write_text(_SAVE_PROBLEM_AT, why.encode()[:MAX_NOTE])
        self._failed_saves += 1
        self.alive()

    def uses(self, store: str | None) -> None:
        data = (store or "").encode()
        if store == self._store or not store or len(data) > MAX_TEXT:
            return
        self._store = store
        self._write_text(_TEXT_AT, data)

    def note(self, text: str) -> None:
        self._write_text(_NOTE_AT, text.encode()[:MAX_NOTE])

    def saved(self, step: int, seconds: float, *, write_seconds: float = 0.0) -> None:
        self._saved_step = max(self._saved_step, step)
        self._save_seconds, self._write_seconds = seconds, write_seconds
        self.alive()

    def saves_every(self, seconds: float) -> None:
        self._save_every_seconds = seconds
        self._write()

    def script_saves(self) -> None:
        self._script_saves = True
        self._write()

    def hot(self, yes: bool, why_not: str = "", *, replicated: bool = True) -> None:
        self._write_text(_WHY_NOT_AT, why_not.encode()[:MAX_NOTE])
        self._hot = yes * (1 if replicated else 2)
        self._write()

    def runs(self, code: CodeIdentity) -> None:
        data = encode(code).encode()
        if len(data) <= MAX_CODE:
            self._write_text(_CODE_AT, data)

    def waits(self, now: bool) -> None:
        self._waits = now
        self.alive()

    def holds_copy_of(self, rank: int | None) -> None:
        self._copy_of = rank
        _COPY_OF.pack_into(self._page, _COPY_OF_AT, 0 if rank is None else rank + 1)

    def morphed(
        self, generation: int, parts: MorphParts, *, seconds: float, num_bytes: int, iteration: int
    ) -> None:
        self._generation, self._iteration = generation, iteration
        self._copy_of = None
        self._morph_seconds, self._morph_bytes, self._morph_parts = seconds, num_bytes, parts
        self._waits = False
        self.alive()

    def _write_text(self, place: int, data: bytes) -> None:
        self._page[place : place + _TEXT.size + len(data)] = _TEXT.pack(len(data)) + data

    def _write(self) -> None:
        _NUMBERS.pack_into(
            self._page,
            0,
            self._steps,
            self._iteration,
            self._activity,
            self._in_step,
            self._on_demand,
            self._saved_step,
            self._failed_saves,
            self._compute_seconds,
            self._step_seconds,
            self._save_seconds,
            self._save_every_seconds,
            self._hot,
            self._waits,
            self._generation,
            self._morph_seconds,
            self._morph_bytes,
            self._morph_parts.waited,
            self._morph_parts.rebuild,
            self._morph_parts.move,
            0 if self._copy_of is None else self._copy_of + 1,
            self._missing_samples,
            self._left,
            self._write_seconds,
            self._script_saves,
        )


def open_progress() -> ProgressWriter:
    """Open the page of this worker, if an agent has started it."""
    path = VarunaEnvironment.read(os.environ).progress_file
    if not path:
        return ProgressWriter()
    try:
        with open(path, "r+b") as file:
            return SharedProgressWriter(mmap.mmap(file.fileno(), PAGE))
    except (OSError, ValueError):  # training continues without it
        return ProgressWriter()


def process_progress() -> ProgressWriter:
    """Return the one writer of this process, for reporters that do not know each other."""
    return _open_once(VarunaEnvironment.read(os.environ).progress_file or "")


@cache
def _open_once(_path: str) -> ProgressWriter:
    return open_progress()


class ProgressReader:
    """Reads the page of one worker."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.path = path
        with os.fdopen(open_private(path, os.O_RDWR), "r+b") as file:
            file.write(bytes(PAGE))
            file.flush()
            self._page = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)

    def read(self, pid: int = 0) -> WorkerProgress:
        numbers = _NUMBERS.unpack_from(self._page)
        steps, iteration, activity, in_step, saving, saved, failed, compute, step, save, every = numbers[:11]
        (
            hot,
            waits,
            generation,
            morph_seconds,
            morph_bytes,
            *parts,
            copy_of,
            missing,
            left,
            write,
            script_saves,
        ) = numbers[11:]
        return WorkerProgress(
            self.rank,
            pid=pid,
            iteration=iteration,
            steps=steps,
            activity=activity,
            in_step=bool(in_step),
            compute_seconds=compute,
            step_seconds=step,
            saved_step=saved if activity else -1,
            save_seconds=save,
            write_seconds=write,
            save_every_seconds=every,
            store=self._read_text(_TEXT_AT, MAX_TEXT),
            note=self._read_text(_NOTE_AT, MAX_NOTE),
            saving=bool(saving),
            failed_saves=failed,
            save_problem=self._read_text(_SAVE_PROBLEM_AT, MAX_NOTE),
            hot=bool(hot),
            replicated=hot != 2,
            why_not=self._read_text(_WHY_NOT_AT, MAX_NOTE),
            waits=bool(waits),
            generation=generation,
            copy_of=copy_of - 1 if copy_of else None,
            code=self._read_code(),
            morph_seconds=morph_seconds,
            morph_bytes=morph_bytes,
            morph_parts=MorphParts(*parts),
            missing_samples=missing,
            step_age=max(0.0, time.monotonic() - left) if left else 0.0,
            script_saves=bool(script_saves),
        )

    def _read_code(self) -> CodeIdentity:
        text = self._read_text(_CODE_AT, MAX_CODE)
        try:
            return decode(text, CodeIdentity, "the code of a worker") if text else CodeIdentity()
        except ValueError:  # it is being written
            return CodeIdentity()

    def _read_text(self, place: int, longest: int) -> str:
        (length,) = _TEXT.unpack_from(self._page, place)
        start = place + _TEXT.size
        return self._page[start : start + min(length, longest)].decode(errors="replace")

    @property
    def on_demand(self) -> bool:
        return bool(_NUMBERS.unpack_from(self._page)[4])

    def close(self) -> None:
        self._page.close()
        self.path.unlink(missing_ok=True)
