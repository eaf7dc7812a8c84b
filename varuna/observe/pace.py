"""What steps take, at the price of one reading of the clock each; and what that says of a whole job.

A step lasts from its beginning to the beginning of the next one, so that the optimizer and the reading
of data are part of it. What a script does besides now and then (an evaluation, a checkpoint) is left
out where it is known, and else leaves the median as it is.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from varuna.observe.record import COMPUTE, Entry, Snapshot
from varuna.types import Forecast, StageTime, StepReport

WARMUPS = 3
"""Steps at the start that compile, capture and allocate."""
WINDOW = 100
"""Steps of which the median is taken."""
KEPT = 9
"""Steps of which everything is kept, for what happened within them."""


class Kept(NamedTuple):
    """A step that is over."""

    number: int
    entered: float
    seconds: float
    snapshot: Snapshot


class RankPace(msgspec.Struct, frozen=True):
    """What one rank found, for all the others."""

    stage: int
    num_steps: int
    seconds: float
    compute_seconds: float
    waiting_seconds: float
    reduce_seconds: float
    kept: dict[int, float]  # the seconds of steps by their number
    num_entries: int  # of the fullest of them


class Pace:
    """The last steps of one rank."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._entered = 0.0
        self._over: Snapshot | None = None  # of the step before, while nothing came between
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._kept: deque[Kept] = deque(maxlen=KEPT)

    def enter(self, now: float) -> None:
        """A step begins, and with that the one before is over."""
        if self._over is not None and self.num_steps > WARMUPS:
            seconds = now - self._entered
            self._seconds.append(seconds)
            self._kept.append(Kept(self.num_steps, self._entered, seconds, self._over))
        self._entered = now
        self._over = None

    def leave(self, recorded: Snapshot) -> None:
        """The step has done what it records; its optimizer may follow."""
        self.num_steps += 1
        self._over = recorded

    def interrupt(self) -> None:
        """Something comes that no step has: this one's length will not be known."""
        self._over = None

    def found(self, stage: int) -> RankPace | None:
        """None while no step has been measured."""
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
        """All of a step, to its end: after what it has recorded comes the optimizer."""
        step = next(step for step in self._kept if step.number == number)
        entries = step.snapshot()
        recorded = max((entry[3] for entry in entries), default=step.entered)
        return [*entries, ("optimizer", -1, recorded, max(recorded, step.entered + step.seconds))]


def summarise(step: int, ranks: Sequence[RankPace], forecast: Forecast | None) -> StepReport:
    """One report of what all ranks found."""
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
    """The optimizer has what is left: with it comes what the script itself does between two steps."""
    compute = fmean(rank.compute_seconds for rank in replicas)
    waiting = fmean(rank.waiting_seconds for rank in replicas)
    reduce = fmean(rank.reduce_seconds for rank in replicas)
    return StageTime(compute, waiting, reduce, max(0.0, seconds - compute - waiting - reduce))


def typical_step(ranks: Sequence[RankPace]) -> int | None:
    """The number of that step, kept by all ranks, which was nearest to the usual."""
    usual = max(rank.seconds for rank in ranks)
    common = set.intersection(*(set(rank.kept) for rank in ranks))
    return min(
        sorted(common), key=lambda number: abs(max(rank.kept[number] for rank in ranks) - usual), default=None
    )
