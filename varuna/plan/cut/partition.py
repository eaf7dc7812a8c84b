"""Cuts a row of segments into stages.

`balance` knows one number for each segment, before anything is measured. `cut_for_speed` knows what a
profile tells: it looks for the cut whose step is shortest, as far as a bound tells, in the memory
that each stage's device has.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from math import inf

Spans = tuple[tuple[int, int], ...]


SLACK = 0.05
"""So much longer the longest stage may be, if less crosses the cuts then."""


def balance(costs: Sequence[float], *, stages: int, crossing: Sequence[int] = ()) -> Spans:
    """The spans (first, stop) of `stages` neighbouring groups with the least largest cost.

    Every stage gets at least one segment. Dynamic programming over (stages used, segments used);
    among equally good cuts the one with the earliest boundaries, so that every rank finds the same.
    Where it is known what crosses the cut after each segment, the one of the good cuts with the least.
    """
    spans = _balance(costs, stages)
    if not crossing or stages == 1:
        return spans
    most = max(sum(costs[first:stop]) for first, stop in spans)
    return _cross_least(costs, stages, crossing, most * (1 + SLACK))


def _cross_least(costs: Sequence[float], stages: int, crossing: Sequence[int], most: float) -> Spans:
    count = len(costs)
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = [0.0] + [inf] * count  # best[n]: the least that crosses the cuts in the first n segments
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
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(pairwise(reversed(bounds)))


def _balance(costs: Sequence[float], stages: int) -> Spans:
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{stages} pipeline stages asked for, but the model has {count - 1} cuts and so allows "
            f"1 to {count} (add CutPoints, or choose a number in that range)"
        )
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = before  # best[n]: the least largest cost of the first n segments
    choices: list[list[int]] = []
    for used in range(1, stages):
        following = [float("inf")] * (count + 1)
        choice = [0] * (count + 1)
        for stop in range(used + 1, count + 1):
            # What the stages so far cost rises with where the last one begins, what that one costs
            # falls: the best beginning is where they meet, or one before.
            whole = before[stop]
            meet = bisect_left(
                range(used, stop), True, key=lambda first: best[first] >= whole - before[first]
            )
            first = used + meet
            least = min(
                max(best[place], whole - before[place])
                for place in (first - 1, first)
                if used <= place < stop
            )
            following[stop] = least
            choice[stop] = used + bisect_left(
                range(used, stop), True, key=lambda first: whole - before[first] <= least
            )
        best = following
        choices.append(choice)
    bounds = [count]
    for choice in reversed(choices):
        bounds.append(choice[bounds[-1]])
    return tuple(pairwise([0, *reversed(bounds)]))


def cut_within(*, segments: int, stages: int, reach: Callable[[int, int], int]) -> Spans | None:
    """Each stage takes as much as it may, leaving one segment for each stage after it.

    `reach(stage, first)` is the furthest stop of a stage that begins there. Where less never costs more,
    this finds a cut if there is one.
    """
    bounds = [0]
    first = 0
    for stage in range(stages):
        stop = min(reach(stage, first), segments - (stages - 1 - stage))
        if stop <= first:
            return None
        bounds.append(stop)
        first = stop
    return tuple(pairwise(bounds)) if first == segments else None


def cut_for_least(
    least: float, most: float, cut: Callable[[float], Spans | None], *, precision: float = 2e-3
) -> Spans | None:
    """The cut within the smallest budget between two for which there is one, to a relative precision."""
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
    """The same for stages that share their work among so many replicas each."""
    count = len(costs)
    if len(widths) > count:
        return _balance(costs, len(widths))  # which says what is wrong
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = [(0.0, (0,))] + [(inf, ())] * count  # of the first n segments: the largest cost, the bounds
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
    """As one would place them by hand: equally many segments for each stage, and equal work."""
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


def neighbours(spans: Spans, bounds: Sequence[int], step: int = 1) -> Iterator[Spans]:
    """All that differ by one cut, moved to the next of the bounds, or as many further as `step` says."""
    cuts = [bounds.index(first) for first, _ in spans] + [len(bounds) - 1]
    for cut in range(1, len(spans)):
        for moved in (cuts[cut] - step, cuts[cut] + step):
            if cuts[cut - 1] < moved < cuts[cut + 1]:
                places = [*cuts[:cut], moved, *cuts[cut + 1 :]]
                yield tuple(pairwise([bounds[place] for place in places]))
