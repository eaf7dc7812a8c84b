"""Progress of a profiler: one line for each result, or a progress bar on a terminal."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TimeElapsedColumn


class ProfileReport:
    """Prints one line to stderr for each result."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        """Report the measurement inside the `with` block."""
        started = time.monotonic()
        yield
        self.say(f"profiled {what} in {time.monotonic() - started:.1f} s")

    def say(self, text: str) -> None:
        if self._enabled:
            print(f"varuna: {text}", file=sys.stderr, flush=True)


class BarReport(ProfileReport):
    """Shows one progress bar for each measurement."""

    def __init__(self, bar: Progress) -> None:
        super().__init__()
        self._bar = bar

    @contextmanager
    def item(self, what: str) -> Iterator[None]:
        task = self._bar.add_task(what, total=None)
        yield
        self._bar.update(task, total=1, completed=1)

    def say(self, text: str) -> None:
        self._bar.console.print(text)


@contextmanager
def open_report(*, enabled: bool) -> Iterator[ProfileReport]:
    console = Console(stderr=True)
    if not enabled or not console.is_terminal:
        yield ProfileReport(enabled)
        return
    with Progress("{task.description}", BarColumn(), TimeElapsedColumn(), console=console) as bar:
        yield BarReport(bar)
