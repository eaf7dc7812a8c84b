"""Cuts a row of segments into stages.

`balance` uses one cost per segment, before anything is measured. `cut_within` and `cut_for_least` find
the cut with the smallest budget that a `reach` function allows; `cuts` uses them with a profile.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import inf

Spans = tuple[tuple[int, int], ...]

SLACK = 0.05
"""The largest stage may cost this much more if fewer bytes cross the cuts."""


def balance(costs: Sequence[float], *, stages: int, crossing: Sequence[int] = ()) -> Spans:
    """Return the spans (first, stop) of contiguous stages with the smallest largest cost.

    Every stage gets at least one segment. Among equally good cuts, the last stages begin earliest, so
    every rank finds the same. `crossing` are the bytes over the cut after each segment: if given, the
    cut with the fewest bytes wins among those within SLACK.
    """
    spans = _balance(costs, stages)
    if not crossing or stages == 1:
        return spans
    most = max(sum(costs[first:stop]) for first, stop in spans)
    return _cross_least(costs, stages, crossing, most * (1 + SLACK))


def _cross_least(costs: Sequence[float], stages: int, crossing: Sequence[int], most: float) -> Spans:
    count = len(costs)
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = [0.0] + [inf] * count  # best[n]: fewest bytes over the cuts in the first n segments
    choices: list[list[int]] = []
    for used in range(stages):
        following = [inf] * (count + 1)
        choice = [0] * (count + 1)
        for stop in range(used + 1, count + 1):
            over = crossing[stop - 1] if stop < count else 0
            first = stop - 1
            while first >= used and before[stop] - before[first] <= most:
                if best[first] + over <= following[stop]:
                    following[stop], choice[stop] = best[first] + over, first
                first -= 1
        best = following
        choices.append(choice)
    return _follow(choices, count)


def _follow(choices: list[list[int]], count: int) -> Spans:
    """Return the spans from `choices[stage][stop]`: the best first segment of a stage that ends at `stop`."""
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(pairwise(reversed(bounds)))


def _balance(costs: Sequence[float], stages: int) -> Spans:
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{stages} pipeline stages requested, but the model has {count - 1} cuts and so allows "
            f"1 to {count} (add CutPoints, or choose a number in that range)"
        )
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = before  # best[n]: smallest largest cost of the first n segments
    choices = [[0] * (count + 1)]
    for used in range(1, stages):
        following = [inf] * (count + 1)
        choice = [0] * (count + 1)
        for stop in range(used + 1, count + 1):
            # The later the last stage begins, the more the stages before it cost, and the less it
            # costs itself. The best beginning is where the two meet, or one before.
            whole = before[stop]
            firsts = range(used, stop)
            meet = bisect_left(firsts, True, key=lambda first: best[first] >= whole - before[first])
            near = firsts[max(meet - 1, 0) : meet + 1]
            least = following[stop] = min(max(best[first], whole - before[first]) for first in near)
            choice[stop] = used + bisect_left(firsts, True, key=lambda first: whole - before[first] <= least)
        best = following
        choices.append(choice)
    return _follow(choices, count)


def cut_within(*, segments: int, stages: int, reach: Callable[[int, int], int]) -> Spans | None:
    """Give each stage as many segments as it may take; leave one for each later stage.

    `reach(stage, first)` is the furthest stop of a stage that begins at `first`. If fewer segments never
    cost more, and no stage can take a segment that an earlier one cannot, this finds a cut if there is one.
    """
    bounds = [0]
    for stage in range(stages):
        bounds.append(min(reach(stage, bounds[-1]), segments - (stages - 1 - stage)))
        if bounds[-1] <= bounds[-2]:
            return None
    return tuple(pairwise(bounds)) if bounds[-1] == segments else None


def cut_for_least(
    least: float, most: float, cut: Callable[[float], Spans | None], *, precision: float = 2e-3
) -> Spans | None:
    """Return the cut with the smallest budget between `least` and `most`; None if there is none."""
    best = cut(most)
    while best is not None and most - least > precision * most:
        middle = (least + most) / 2
        found = cut(middle)
        if found is None:
            least = middle
        else:
            best, most = found, middle
    return best


def balance_over(costs: Sequence[float], widths: Sequence[int]) -> Spans:
    """Balance stages that divide their work among `widths` replicas."""
    count = len(costs)
    if len(widths) > count:
        return _balance(costs, len(widths))  # raises the error
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = [(0.0, (0,))] + [(inf, ())] * count  # of the first n segments: (largest cost, bounds)
    for width in widths:
        best = [(inf, ())] + [
            min(
                (max(best[first][0], (before[stop] - before[first]) / width), (*best[first][1], stop))
                for first in range(stop)
            )
            for stop in range(1, count + 1)
        ]
    return tuple(pairwise(best[count][1]))


def uniform_cuts(work: Sequence[float], stages: int) -> list[Spans]:
    """Return the cuts with equally many segments per stage and with equal work per stage."""
    count = len(work)
    before = [0.0, *accumulate(work)]

    def within(budget: float) -> Spans | None:
        return cut_within(
            segments=count,
            stages=stages,
            reach=lambda _, first: bisect_right(before, before[first] + budget) - 1,
        )

    by_work = cut_for_least(before[-1] / stages, before[-1] * (1 + 1e-9), within, precision=1e-6)
    assert by_work is not None, "a budget for all of the work has a cut"
    return list(dict.fromkeys([tuple(pairwise(count * s // stages for s in range(stages + 1))), by_work]))


def all_cuts(segments: int, stages: int) -> Iterator[Spans]:
    for inner in combinations(range(1, segments), stages - 1):
        yield tuple(pairwise([0, *inner, segments]))


def adjacent_cuts(spans: Spans, bounds: Sequence[int], step: int = 1) -> Iterator[Spans]:
    """Yield all spans in which one cut is moved by `step` bounds."""
    cuts = [bounds.index(first) for first, _ in spans] + [len(bounds) - 1]
    for cut in range(1, len(spans)):
        for moved in (cuts[cut] - step, cuts[cut] + step):
            if cuts[cut - 1] < moved < cuts[cut + 1]:
                places = [*cuts[:cut], moved, *cuts[cut + 1 :]]
                yield tuple(pairwise([bounds[place] for place in places]))
