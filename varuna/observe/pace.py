"""Measures step times with one clock reading per step, and summarises them over all ranks.

A step lasts from its start to the start of the next one, so it includes the optimizer and data loading. A
step with an evaluation or a checkpoint after it is left out if that is known; else the median ignores it.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from varuna.observe.record import COMPUTE, Entry, Snapshot
from varuna.types import Forecast, StageTime, StepReport

WARMUPS = 3
"""First steps, which compile, capture and allocate."""
WINDOW = 100
"""Steps whose median is reported."""
KEPT = 9
"""Steps whose intervals are kept."""


class MeasuredStep(NamedTuple):
    number: int
    entered: float
    seconds: float
    snapshot: Snapshot


class RankPace(msgspec.Struct, frozen=True):
    """Measurements of one rank, to be sent to all others."""

    stage: int
    num_steps: int
    seconds: float
    compute_seconds: float
    waiting_seconds: float
    reduce_seconds: float
    kept: dict[int, float]  # seconds by number of the step
    num_entries: int  # the most in one of these steps


class Pace:
    """The last steps of one rank."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._entered = 0.0
        self._over: Snapshot | None = None  # of the previous step, if nothing came between
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._kept: deque[MeasuredStep] = deque(maxlen=KEPT)

    def enter(self, now: float) -> None:
        """Start a step, which ends the previous one."""
        if self._over is not None and self.num_steps > WARMUPS:
            seconds = now - self._entered
            self._seconds.append(seconds)
            self._kept.append(MeasuredStep(self.num_steps, self._entered, seconds, self._over))
        self._entered = now
        self._over = None

    def leave(self, recorded: Snapshot) -> None:
        """End the recorded part of the step; its optimizer may follow."""
        self.num_steps += 1
        self._over = recorded

    @property
    def is_uninterrupted(self) -> bool:
        """Return whether nothing but the optimizer has run since the last step."""
        return self._over is not None

    def interrupt(self) -> None:
        """Discard the current step's time, because something else runs before the next step."""
        self._over = None

    def found(self, stage: int) -> RankPace | None:
        """Return the measurements; None before the first measured step."""
        if not self._kept:
            return None
        steps = [step.snapshot() for step in self._kept]

        def usual(what: frozenset[str]) -> float:
            return median(
                sum(stop - start for kind, _, start, stop in step if kind in what) for step in steps
            )

        return RankPace(
            stage,
            len(self._seconds),
            median(self._seconds),
            usual(COMPUTE),
            usual(frozenset({"wait"})),
            usual(frozenset({"reduce"})),
            {step.number: step.seconds for step in self._kept},
            max(map(len, steps)),
        )

    def entries(self, number: int) -> list[Entry]:
        """Return all intervals of a kept step; the optimizer fills the time after the recorded ones."""
        step = next(step for step in self._kept if step.number == number)
        entries = [entry for entry in step.snapshot() if entry[0] != "send"]  # within the compute
        recorded = max((entry[3] for entry in entries), default=step.entered)
        return [*entries, ("optimizer", -1, recorded, max(recorded, step.entered + step.seconds))]


def summarise(step: int, ranks: Sequence[RankPace], forecast: Forecast | None) -> StepReport:
    """Return one report of all ranks' measurements."""
    slowest = max(ranks, key=lambda rank: rank.seconds)
    stages: dict[int, list[RankPace]] = {}
    for rank in ranks:
        stages.setdefault(rank.stage, []).append(rank)
    return StepReport(
        step,
        slowest.num_steps,
        slowest.seconds,
        tuple(_stage_time(stages[stage], slowest.seconds) for stage in sorted(stages)),
        forecast,
    )


def _stage_time(replicas: Sequence[RankPace], seconds: float) -> StageTime:
    """Return the mean of the replicas. The rest of the step is the optimizer and the script."""
    compute = fmean(rank.compute_seconds for rank in replicas)
    waiting = fmean(rank.waiting_seconds for rank in replicas)
    reduce = fmean(rank.reduce_seconds for rank in replicas)
    return StageTime(compute, waiting, reduce, max(0.0, seconds - compute - waiting - reduce))


def typical_step(ranks: Sequence[RankPace]) -> int | None:
    """Return the number of the step, kept by all ranks, that is nearest to the median."""
    usual = max(rank.seconds for rank in ranks)
    common = set.intersection(*(set(rank.kept) for rank in ranks))
    return min(
        sorted(common), key=lambda number: abs(max(rank.kept[number] for rank in ranks) - usual), default=None
    )
