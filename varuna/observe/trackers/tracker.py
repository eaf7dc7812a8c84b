"""The protocol of trackers, and the thread that feeds one: a slow or broken tracker disturbs nothing.

A tracker gets the points that are new in the history of a job, and after a restart of the manager those that
it has not taken before. So it has each step once, in order, however often machines and managers are lost.
"""

import importlib
import importlib.util
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from varuna.errors import check_name
from varuna.observe.history import ScalarPoint, StepPoint
from varuna.observe.trackers.rows import MetricRow, rows_of
from varuna.observe.trackers.sent import SentPoints

EXTRAS = {"tensorboard": "metrics", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""Names of the trackers, which are also those of their packages, and the extra that installs each."""
MAX_ROWS = 20_000
"""Rows that wait for a slow tracker; of more, the oldest are dropped."""
BATCH_SECONDS = 5.0
"""Rows that come in this time after a write are written together."""
RETRY_SECONDS = 10.0
"""Wait this long after an error, and twice as long each time."""
MAX_RETRY_SECONDS = 600.0
CLOSE_SECONDS = 10.0
"""Time limit for the last rows when the job ends."""


class TrackedJob(NamedTuple):
    """Facts of the job that a tracker may need."""

    name: str
    folder: Path  # log folder
    settings: Mapping[str, Any]  # script, batch size, ...


class Tracker(Protocol):
    """Writes rows to one service. Methods may block and may raise; only one thread calls them.

    Rows are kept in the service, or in its files, when `write` returns.
    """

    def write(self, rows: Sequence[MetricRow]) -> None: ...

    def close(self) -> None: ...


def check_trackers(names: Sequence[str], *, option: str = "--track") -> None:
    """Raise ValueError for an unknown tracker, and for one whose package is not installed."""
    for name in names:
        check_name(option, name, tuple(EXTRAS))
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"{option} {name} needs the package {name!r} "
                f"(install it with: pip install 'varuna-torch[{EXTRAS[name]}]')"
            )


def open_tracker(name: str, job: TrackedJob) -> Tracker:
    """Open a tracker by its name. This may take seconds, and may raise anything."""
    module = importlib.import_module(f"varuna.observe.trackers.{name}_tracker")
    tracker: Tracker = module.open_tracker(job)
    return tracker


class TrackerThread:
    """Feeds one tracker in a thread of its own."""

    def __init__(self, name: str, open_it: Callable[[], Tracker], *, folder: Path) -> None:
        """`folder`: the log folder, which keeps what the tracker has."""
        self.name = name
        self._sent = SentPoints(folder, name)
        self.problem = ""  # why rows are missing; "": none are
        self._open = open_it
        self._tracker: Tracker | None = None
        self._lock = threading.Lock()
        self._rows: deque[MetricRow] = deque(maxlen=MAX_ROWS)  # not written yet; the lock protects it
        self._changed = threading.Event()  # new rows, or closing
        self._changed.set()  # open the tracker
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"varuna {name}", daemon=True)
        self._thread.start()

    def add(self, steps: Sequence[StepPoint], scalars: Sequence[ScalarPoint]) -> None:
        with self._lock:
            self._rows.extend(rows_of(steps, scalars))
        self._changed.set()

    def close(self) -> None:
        """Write the last rows, but wait for them no longer than `CLOSE_SECONDS`."""
        self._closing.set()
        self._changed.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self.problem = f"{self.name} did not take the last values within {CLOSE_SECONDS:.0f} s"

    def _run(self) -> None:
        wait = RETRY_SECONDS
        is_last = False
        missing = self._sent.missing()
        with self._lock:
            self._rows = deque([*missing, *self._rows], maxlen=MAX_ROWS)
        while not is_last:
            self._changed.wait()
            self._changed.clear()
            is_last = self._closing.is_set()
            if self._write():
                wait = RETRY_SECONDS
                self._gather()
            elif not is_last:
                self._pause(wait)
                wait = min(2 * wait, MAX_RETRY_SECONDS)
                self._changed.set()
        if self._tracker is not None:
            self._finish(self._tracker)

    def _write(self) -> bool:
        """Write all rows. After an error they wait in their place. Return whether there was none."""
        with self._lock:
            rows = self._sent.unsent(self._rows)
            self._rows.clear()
        try:
            if self._tracker is None:
                self._tracker = self._open()
            if rows:
                self._tracker.write(rows)
                self._sent.note(rows)
        except Exception as error:
            with self._lock:
                self._rows = deque([*rows, *self._rows], maxlen=MAX_ROWS)
                count = len(self._rows)
            self.problem = f"{_text(error)}; the job continues, and {count} values wait for {self.name}"
            return False
        self.problem = ""
        return True

    def _gather(self) -> None:
        """Let rows come after a write: each write costs a CPU that may train."""
        self._closing.wait(BATCH_SECONDS)

    def _pause(self, seconds: float) -> None:
        """Wait after an error, also if new rows come. Only the end of the job ends it early."""
        self._closing.wait(seconds)

    def _finish(self, tracker: Tracker) -> None:
        """End the run, also if the last rows could not be written."""
        try:
            tracker.close()
        except Exception as error:
            self.problem = self.problem or _text(error)


def _text(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
