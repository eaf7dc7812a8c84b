"""Reads a job for the page: from its manager while it runs, and from the files of its log folder.

manager  ─► the view of the job, logs of other machines
LOGDIR   ─► job_view.json, metrics.jsonl, events.jsonl, ledger.json, timeline.json, logs, traces
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec

from varuna.codec import UNDECODABLE
from varuna.morph.ledger_file import NAME as LEDGER
from varuna.morph.ledger_file import read_ledger
from varuna.morph.state import JobVerdict
from varuna.observe.history_file import NAME as METRICS
from varuna.observe.history_file import MetricLine
from varuna.observe.job_view import NAME as LAST_VIEW
from varuna.observe.job_view import EventView, JobView, LayoutView
from varuna.page.buckets import Axis, CurveWindow, StepBuckets
from varuna.page.log_reader import LogReader
from varuna.page.manager_link import ManagerLink
from varuna.page.timeline_reader import TimelineReader

READ_SECONDS = 0.5
"""Time in which one update reads steps and events; the next one continues."""
CHUNK_BYTES = 2**20
MAX_EVENTS = 4096
MAX_TEXT = 2000
"""Characters of the reason of an event."""
MAX_MARKS = 200
"""Events of one curve; of more, the newest count."""
ENDS = get_args(JobVerdict.__annotations__["how"])
"""Events of which a job that is over has one. Others may follow it."""
BEGIN = "listening"
"""The first event of each manager of a job."""

Link = Literal["live", "over", "lost", "gone"]
"""live: the manager answers; over: the job has ended; lost: the manager does not answer; gone: its process
has ended, and the job has not."""


class PageUpdate(msgspec.Struct, frozen=True):
    """The state of the job, as the page gets it."""

    link: Link
    problem: str  # why the manager does not answer
    at: float  # seconds since 1970
    seen_at: float  # last sign of the manager, such as an answer or an event; 0: none
    log_dir: str
    last_step: int  # of the curve
    num_events: int
    timeline: int  # changes with the timeline; 0: there is none
    view: msgspec.Raw  # a `JobView`, or null


class LoggedEvent(msgspec.Struct, frozen=True):
    """A line of events.jsonl."""

    at: datetime
    what: str
    why: str


class MachineRanks(msgspec.Struct, frozen=True):
    """The fields of a `MachineView` that are used here."""

    name: str
    ranks: tuple[int, ...] = ()


class ViewHead(msgspec.Struct, frozen=True):
    """The fields of a `JobView` that are used here; the page gets all others as they are."""

    at: float = 0.0
    phase: str = ""
    layout: LayoutView | None = None
    machines: tuple[MachineRanks, ...] = ()


class EventMark(msgspec.Struct, frozen=True):
    """An event of the job, on the curve."""

    at: float
    step: int
    what: str
    why: str


class CurveReply(msgspec.Struct, frozen=True):
    window: CurveWindow
    marks: list[EventMark]
    machines: list[tuple[float, int]]  # number of machines since a time
    first_event: float | None  # seconds since 1970, of the whole job; None: no event yet
    last_event: float | None


Line = TypeVar("Line")


class TailReader:
    """Reads the new complete lines of a growing file, a bounded number of bytes at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place = 0
        self.has_more = False

    def decoded(self, kind: type[Line]) -> list[Line]:
        """Return the values of the next lines. Leave out lines that are damaged."""
        decoder, data = msgspec.json.Decoder(kind), self._next_lines()
        try:
            return decoder.decode_lines(data)
        except UNDECODABLE:
            found = []
            for line in data.splitlines():
                with suppress(*UNDECODABLE):
                    found.append(decoder.decode(line))
            return found

    def _next_lines(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._place)
                data = file.read(CHUNK_BYTES)
        except OSError:
            data = b""
        self.has_more = len(data) == CHUNK_BYTES
        end = data.rfind(b"\n") + 1
        if not end and self.has_more:
            end = len(data)  # no line of ours is this long
        self._place += end
        return data[:end]


