"""A clock that stands still while its owner does.

A manager that was stopped, or starved, or whose machine slept, has heard nobody meanwhile. That is no
reason to give up those that it did not listen to: for it, the time did not pass.
"""

from collections.abc import Callable

PAUSE_SECONDS = 1.0
"""It is asked several times a second; whoever does not ask for longer than this was not awake."""


class WakingClock:
    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last = monotonic()
        self._asleep = 0.0

    def now(self) -> float:
        reading = self._monotonic()
        if reading - self._last > PAUSE_SECONDS:
            self._asleep += reading - self._last
        self._last = reading
        return reading - self._asleep
