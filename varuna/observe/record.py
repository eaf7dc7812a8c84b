"""Keeps what happened, and when, at a price that a training step does not feel.

A clock value means nothing by itself: each rank records its own clock's, and `merge` moves all of
them together so that the step starts at zero. Ranks whose clocks differ are brought to one clock
by whoever calls `add`.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from varuna.types import Interval, Timeline

COMPUTE = frozenset("FRBIW")

Entry = tuple[str, int, float, float]
"""What, micro-batch, start, stop."""
Snapshot = Callable[[], list[Entry]]


class Recorder:
    """The intervals of one rank, in the order in which they were added."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, what: str, microbatch: int, start: float, stop: float) -> None:
        self.entries.append((what, microbatch, start, stop))

    def clear(self) -> None:
        """Begins anew; a snapshot keeps what it is of."""
        self.entries = []

    def compute_seconds(self) -> float:
        """Of the step's forwards and backwards, without the waiting in between; asked for after each step."""
        return computing(self.entries)

    def snapshot(self) -> Snapshot:
        """What was added so far, to be looked at later, if at all: taking one costs nothing."""
        entries, count = self.entries, len(self.entries)
        return lambda: entries[:count]

    def timeline(self, rank: int, stage: int) -> Timeline:
        """What was added, still by this rank's clock; `merge` makes it start at zero."""
        return to_timeline(self.snapshot()(), rank, stage)


def computing(entries: Iterable[Entry]) -> float:
    return sum(stop - start for what, _, start, stop in entries if what in COMPUTE)


def to_timeline(entries: Iterable[Entry], rank: int, stage: int) -> Timeline:
    return Timeline(tuple(Interval(rank, stage, *entry) for entry in entries))


def on_one_clock(timelines: Sequence[Timeline], machines: Sequence[str]) -> list[Timeline]:
    """Those of ranks on several machines, moved to the clock of the first rank's machine.

    A step ends for all ranks with the same sum over all of them, so that is when their clocks are set equal.
    """
    ends: dict[str, float] = {}
    for timeline, machine in zip(timelines, machines, strict=True):
        for interval in timeline.intervals:
            if interval.what == "reduce":
                ends[machine] = max(ends.get(machine, float("-inf")), interval.stop_seconds)
    first = next(iter(ends.values()), 0.0)
    return [
        _later(timeline, first - ends.get(machine, first))
        for timeline, machine in zip(timelines, machines, strict=True)
    ]


def _later(timeline: Timeline, seconds: float) -> Timeline:
    if not seconds:
        return timeline
    return Timeline(
        tuple(
            Interval(
                i.rank, i.stage, i.what, i.microbatch, i.start_seconds + seconds, i.stop_seconds + seconds
            )
            for i in timeline.intervals
        )
    )


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """One timeline of all ranks, by rank and time, in which the earliest start is zero."""
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    zero = min((interval.start_seconds for interval in intervals), default=0.0)
    intervals.sort(key=attrgetter("rank", "start_seconds"))
    return _later(Timeline(tuple(intervals)), -zero)


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
