"""Chooses the step that the page draws: the last one, from the workers' traces, with its prediction.

Where the traces cannot be read, it is the typical step of the job's last report, `timeline.json`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from varuna.codec import UNDECODABLE
from varuna.observe.job_view import LayoutView
from varuna.observe.record import COMPUTE
from varuna.observe.step_timelines import NAME, StepTimelines
from varuna.observe.trace_file import BETWEEN_STEPS, StepTrace, step_timeline
from varuna.page.last_step import LastStepReader
from varuna.page.log_reader import AskManager
from varuna.types import Forecast, StageTime, Timeline

LOOK_SECONDS = 15.0
"""Time between two requests for the report of another machine."""
MAX_REPORT_BYTES = 64 * 2**20
MAX_DRAWN = 20_000
"""Most intervals of a picture; of a larger step, the page shows the table."""
NOT_DRAWN = ("send", *BETWEEN_STEPS)
"""Kinds that overlap the compute, or do not belong to a step."""


class ShownStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the first replica, measured and predicted."""

    kind: Literal["last", "typical"]
    step: int  # of the job; of a typical one, counted from the start of its layout
    stages: tuple[StageTime, ...]
    measured: Timeline  # empty: too large
    generation: int | None = None
    predicted: Timeline | None = None
    forecast: Forecast | None = None
    note: str = ""  # why it is not the last step, or not drawn


class ReportReader:
    """Reads the file `timeline.json` of the log folder, or of the machine of the first rank."""

    def __init__(self, log_dir: Path, ask_manager: AskManager) -> None:
        self._path = log_dir / NAME
        self._ask_manager = ask_manager
        self._version: tuple[int, int] | None = None  # changes with the file
        self._look_at = 0.0
        self._rank: int | None = None
        self.found: StepTimelines | None = None
        self.written_at = 0.0  # seconds since 1970

    def update(self, first_rank: int | None) -> None:
        """Read the file if it has changed. `first_rank` None: read the log folder only."""
        try:
            try:
                found = self._path.stat()
                self._keep((found.st_mtime_ns, found.st_size), found.st_mtime, first_rank=None)
            except FileNotFoundError:
                if first_rank is not None and (first_rank != self._rank or time.monotonic() >= self._look_at):
                    self._rank, self._look_at = first_rank, time.monotonic() + LOOK_SECONDS
                    size = self._read_page(first_rank, MAX_REPORT_BYTES)[1]
                    self._keep((0, size), time.time(), first_rank=first_rank)
        except (OSError, ValueError, *UNDECODABLE):  # there is none, or its machine is away, or it is cut
            pass

    def _keep(self, version: tuple[int, int], written_at: float, *, first_rank: int | None) -> None:
        if version == self._version or version[1] > MAX_REPORT_BYTES:
            return
        data = self._path.read_bytes() if first_rank is None else self._fetch(first_rank, version[1])
        self._version, self.written_at = version, written_at
        self.found = msgspec.json.decode(data, type=StepTimelines)

    def _fetch(self, rank: int, size: int) -> bytes:
        found = b""
        while len(found) < size:
            data, _ = self._read_page(rank, len(found))
            if not data:
                break
            found += data
        return found

    def _read_page(self, rank: int, start: int) -> tuple[bytes, int]:
        """Return a piece of the file from `start` on, and the size of the file."""
        reply = self._ask_manager("logs", rank=rank, stream="timeline", start=start)
        if reply.log is None:
            raise ValueError(reply.text)
        return reply.log.data, reply.log.stop


class TimelineReader:
    """Keeps the step to draw. `update` is called by one thread; the rest by any."""

    def __init__(self, log_dir: Path, ask_manager: AskManager) -> None:
        self._report = ReportReader(log_dir, ask_manager)
        self._last_step = LastStepReader(log_dir, ask_manager)
        self._shown: ShownStep | None = None
        self._encoded = b"null"  # of that step: all tabs get the same bytes
        self._shown_at = 0.0  # seconds since 1970 at which the step was written
        self._drawn: tuple[list[StepTrace], StepTimelines | None] = [], None
        self.version = 0
        """Changes with the step; 0: there is none."""

    def read(self) -> msgspec.Raw:
        """Return the step to draw, a `ShownStep` or null, as JSON."""
        return msgspec.Raw(self._encoded)

    def update(self, layout: LayoutView | None, machines: Mapping[int, str], *, since: float) -> None:
        """Read what is new. `machines` are those of all ranks; `since` is when the layout began."""
        if layout is None:
            return
        self._report.update(layout.stage_map[0][0])
        report, traces, problem = self._report.found, list[StepTrace](), ""
        try:
            traces, problem = self._last_step.update(layout, machines), self._last_step.problem
        except OSError as error:
            problem = str(error)
        if not traces:
            if report is not None and self._report.written_at >= self._shown_at:
                self._show(typical_step(report, problem), self._report.written_at)
            return
        if self._report.written_at < since:
            report = None  # of an earlier layout
        if traces is not self._drawn[0] or report is not self._drawn[1]:
            self._drawn = traces, report
            self._show(last_step(traces, report), max(trace.written for trace in traces))

    def _show(self, step: ShownStep, written_at: float) -> None:
        if step != self._shown:
            self._shown, self._shown_at = step, written_at
            self._encoded = msgspec.json.encode(step)
            self.version += 1


def last_step(traces: Sequence[StepTrace], report: StepTimelines | None) -> ShownStep:
    """Return the step of these ranks, and the report's prediction if that is of the same layout."""
    cleaned = [
        msgspec.structs.replace(trace, entries=[one for one in trace.entries if one[0] not in NOT_DRAWN])
        for trace in traces
    ]
    measured = step_timeline(cleaned)
    count = len(measured.intervals)
    fits = report is not None and operations(report.measured) == operations(measured)
    return ShownStep(
        kind="last",
        step=traces[0].step + 1,  # as in the rest of the page: the number of finished steps
        generation=traces[0].generation,
        stages=stage_times(measured),
        measured=measured if count <= MAX_DRAWN else Timeline(()),
        predicted=report.predicted if fits and report is not None else None,
        forecast=report.report.forecast if fits and report is not None else None,
        note="" if count <= MAX_DRAWN else f"it has {count:,} operations, too many to draw",
    )


def typical_step(found: StepTimelines, problem: str) -> ShownStep:
    return ShownStep(
        kind="typical",
        step=found.report.step,
        stages=found.report.stages,
        measured=found.measured,
        predicted=found.predicted,
        forecast=found.report.forecast,
        note=f"the last step is not known here: {problem}" if problem else "",
    )


def operations(timeline: Timeline) -> set[tuple[int, int]]:
    """Return the stage and micro-batch of each forward: the same for all steps of a layout."""
    return {(one.stage, one.microbatch) for one in timeline.intervals if one.what == "F"}


def stage_times(timeline: Timeline) -> tuple[StageTime, ...]:
    """Return the times of each stage. The rest of the step is the optimizer and the script."""
    sums: dict[int, dict[str, float]] = {}
    for one in timeline.intervals:
        kind = "compute" if one.what in COMPUTE else one.what
        sums.setdefault(one.stage, dict.fromkeys(("compute", "wait", "reduce"), 0.0))
        sums[one.stage][kind] = sums[one.stage].get(kind, 0.0) + one.stop_seconds - one.start_seconds
    parts = [(found["compute"], found["wait"], found["reduce"]) for _, found in sorted(sums.items())]
    return tuple(StageTime(*part, max(0.0, timeline.seconds - sum(part))) for part in parts)
