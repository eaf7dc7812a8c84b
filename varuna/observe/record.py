"""Keeps what happened, and when, at a price that a training step does not feel.

A clock value means nothing by itself: each rank records its own clock's, and `merge` moves all of
them together so that the step starts at zero. Ranks whose clocks differ are brought to one clock
by whoever calls `add`.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from varuna.types import Interval, Timeline

COMPUTE = frozenset("FRBIW")


class Recorder:
    """The intervals of one rank, in the order in which they were added."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, int, float, float]] = []

    def add(self, what: str, microbatch: int, start: float, stop: float) -> None:
        self._entries.append((what, microbatch, start, stop))

    def clear(self) -> None:
        self._entries.clear()

    def compute_seconds(self) -> float:
        """Of forwards and backwards, without the waiting in between."""
        return sum(stop - start for what, _, start, stop in self._entries if what in COMPUTE)

    def timeline(self, rank: int, stage: int) -> Timeline:
        """What was added, still by this rank's clock; `merge` makes it start at zero."""
        return Timeline(tuple(Interval(rank, stage, *entry) for entry in self._entries))


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline of all ranks, by rank and time, in which the earliest start is zero."""
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    zero = min((interval.start_seconds for interval in intervals), default=0.0)
    intervals.sort(key=attrgetter("rank", "start_seconds"))
    return Timeline(
        tuple(
            Interval(
                interval.rank,
                interval.stage,
                interval.what,
                interval.microbatch,
                interval.start_seconds - zero,
                interval.stop_seconds - zero,
            )
            for interval in intervals
        )
    )


def bubble(timeline: Timeline) -> dict[int, float]:
    """For each stage the share of the step, 0 to 1, in which it did not compute.

    The step is the whole timeline's, from the first start to the last stop, reductions included.
    A stage of several replicas counts by their mean.
    """
    start = min((interval.start_seconds for interval in timeline.intervals), default=0.0)
    span = timeline.seconds - start
    idle: dict[int, list[float]] = {}
    place = attrgetter("stage", "rank")
    for (stage, _), lane in groupby(sorted(timeline.intervals, key=place), key=place):
        busy = _seconds_covered(interval for interval in lane if interval.what in COMPUTE)
        idle.setdefault(stage, []).append(1.0 - busy / span if span else 0.0)
    return {stage: max(0.0, sum(shares) / len(shares)) for stage, shares in idle.items()}


def _seconds_covered(intervals: Iterable[Interval]) -> float:
    """The length of the union: where two intervals overlap, the time counts once."""
    covered = 0.0
    reached = float("-inf")
    for interval in sorted(intervals, key=attrgetter("start_seconds")):
        covered += max(0.0, interval.stop_seconds - max(reached, interval.start_seconds))
        reached = max(reached, interval.stop_seconds)
    return covered
