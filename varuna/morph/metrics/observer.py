"""Observes a running job for those who look at it: history, events, and the view of the present moment."""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from varuna.files import write_atomic
from varuna.morph.metrics.view import ViewSource, job_view
from varuna.morph.protocol.messages import WorkerMetrics
from varuna.morph.state import JobState
from varuna.observe import job_view as view_file
from varuna.observe.history import JobHistory, ScalarPoint, StepPoint
from varuna.observe.history_file import HistoryKeeper
from varuna.observe.job_view import EventView, JobView
from varuna.observe.ledger import LedgerReport
from varuna.types import JobSpec

MAX_EVENTS = 200
"""Events that a view has."""
MAX_TEXT = 2000
"""Characters of the reason of an event in a view."""
WRITE_SECONDS = 30.0
"""The last view is written after this time, and whenever the phase changes."""

NewPoints = Callable[[Sequence[StepPoint], Sequence[ScalarPoint]], None]


class JobObserver:
    def __init__(
        self, job: JobSpec, name: str, *, ledger: Callable[[], LedgerReport], continues: bool
    ) -> None:
        """`continues`: the job had a manager before."""
        self._job, self._name, self._ledger = job, name, ledger
        self._keeper = HistoryKeeper(Path(job.log_dir), continues=continues, monotonic=time.monotonic)
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._slow: Collection[str] = ()
        self._generation = 0
        self._saved: tuple[int, float | None] = (-1, None)  # newest saved step, and when it was seen
        self._phase = ""
        self._write_at = 0.0
        self.subscribers: list[NewPoints] = []  # called with the points that the history did not have

    @property
    def history(self) -> JobHistory:
        return self._keeper.history

    @property
    def problem(self) -> str:
        """Reason why a file is not up to date; "": none."""
        return self._keeper.problem

    def add(self, message: WorkerMetrics) -> None:
        self._keeper.add(message.steps, message.scalars, rank=message.rank)
        self.history.dropped += message.dropped

    def add_event(self, what: str, why: str) -> None:
        self._events.append(EventView(time.time(), what, why[:MAX_TEXT]))

    def observe(self, state: JobState, *, now: float, slow: Collection[str]) -> None:
        """Follow the state after each decision, several times a second."""
        self._slow = slow
        if state.generation is not None and state.generation.number != self._generation:
            self._generation = state.generation.number
            self.history.begin_layout()
            self._saved = (self._saved[0], None)
        if state.saved_step > self._saved[0]:
            self._saved = (state.saved_step, now)
        elif self._saved[1] is None and state.phase == "running" and state.iteration:
            self._saved = (self._saved[0], now)  # the interval begins with the first step
        steps, scalars = self._keeper.release(all_of_them=state.phase == "over")
        if steps or scalars:
            for subscriber in self.subscribers:
                subscriber(steps, scalars)
        if state.phase != self._phase or time.monotonic() >= self._write_at:
            self._phase, self._write_at = state.phase, time.monotonic() + WRITE_SECONDS
            self._write_view(state, now)

    def finish(self, state: JobState, *, now: float) -> None:
        """Write the last view, once the job is over and its last event is known."""
        self._write_view(state, now)

    def view(self, state: JobState, *, now: float) -> JobView:
        source = ViewSource(
            self._name,
            self._job.log_dir,
            self.history,
            self._ledger(),
            self._events,
            self._slow,
            self._saved[1],
        )
        return job_view(state, source, now=now, wall=time.time())

    def _write_view(self, state: JobState, now: float) -> None:
        """Write the view for those who look at the job after its end."""
        text = msgspec.json.encode(self.view(state, now=now)).decode()
        try:
            write_atomic(Path(self._job.log_dir) / view_file.NAME, text, fsync=False, private=True)
        except OSError:  # a full disk; other files report it
            return
