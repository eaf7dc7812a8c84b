"""The log of refused callers: endless callers must not fill the disk."""

from collections.abc import Callable


class RefusalLog:
    """Logs the first ten refusals, then every one whose number is a power of two."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._count = 0

    def add(self, why: str) -> None:
        self._count += 1
        if self._count <= 10 or not self._count & (self._count - 1):
            self._log(why + (f" (refusal {self._count})" if self._count > 10 else ""))
