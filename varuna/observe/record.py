"""Records what happened and when, at negligible cost for a training step.

Each rank records times of its own clock. `merge` shifts all of them so that the step starts at zero.
`on_one_clock` aligns ranks on several machines.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from varuna.types import Interval, Timeline

COMPUTE = frozenset("FRBIW")
LOOKS = {  # label, SVG colour, and colour name of Perfetto's viewer, by kind
    "F": ("forward", "#4e79a7", "thread_state_running"),
    "R": ("recompute", "#a0cbe8", "thread_state_runnable"),
    "B": ("backward", "#59a14f", "good"),
    "I": ("backward, inputs", "#8cd17d", "rail_response"),
    "W": ("backward, weights", "#b6992d", "olive"),
    "send": ("send", "#f28e2b", "yellow"),
    "optimizer": ("optimizer", "#b07aa1", "generic_work"),
    "save": ("save", "#9c755f", "terrible"),
    "morph": ("morph", "#ff9da7", "startup"),
    "between": ("between", "#bab0ac", "white"),
    "reduce": ("reduce", "#e15759", "bad"),
    "wait": ("wait", "#d4d4d4", "grey"),
}

Entry = tuple[str, int, float, float]
"""Kind, micro-batch, start, stop."""
Snapshot = Callable[[], list[Entry]]


class Recorder:
    """The intervals of one rank, in the order of `add`."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def add(self, what: str, microbatch: int, start: float, stop: float) -> None:
        self.entries.append((what, microbatch, start, stop))

    def clear(self) -> None:
        """Start an empty recording; snapshots keep their entries."""
        self.entries = []

    def compute_seconds(self) -> float:
        """Return the time of the step's forwards and backwards, without waiting. Call it after each step."""
        return computing_seconds(self.entries)

    def snapshot(self) -> Snapshot:
        """Return a function that gives the entries so far. Taking a snapshot costs nothing."""
        entries, count = self.entries, len(self.entries)
        return lambda: entries[:count]

    def timeline(self, rank: int, stage: int) -> Timeline:
        """Return the entries on this rank's clock; `merge` makes them start at zero."""
        return to_timeline(self.snapshot()(), rank, stage)


def look(what: str) -> tuple[str, str, str]:
    return LOOKS.get(what, (what, "#b07aa1", "generic_work"))


def computing_seconds(entries: Iterable[Entry]) -> float:
    return sum(stop - start for what, _, start, stop in entries if what in COMPUTE)


def to_timeline(entries: Iterable[Entry], rank: int, stage: int) -> Timeline:
    return Timeline(tuple(Interval(rank, stage, *entry) for entry in entries))


def on_one_clock(timelines: Sequence[Timeline], machines: Sequence[str]) -> list[Timeline]:
    """Shift the timelines of several machines to the clock of the first rank's machine.

    A step ends on all ranks with the same sum over all ranks, so their clocks are aligned at its end.
    """
    ends = step_ends(timelines, machines)
    first = next(iter(ends.values()), 0.0)
    return [
        shifted(timeline, first - ends.get(machine, first))
        for timeline, machine in zip(timelines, machines, strict=True)
    ]


def step_ends(timelines: Sequence[Timeline], machines: Sequence[str]) -> dict[str, float]:
    """Return the end of the step on the clock of each machine, in the order of the ranks."""
    ends: dict[str, float] = {}
    for timeline, machine in zip(timelines, machines, strict=True):
        for interval in timeline.intervals:
            if interval.what == "reduce":
                ends[machine] = max(ends.get(machine, float("-inf")), interval.stop_seconds)
    return ends


def shifted(timeline: Timeline, seconds: float) -> Timeline:
    if not seconds:
        return timeline
    times = ((i, i.start_seconds + seconds, i.stop_seconds + seconds) for i in timeline.intervals)
    return Timeline(
        tuple(Interval(i.rank, i.stage, i.what, i.microbatch, start, stop) for i, start, stop in times)
    )


def merge(timelines: Iterable[Timeline]) -> Timeline:
    """Merge the timelines of all ranks into one, sorted by rank and time, that starts at zero."""
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    zero = min((interval.start_seconds for interval in intervals), default=0.0)
    intervals.sort(key=attrgetter("rank", "start_seconds"))
    return shifted(Timeline(tuple(intervals)), -zero)


def bubble(timeline: Timeline) -> dict[int, float]:
    """Return for each stage the share of the step, 0 to 1, in which it did not compute.

    The step lasts from the first start to the last stop of the timeline, reductions included. A stage with
    several replicas gets their mean.
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
    """Return the length of the union: overlapping time counts once."""
    covered = 0.0
    reached = float("-inf")
    for interval in sorted(intervals, key=attrgetter("start_seconds")):
        covered += max(0.0, interval.stop_seconds - max(reached, interval.start_seconds))
        reached = max(reached, interval.stop_seconds)
    return covered
