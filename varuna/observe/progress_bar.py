"""The door through which a person sees how far a capture is: a deep model's takes a minute.

A bar on a terminal; else a line in the log every few seconds. What is over sooner says nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

log = logging.getLogger("varuna")

Watch = Callable[[int], AbstractContextManager[Callable[[int], None]]]
"""Called with the number of modules; in its context, called with the number that have run."""
SECONDS_BETWEEN = 5.0


def watch(*, speaks: bool, console: Console | None = None) -> Watch | None:
    """What a `Source` tells how many of its model's modules it has been through; one rank speaks for all."""

    @contextmanager
    def watching(total: int) -> Iterator[Callable[[int], None]]:
        place = console or Console(stderr=True)
        with _bar(place, total) if place.is_terminal else _lines(total) as tell:
            yield tell

    return watching if speaks else None


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[int], None]]:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("capturing the model's modules", total=total)
        yield lambda done: bar.update(task, completed=done)


@contextmanager
def _lines(total: int) -> Iterator[Callable[[int], None]]:
    last = [time.monotonic()]

    def tell(done: int) -> None:
        now = time.monotonic()
        if now - last[0] >= SECONDS_BETWEEN:
            last[0] = now
            log.info("capturing the model: %d of %d modules", done, total)

    yield tell