class JobReader:
    """Reads one job. `update` is called by one thread, `update_timeline` by another, the rest by any."""

    def __init__(self, log_dir: Path, link: ManagerLink) -> None:
        self._log_dir = log_dir
        self._link = link
        self._lock = threading.Lock()  # of the next two
        self._buckets = StepBuckets(("loss", "samples_per_second"))
        self._events: deque[EventView] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._first_event: float | None = None
        self._last_event: float | None = None
        self._last_step_at = 0.0
        self._answered_at = 0.0
        self._layout_since = 0.0
        self._is_over = False
        self.is_steady = False
        """Nothing has changed since the last update but the steps."""
        self._steps_file = TailReader(log_dir / METRICS)
        self._events_file = TailReader(log_dir / "events.jsonl")
        self._view, self._head = b"null", ViewHead()
        self._machines: list[tuple[float, int]] = []
        self._ledger_at = 0
        self.logs = LogReader(log_dir, link.request)
        self.timeline = TimelineReader(log_dir, link.request)

    def update(self) -> PageUpdate:
        """Read what is new."""
        num_events = self._num_events
        self._read_lines()
        link, problem = self._read_view()
        trains = link == "live" and self._head.phase == "running"
        self.is_steady = num_events == self._num_events and (trains or link == "over")
        self._read_ledger()
        return self._now(link, problem)

    def failed(self, error: Exception) -> PageUpdate:
        """Return what is known, and that `update` failed."""
        return self._now("lost", f"this page cannot read the job: {error!r}")

    def _now(self, link: Link, problem: str) -> PageUpdate:
        return PageUpdate(
            link,
            problem,
            time.time(),
            max(self._answered_at, self._head.at, self._last_step_at, self._last_event or 0.0),
            str(self._log_dir),
            self._buckets.last_step,
            self._num_events,
            self.timeline.version,
            msgspec.Raw(self._view),
        )

    def update_timeline(self) -> None:
        """Read the last step. This may wait for another machine, so it has its own thread."""
        head = self._head
        machines = {rank: machine.name for machine in head.machines for rank in machine.ranks}
        self.timeline.update(head.layout, machines, since=self._layout_since)

    def _read_view(self) -> tuple[Link, str]:
        """Read the view from the manager, else from its file, else keep the last one."""
        problem = ""
        try:
            self._keep(bytes(self._link.request("view").status), since=float("-inf"))
            self._answered_at = time.time()
        except (OSError, ValueError, *UNDECODABLE) as error:
            problem = str(error) or type(error).__name__
            with suppress(OSError, *UNDECODABLE):
                # Of an earlier version, or damaged: the browser gets all fields.
                found = msgspec.json.decode((self._log_dir / LAST_VIEW).read_bytes(), type=JobView)
                self._keep(msgspec.json.encode(found), since=self._head.at)
        if self._is_over:  # also while its manager ends
            return "over", ""
        if not problem:
            return "live", ""
        return "gone" if self._link.is_gone() else "lost", problem

    def _keep(self, view: bytes, *, since: float) -> None:
        """Keep a view that is not older. What the manager answers is new, also if its clock is set back."""
        head = msgspec.json.decode(view, type=ViewHead)
        if head.at >= since:
            self._view, self._head = view, head

    def _read_lines(self) -> None:
        deadline = time.monotonic() + READ_SECONDS
        more = True
        while more and time.monotonic() < deadline:
            steps = [line for line in self._steps_file.decoded(MetricLine) if not line.name]
            events = self._events_file.decoded(LoggedEvent)
            with self._lock:
                for line in steps:
                    self._last_step_at = max(line.at, self._last_step_at)
                    speed = line.samples / line.seconds if line.seconds > 0 and line.samples else None
                    self._buckets.add(line.step, line.at, (line.loss, speed))
                for event in events:
                    self._keep_event(EventView(event.at.timestamp(), event.what, event.why[:MAX_TEXT]))
                self._num_events += len(events)
            more = self.is_behind

    def _keep_event(self, event: EventView) -> None:
        self._events.append(event)
        if self._first_event is None:
            self._first_event = event.at
        self._last_event = max(event.at, self._last_event or event.at)
        if event.what == "generation":
            self._layout_since = event.at
        if event.what in (BEGIN, *ENDS):
            self._is_over = event.what != BEGIN

    @property
    def is_behind(self) -> bool:
        """Return whether steps or events wait to be read."""
        return self._steps_file.has_more or self._events_file.has_more

    def _read_ledger(self) -> None:
        changed_at = _changed_at(self._log_dir / LEDGER)
        if changed_at != self._ledger_at:
            self._ledger_at = changed_at
            with suppress(OSError, ValueError):
                self._machines = read_ledger(self._log_dir).num_machines

    def curve(self, first: float, last: float, *, axis: Axis, points: int) -> CurveReply:
        with self._lock:
            window = self._buckets.window(first, last, axis=axis, points=points)
            marks = list(islice(self._newest_marks(first, last, axis), MAX_MARKS))
            first_event, last_event = self._first_event, self._last_event
        return CurveReply(window, marks[::-1], thinned(self._machines, points), first_event, last_event)

    def _newest_marks(self, first: float, last: float, axis: Axis) -> Iterator[EventMark]:
        """Yield the events of a part of the curve, the newest first."""
        for event in reversed(self._events):
            step = self._buckets.step_at(event.at)
            if first <= (step if axis == "step" else event.at) <= last:
                yield EventMark(event.at, step, event.what, event.why)


def thinned(changes: list[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """Keep at most about `points` changes at equal distances, and the last one."""
    return changes[:: max(1, len(changes) // points)] + changes[-1:]


def _changed_at(path: Path) -> int:
    """Return a number that changes with the file; 0 if there is none."""
    try:
        return path.stat().st_mtime_ns // 1000
    except OSError:
        return 0
