"""A clock that stops while its process is suspended.

A manager that was stopped or starved, or whose machine slept, received no heartbeats meanwhile. This
time must not count as silence of the agents.
"""

from collections.abc import Callable

PAUSE_SECONDS = 0.5
"""The manager reads the clock several times a second; a longer gap means that it was suspended."""


class SuspendAwareClock:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._suspended = 0.0

    def now(self) -> float:
        reading = self._monotonic()
        if reading - self._last > PAUSE_SECONDS:
            self._suspended += reading - self._last
        self._last = reading
        return reading - self._suspended
