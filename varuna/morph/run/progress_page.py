"""How far a worker is, for its agent to see: a page of memory that both share through a small file.

The worker writes numbers as it goes, which costs it about a microsecond a step; the agent reads them
at each heartbeat. Nothing waits for anything. Numbers may be of two moments: good enough for progress.
"""

import mmap
import os
import struct
import time
from pathlib import Path

from varuna.environment import VarunaEnvironment
from varuna.morph.state import Pulse

PAGE = 4096
_NUMBERS = struct.Struct("<qqqqqqdddd")  # in the order of Progress._write
_TEXT = struct.Struct("<H")
_TEXT_AT = 128
MAX_TEXT = 2048


class Progress:
    """Where nobody looks: does nothing."""

    watched = False

    def enter(self) -> None:
        """A step begins."""

    def leave(self, iteration: int, compute_seconds: float) -> None:
        """It has ended."""

    def alive(self) -> None:
        """Something else than a step was done."""

    def answering(self, now: bool) -> None:
        """What all ranks were asked for is being done: whoever ends meanwhile ends on demand."""

    def uses(self, store: str | None) -> None:
        """The job saves to this store, or has loaded from it."""

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint is complete; `seconds` is how long it kept training waiting."""

    def saves_every(self, seconds: float) -> None:
        """By itself; 0: it does not."""


class SharedProgress(Progress):
    """Writes to the page."""

    watched = True

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._steps = self._iteration = self._activity = 0
        self._in_step = self._answering = False
        self._saved_step = -1
        self._compute_seconds = self._step_seconds = self._save_seconds = self._save_every_seconds = 0.0
        self._entered = 0.0
        self._store = ""
        self._write()

    def enter(self) -> None:
        now = time.monotonic()
        if self._entered:
            self._step_seconds = now - self._entered
        self._entered = now
        self._in_step = True
        self._write()

    def leave(self, iteration: int, compute_seconds: float) -> None:
        self._in_step = False
        self._iteration = iteration
        self._compute_seconds = compute_seconds
        self._steps += 1
        if self._steps == 1:
            self._step_seconds = time.monotonic() - self._entered
        self.alive()

    def alive(self) -> None:
        self._activity += 1
        self._write()

    def answering(self, now: bool) -> None:
        self._answering = now
        self.alive()

    def uses(self, store: str | None) -> None:
        data = (store or "").encode()
        if store == self._store or not store or len(data) > MAX_TEXT:
            return
        self._store = store
        self._page[_TEXT_AT : _TEXT_AT + _TEXT.size + len(data)] = _TEXT.pack(len(data)) + data

    def saved(self, step: int, seconds: float) -> None:
        self._saved_step = max(self._saved_step, step)
        self._save_seconds = seconds
        self.alive()

    def saves_every(self, seconds: float) -> None:
        self._save_every_seconds = seconds
        self._write()

    def _write(self) -> None:
        _NUMBERS.pack_into(
            self._page,
            0,
            self._steps,
            self._iteration,
            self._activity,
            self._in_step,
            self._answering,
            self._saved_step,
            self._compute_seconds,
            self._step_seconds,
            self._save_seconds,
            self._save_every_seconds,
        )


def open_progress() -> Progress:
    """This worker's own, where an agent has started it."""
    path = VarunaEnvironment.read(os.environ).progress_file
    if not path:
        return Progress()
    try:
        with open(path, "r+b") as file:
            return SharedProgress(mmap.mmap(file.fileno(), PAGE))
    except (OSError, ValueError):  # the file is a convenience: training does not need it
        return Progress()


# ---------------------------------------------------------------- the agent's side


class Reading:
    """One worker's page, as its agent sees it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self.path = path
        path.write_bytes(bytes(PAGE))
        with path.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)

    def pulse(self, pid: int = 0) -> Pulse:
        numbers = _NUMBERS.unpack_from(self._page)
        steps, iteration, activity, in_step, _, saved, compute, step, save, every = numbers
        (length,) = _TEXT.unpack_from(self._page, _TEXT_AT)
        start = _TEXT_AT + _TEXT.size
        return Pulse(
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
            save_every_seconds=every,
            store=self._page[start : start + min(length, MAX_TEXT)].decode(errors="replace"),
        )

    @property
    def answering(self) -> bool:
        return bool(_NUMBERS.unpack_from(self._page)[4])

    def close(self) -> None:
        self._page.close()
        self.path.unlink(missing_ok=True)
