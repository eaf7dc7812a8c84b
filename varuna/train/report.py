"""Reports measured and predicted step times: in the log, as files, and through `Varuna.report`.

All ranks exchange their times at the same steps, so each report covers the whole job.
"""

import logging
import sys
from pathlib import Path

import msgspec

from varuna.codec import encode
from varuna.execute.comm.session import Session
from varuna.files import write_atomic
from varuna.observe import merge, to_perfetto, to_svg
from varuna.observe.pace import Pace, RankPace, summarise, typical_step
from varuna.observe.record import on_one_clock, to_timeline
from varuna.observe.step_timelines import NAME as TIMELINES
from varuna.observe.step_timelines import StepTimelines
from varuna.train.layout import Prediction
from varuna.types import Forecast, StepReport, Timeline
from varuna.units import duration

log = logging.getLogger("varuna")

FIRST_REPORT = 10
"""The step of the first report; the next ones follow at 10 times, 100 times, ..."""
TOLERANCE = 0.1
"""Relative difference between measured and predicted step time above which a warning is logged."""
MAX_DRAWN = 20_000
"""Largest number of intervals in a readable picture of one replica."""
MAX_GATHERED = 2_000_000
"""Largest number of intervals that all ranks exchange."""
MAX_LINES = 8


class Reporter:
    """Measures this rank's steps; the first rank also has the prediction and writes the reports."""

    def __init__(
        self,
        session: Session,
        machines: list[str],  # of each rank
        prediction: Prediction | None,
        *,
        reports: bool,  # there is a prediction to compare with, or a log folder; the same on all ranks
        folder: str | None,
    ) -> None:
        self.pace = Pace()
        self._session = session
        self.machines = machines
        self._prediction = prediction
        self._folder = folder
        self._next = FIRST_REPORT if reports else 0

    def report(self) -> StepReport:
        """Return the report. All ranks call this."""
        paces, forecast, _ = self._gather()
        if paces is None:
            raise RuntimeError(
                f"no step has been measured yet, after {self.pace.num_steps} steps (train more steps before "
                "calling report: the first few, and those followed by other work, do not count)"
            )
        return summarise(self.pace.num_steps, paces, forecast)

    def report_if_due(self) -> None:
        if self.pace.num_steps != self._next:
            return
        self._next *= 10
        paces, _, draws = self._gather()
        if paces is None:
            return
        measured = self._measured(paces) if draws else None
        if self._prediction is not None:
            report = summarise(self.pace.num_steps, paces, self._prediction.forecast)
            log_report(report, launched=self._folder is not None)
            if self._folder is not None:
                self._write(report, measured, Path(self._folder))
        elif measured is not None and self._session.rank == self._session.ranks[0]:
            assert self._folder is not None
            found = StepTimelines(summarise(self.pace.num_steps, paces, None), measured)
            self._write_timelines(found, Path(self._folder))

    def _gather(self) -> tuple[list[RankPace] | None, Forecast | None, bool]:
        """Return all paces (None if a rank has none yet), the first rank's forecast, and whether it draws."""
        self.pace.interrupt()
        forecast = None if self._prediction is None else self._prediction.forecast
        pace = self.pace.found(self._session.stage)
        gathered = self._session.gather(
            (pace, forecast, self._folder is not None), tuple[RankPace | None, Forecast | None, bool]
        )
        paces = [pace for pace, _, _ in gathered if pace is not None]
        return paces if len(paces) == len(gathered) else None, *gathered[0][1:]

    def _measured(self, paces: list[RankPace]) -> Timeline | None:
        """Return the timeline of a typical step of the first replica."""
        number = typical_step(paces)
        most = max(pace.num_entries for pace in paces)
        too_many = most * self._session.depth > MAX_DRAWN or most * len(paces) > MAX_GATHERED
        if number is None or too_many:
            return None
        entries = self.pace.entries(number) if self._session.replica == 0 else ()
        own = to_timeline(entries, self._session.rank, self._session.stage)
        return merge(on_one_clock(self._session.gather(own, Timeline), self.machines))

    def _write(self, report: StepReport, measured: Timeline | None, folder: Path) -> None:
        assert self._prediction is not None
        try:
            write_atomic(folder / "report.json", encode(report), fsync=False, private=True)
            if measured is not None:
                predicted = None if self._prediction.timeline is None else self._prediction.timeline()
                self._write_timelines(StepTimelines(report, measured, predicted), folder)
                panels = {} if predicted is None else {"predicted": predicted}
                panels["measured"] = measured
                title = f"Step {report.step}, first replica"
                write_atomic(folder / "timeline.svg", to_svg(panels, title), fsync=False, private=True)
                text = to_perfetto(panels)
                write_atomic(folder / "timeline.perfetto.json", text, fsync=False, private=True)
        except OSError as error:  # training continues
            log.warning("the report of step %d cannot be written: %s", report.step, error)

    def _write_timelines(self, found: StepTimelines, folder: Path) -> None:
        """Write the file that the live page shows."""
        try:
            text = msgspec.json.encode(found).decode()
            write_atomic(folder / TIMELINES, text, fsync=False, private=True)
        except OSError as error:  # training continues
            log.warning("the timeline of step %d cannot be written: %s", found.report.step, error)


def log_report(report: StepReport, *, launched: bool) -> None:
    """Log the report; print it if logging is off and a launcher shows the output."""
    lines = str(report).splitlines()
    if len(lines) > MAX_LINES + 1:
        lines = [*lines[: MAX_LINES + 1], f"  ... and {len(lines) - MAX_LINES - 1} more stages"]
    text = "\n".join(lines)
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    elif launched:
        print(text, file=sys.stdout, flush=True)
    warning = deviation_warning(report)
    if warning is not None:
        log.warning(warning)


PARTS = {
    "compute_seconds": "computing",
    "reduce_seconds": "reducing gradients",
    "optimizer_seconds": "the optimizer and other work between two steps",
}


def deviation_warning(report: StepReport) -> str | None:
    """Name the stage with the largest deviation, if the step time differs much from the prediction."""
    if report.forecast is None or report.excess is None or abs(report.excess) <= TOLERANCE:
        return None

    def off(place: tuple[int, str]) -> float:
        measured, predicted = both(place)
        return abs(measured - predicted)

    def both(place: tuple[int, str]) -> tuple[float, float]:
        stage, part = place
        assert report.forecast is not None
        return getattr(report.stages[stage], part), getattr(report.forecast.stages[stage], part)

    stages = range(len(report.stages))
    cause = max(((stage, part) for stage in stages for part in PARTS), key=off)
    # Waiting usually has a cause in another stage. Without one, the links are slow.
    waits = max(((stage, "waiting_seconds") for stage in stages), key=off)
    place = waits if off(waits) > 2 * off(cause) else cause
    measured, predicted = both(place)
    what = PARTS.get(place[1], "waiting for other stages")
    return (
        f"steps take {duration(report.seconds)}, {abs(report.excess):.0%} "
        f"{'more' if report.excess > 0 else 'less'} than the predicted {duration(report.forecast.seconds)}; "
        f"largest difference: stage {place[0]}, {what} takes {duration(measured)} instead of "
        f"{duration(predicted)} (profile again if the model, the machines or their load have changed)"
    )
