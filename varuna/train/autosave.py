"""When a job saves by itself, so that a script need only say where, once.

The first rank watches the clock; that a save is due travels as any other request does (`on_demand`), so
that all ranks save at the same step. How often follows from what a save costs, and from how often
something fails, which a job's manager knows (`varuna.morph.interval`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from varuna.codec import decode
from varuna.environment import variable_name
from varuna.morph.interval import SaveRhythm

AFTER_FAILURE_SECONDS = 60.0
"""A store that refuses a save is not asked again sooner."""
NEVER = float("inf")


class OwnSaves:
    """The saves that nobody asks for, as the rank that watches the clock sees them."""

    def __init__(self, rhythm: SaveRhythm | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rhythm = rhythm
        self._clock = clock
        self._began = clock()
        self._save_seconds = rhythm.save_seconds if rhythm is not None else 0.0
        self._under_way: Future[Any] | None = None
        self._due_at = NEVER
        self.every_seconds = 0.0  # 0: not at all, or not known yet
        self._wait_anew()

    @property
    def due(self) -> bool:
        return self._clock() >= self._due_at and (self._under_way is None or self._under_way.done())

    def saved(self, done: "Future[Any]", seconds: float, *, own: bool) -> None:
        """Anybody has: the next is due an interval later. What they cost counts rather than the script's."""
        self._under_way = done
        if own or not self._save_seconds:
            self._save_seconds = seconds
        self._wait_anew()

    def failed(self) -> None:
        self._due_at = self._clock() + max(AFTER_FAILURE_SECONDS, self.every_seconds)

    def give_up(self) -> None:
        """The script numbers its checkpoints in a way of its own, into which others would not fit."""
        self._rhythm = None
        self._wait_anew()

    def _wait_anew(self) -> None:
        now = self._clock()
        interval = None
        if self._rhythm is not None:
            interval = self._rhythm.interval(save_seconds=self._save_seconds, more_seconds=now - self._began)
        self.every_seconds = interval or 0.0
        self._due_at = NEVER if interval is None else now + interval


def told_rhythm(text: str | None) -> SaveRhythm | None:
    """Where nobody has said anything, a script saves when it says so."""
    return decode(text, SaveRhythm, variable_name("saves")) if text else None
