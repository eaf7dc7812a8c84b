"""Tells what steps take beside what was foretold: in the log, as files, and on request.

All ranks tell each other at the same steps, so that each report is of the whole job.
"""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from varuna.codec import encode
from varuna.execute.comm.session import Session
from varuna.files import write_atomic
from varuna.observe import merge, to_perfetto, to_svg
from varuna.observe.pace import Pace, RankPace, summarise, typical_step
from varuna.observe.record import on_one_clock, to_timeline
from varuna.train.layout import Outlook
from varuna.types import Forecast, StepReport, Timeline
from varuna.units import duration

log = logging.getLogger("varuna")

FIRST_REPORT = 10
"""Steps; then after ten times as many, and so on."""
TOLERANCE = 0.1
"""The share by which a step may differ from its forecast before that is worth a warning."""
MOST_DRAWN = 20_000
"""Intervals of one replica: more would make a picture that nobody can look at."""
MOST_GATHERED = 2_000_000
"""Intervals that all ranks together may be sent, for every one of them gets them."""
MOST_LINES = 8


class Word(NamedTuple):
    """What a rank says to the others."""

    found: RankPace | None  # None while no step is measured
    forecast: Forecast | None  # the first rank's counts
    draws: bool


def measured_by_all(words: Sequence[Word]) -> list[RankPace] | None:
    found = [word.found for word in words if word.found is not None]
    return found if len(found) == len(words) else None


class Reporter:
    """Knows this rank's pace; on the first rank also what was foretold, and where reports are written."""

    def __init__(
        self,
        session: Session,
        machines: list[str],  # of each rank
        *,
        speaks: bool,  # whether anything was foretold, as all ranks know
        outlook: Outlook | None,
        folder: str | None,
    ) -> None:
        self.pace = Pace()
        self._session = session
        self.machines = machines
        self._outlook = outlook
        self._folder = folder
        self._next = FIRST_REPORT if speaks else 0

    def report(self) -> StepReport:
        """All ranks call it, all get the same."""
        words = self._gather()
        ranks = measured_by_all(words)
        if ranks is None:
            raise RuntimeError(
                f"no step has been measured yet, after {self.pace.num_steps} of them (the first few are left "
                "out, and those that something else came after: train some more before asking for a report)"
            )
        return summarise(self.pace.num_steps, ranks, words[0].forecast)

    def report_if_due(self) -> None:
        if self.pace.num_steps != self._next:
            return
        self._next *= 10
        words = self._gather()
        ranks = measured_by_all(words)
        if ranks is None:
            return
        measured = self._measured(ranks) if words[0].draws else None
        if self._outlook is not None:
            report = summarise(self.pace.num_steps, ranks, self._outlook.forecast)
            tell(report, launched=self._folder is not None)
            if self._folder is not None:
                self._write(report, measured, Path(self._folder))

    def _gather(self) -> list[Word]:
        self.pace.interrupt()
        forecast = None if self._outlook is None else self._outlook.forecast
        found = self.pace.found(self._session.stage)
        return self._session.gather(Word(found, forecast, self._folder is not None))

    def _measured(self, ranks: list[RankPace]) -> Timeline | None:
        """A usual step of the first replica."""
        number = typical_step(ranks)
        most = max(rank.num_entries for rank in ranks)
        too_many = most * self._session.depth > MOST_DRAWN or most * len(ranks) > MOST_GATHERED
        if number is None or too_many:
            return None
        entries = self.pace.entries(number) if self._session.replica == 0 else ()
        own = to_timeline(entries, self._session.rank, self._session.stage)
        return merge(on_one_clock(self._session.gather(own), self.machines))

    def _write(self, report: StepReport, measured: Timeline | None, folder: Path) -> None:
        assert self._outlook is not None
        panels = {}
        if self._outlook.timeline is not None:
            panels["predicted"] = self._outlook.timeline()
        if measured is not None:
            panels["measured"] = measured
        try:
            write_atomic(folder / "report.json", encode(report))
            if measured is not None:
                title = f"Step {report.step}, first replica"
                write_atomic(folder / "timeline.svg", to_svg(panels, title))
                write_atomic(folder / "timeline.perfetto.json", to_perfetto(panels))
        except OSError as error:  # no reason to stop training
            log.warning("the report of step %d cannot be written: %s", report.step, error)


def tell(report: StepReport, *, launched: bool) -> None:
    """By the log; where nobody listens to that and there is a launcher, in the terminal."""
    lines = str(report).splitlines()
    if len(lines) > MOST_LINES + 1:
        lines = [*lines[: MOST_LINES + 1], f"  ... and {len(lines) - MOST_LINES - 1} more stages"]
    text = "\n".join(lines)
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info(text)
    elif launched:
        print(text, file=sys.stdout, flush=True)
    warning = complaint(report)
    if warning is not None:
        log.warning(warning)


PARTS = {
    "compute_seconds": "computing",
    "reduce_seconds": "reducing gradients",
    "optimizer_seconds": "the optimizer and whatever else comes between two steps",
}


def complaint(report: StepReport) -> str | None:
    """Which stage is furthest from its forecast, where the whole step is far from its own."""
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
    # Who waits, waits for something; only where nothing else tells of it, the links are slow.
    waits = max(((stage, "waiting_seconds") for stage in stages), key=off)
    place = waits if off(waits) > 2 * off(cause) else cause
    measured, predicted = both(place)
    what = PARTS.get(place[1], "waiting for its neighbours")
    return (
        f"steps take {duration(report.seconds)}, {abs(report.excess):.0%} "
        f"{'more' if report.excess > 0 else 'less'} than the predicted {duration(report.forecast.seconds)}; "
        f"furthest off is stage {place[0]}: {what} takes {duration(measured)}, not {duration(predicted)} "
        "(profile again if the model, the machines or what else runs on them has changed)"
    )
