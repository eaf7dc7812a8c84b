"""Where a model without CutPoints may be cut: chosen from its operations, before anything is measured.

Blocks are what a planner makes stages of. They are good where a stage may end at any moment of the
model's time and find a cut near by, over which little travels:

    operations ──► in a row, one branch after the other (`order`)
               ──► the places between them, each with its moment and what would cross it
               ──► cheapest first, those near which no cheaper one serves as well

Everything is decided by what is near: equal layers are cut at equal places, wherever in the model they
are, and so a profiler has few kinds of blocks to measure. Numbers are whole, so that equal is equal.
The answer depends on the model alone, not on devices, ranks or stages: profiles, plans and
checkpoints of one model fit each other.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from varuna.plan.cut.order import best_order, crossings
from varuna.types import Operation, OperationGraph

FEWEST = 32
"""So many blocks there are at least, where the model has that many places: good for 8 stages and more."""
MOST = 512
"""So many at most: no block is shorter than such a part of the whole."""
FORWARD_AND_BACKWARD = 3
"""A backward takes twice as long as its forward."""
FLOPS_PER_MOVED_BYTE = 32
"""What a device computes while it reads or writes a byte: 5 on a CPU, 200 on the largest."""
FLOPS_PER_CROSSING_BYTE = 10_000
"""What it computes while a byte goes to another machine: 50 where CPUs compute, 10,000 where GPUs do."""


class Place(NamedTuple):
    """A place between two operations. Flops stand for seconds."""

    crossing: int  # what would travel over a cut here
    stop: int  # so many operations lie before it
    moment: int  # when these are done


def partition(graph: OperationGraph, *, fewest: int = FEWEST, most: int = MOST) -> tuple[int, ...]:
    """The block of each operation: at most `most`, and `fewest` or more where there are places enough."""
    durations = [_duration(operation) for operation in graph.operations]
    order = best_order(graph, durations, windows=fewest)
    whole = sum(durations)
    places = _places(crossings(graph, order), [durations[operation] for operation in order])
    cuts = {place.stop for place in _choose(places, whole, near=whole // fewest, shortest=whole // most)}
    in_a_row = accumulate(int(place in cuts) for place in range(len(order)))
    block_of = dict(zip(order, in_a_row, strict=True))
    return tuple(block_of[operation] for operation in range(len(order)))


def _duration(operation: Operation) -> int:
    return FORWARD_AND_BACKWARD * (operation.flops + FLOPS_PER_MOVED_BYTE * operation.moved_bytes)


def _places(crossing: Sequence[int], durations: Sequence[int]) -> list[Place]:
    moments = accumulate(durations, initial=0)
    return [
        Place(num_bytes * FLOPS_PER_CROSSING_BYTE, stop, moment)
        for stop, (num_bytes, moment) in enumerate(zip(crossing, moments, strict=True))
    ]


def _choose(places: Sequence[Place], whole: int, *, near: int, shortest: int) -> list[Place]:
    """Every place left out has a chosen one near it, to which a stage may rather go."""
    chosen: list[tuple[int, Place]] = []  # by moment
    for place in sorted(places):
        if not place.crossing or not max(shortest, 1) <= place.moment <= whole - max(shortest, 1):
            continue  # nothing would go over it, or there is next to nothing on one side of it
        first = bisect_left(chosen, (place.moment - near,))
        for moment, other in chosen[first : bisect_left(chosen, (place.moment + near + 1,))]:
            distance = abs(moment - place.moment)
            if distance < max(shortest, 1) or other.crossing + distance <= place.crossing:
                break
        else:
            insort(chosen, (place.moment, place))
    return [place for _, place in chosen]
