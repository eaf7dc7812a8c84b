"""Cuts a row of segments into stages whose heaviest one is as light as can be."""

from collections.abc import Sequence
from itertools import accumulate


def balance(costs: Sequence[float], *, stages: int) -> tuple[tuple[int, int], ...]:
    """The spans (first, stop) of `stages` neighbouring groups with the least largest cost.

    Every stage gets at least one segment. Dynamic programming over (stages used, segments used);
    among equally good cuts the one with the earliest boundaries, so that every rank finds the same.
    """
    count = len(costs)
    if not 1 <= stages <= count:
        raise ValueError(
            f"{stages} pipeline stages asked for, but the model has {count - 1} CutPoints and so allows "
            f"1 to {count} (add CutPoints, or choose a number in that range)"
        )
    before = [0.0, *accumulate(float(cost) for cost in costs)]
    best = [0.0] + [float("inf")] * count  # best[n]: least largest cost of the first n segments
    choices: list[list[int]] = []
    for _ in range(stages):
        following = [float("inf")] * (count + 1)
        choice = [0] * (count + 1)
        for stop in range(1, count + 1):
            for first in range(stop):
                largest = max(best[first], before[stop] - before[first])
                if largest < following[stop]:
                    following[stop], choice[stop] = largest, first
        best = following
        choices.append(choice)
    spans: list[tuple[int, int]] = []
    stop = count
    for choice in reversed(choices):
        spans.append((choice[stop], stop))
        stop = choice[stop]
    return tuple(reversed(spans))
