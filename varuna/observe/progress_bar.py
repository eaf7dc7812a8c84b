"""Shows the progress of capturing a model, which takes a minute for a deep one.

On a terminal it is a progress bar; else a log line every few seconds.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

log = logging.getLogger("varuna")

CaptureProgress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Called with the number of modules; gives a function to call with the number that have run."""
LOG_SECONDS = 5.0
"""Interval between two log lines."""
COLUMNS = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


def capture_progress(*, shown: bool, console: Console | None = None) -> CaptureProgress | None:
    """Return a progress display for a model's capture; None on ranks that do not show it."""

    @contextmanager
    def show(total: int) -> Iterator[Callable[[int], None]]:
        target = console or Console(stderr=True)
        with _bar(target, total) if target.is_terminal else _lines(total) as report:
            yield report

    return show if shown else None


@contextmanager
def parts_progress(console: Console | None = None) -> Iterator[Callable[[int, int, str], None]]:
    """Show the progress of work in parts; give a function of the finished parts, all parts, and what runs."""
    target = console or Console(stderr=True)
    if not target.is_terminal:
        yield lambda done, total, what: log.info("%d of %d: %s", done, total, what)
        return
    with Progress(*COLUMNS, console=target, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(*COLUMNS, console=console, transient=True) as bar:
        task = bar.add_task("capturing the model's modules", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(total: int) -> Iterator[Callable[[int], None]]:
    last = [time.monotonic()]

    def report(done: int) -> None:
        now = time.monotonic()
        if now - last[0] >= LOG_SECONDS:
            last[0] = now
            log.info("capturing the model: %d of %d modules", done, total)

    yield report
