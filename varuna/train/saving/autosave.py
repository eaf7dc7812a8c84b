"""The time of the next autosave.

The first rank watches the clock. A due autosave reaches the other ranks as a save request
(`save_requests`), so that all ranks save at the same step. The interval depends on the cost of a save
and on the failure rate, which the manager of the job knows (`varuna.morph.interval`).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from varuna.codec import decode
from varuna.environment import variable_name
from varuna.morph.interval import SaveRhythm

RETRY_SECONDS = 60.0
"""Shortest time between a failed autosave and the next."""
NEVER = float("inf")


class AutosaveTimer:
    """When and where to autosave. Without a `rhythm`, autosave is off on this rank."""

    def __init__(
        self,
        rhythm: SaveRhythm | None,
        store: str | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store  # the store that the job used last
        self.every_seconds = 0.0  # 0: off, or not known yet
        self.off = False  # the script numbers its checkpoints itself
        self._rhythm = rhythm
        self._clock = clock
        self._started = clock()
        self._save_seconds = rhythm.save_seconds if rhythm is not None else 0.0
        self._running: Future[Any] | None = None
        self._due_at = NEVER
        self._schedule_next()

    @property
    def due(self) -> bool:
        return self._clock() >= self._due_at and (self._running is None or self._running.done())

    def saved(self, done: "Future[Any]", seconds: float, *, autosave: bool) -> None:
        """Schedule the next autosave after any save. The cost of autosaves counts more than of others."""
        self._running = done
        if autosave or not self._save_seconds:
            self._save_seconds = seconds
        self._schedule_next()

    def failed(self) -> None:
        self._due_at = self._clock() + max(RETRY_SECONDS, self.every_seconds)

    def turn_off(self) -> None:
        """Stop autosaving: the script numbers its checkpoints itself, and autosaves would not fit in."""
        self._rhythm, self.off = None, True
        self._schedule_next()

    @property
    def is_on(self) -> bool:
        return self._rhythm is not None

    def _schedule_next(self) -> None:
        now = self._clock()
        interval = None
        if self._rhythm is not None:
            interval = self._rhythm.interval(
                save_seconds=self._save_seconds, more_seconds=now - self._started
            )
        self.every_seconds = interval or 0.0
        self._due_at = NEVER if interval is None else now + interval


def parse_rhythm(text: str | None) -> SaveRhythm | None:
    """Parse the environment variable `saves`; None: autosave is off."""
    return decode(text, SaveRhythm, variable_name("saves")) if text else None
