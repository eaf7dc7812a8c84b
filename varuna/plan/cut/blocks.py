"""Divides a model without CutPoints into blocks, from its operations, before anything is measured.

The planner builds stages from blocks. Blocks are good if a stage that should end at any moment of the
model's time finds a cheap cut near that moment:

    operations ──► put in a row, one branch after the other (`order`)
               ──► candidates between them, each with its moment and the bytes that cross it
               ──► cheapest first; a candidate is dropped if a cheaper one near it serves as well

Only what is near a candidate decides. Equal layers are therefore cut at equal places, and a profiler
measures few kinds of blocks. All numbers are integers, so equal values compare equal. The result
depends on the model alone, not on devices, ranks or stages: profiles, plans and checkpoints of one
model fit each other.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from varuna.plan.cut.order import best_order, crossings
from varuna.types import OperationGraph

FEWEST = 32
"""Least number of blocks, if the model has enough candidates. Good for 8 stages and more."""
MOST = 512
"""Most blocks: no block is shorter than 1/MOST of the model."""
FORWARD_AND_BACKWARD = 3
"""A backward takes twice as long as its forward."""
FLOPS_PER_MOVED_BYTE = 32
"""Flops that a device computes while it reads or writes a byte: 5 on a CPU, 200 on a large GPU."""
FLOPS_PER_CROSSING_BYTE = 10_000
"""Flops that it computes while a byte travels to another machine: 50 on a CPU, 10,000 on a GPU."""


class CutCandidate(NamedTuple):
    """A position between two operations. Times are in flops."""

    crossing: int  # time to send what crosses a cut here
    stop: int  # number of operations before it
    moment: int  # time when these are done


def partition(graph: OperationGraph, *, fewest: int = FEWEST, most: int = MOST) -> tuple[int, ...]:
    """Return the block of each operation: at most `most` blocks, at least `fewest` if possible."""
    durations = [
        FORWARD_AND_BACKWARD * (operation.flops + FLOPS_PER_MOVED_BYTE * operation.moved_bytes)
        for operation in graph.operations
    ]
    order = best_order(graph, durations, windows=fewest)
    whole = sum(durations)
    moments = accumulate((durations[operation] for operation in order), initial=0)
    candidates = [
        CutCandidate(num_bytes * FLOPS_PER_CROSSING_BYTE, stop, moment)
        for stop, (num_bytes, moment) in enumerate(zip(crossings(graph, order), moments, strict=True))
    ]
    chosen = _choose(candidates, whole, near=whole // fewest, shortest=whole // most)
    cuts = {candidate.stop for candidate in chosen}
    in_a_row = accumulate(int(stop in cuts) for stop in range(len(order)))
    block_of = dict(zip(order, in_a_row, strict=True))
    return tuple(block_of[operation] for operation in range(len(order)))


def _choose(
    candidates: Sequence[CutCandidate], whole: int, *, near: int, shortest: int
) -> list[CutCandidate]:
    """Choose cuts so that each dropped candidate has a chosen one near it that is at least as good."""
    shortest = max(shortest, 1)
    chosen: list[tuple[int, CutCandidate]] = []  # by moment
    for candidate in sorted(candidates):
        if not candidate.crossing or not shortest <= candidate.moment <= whole - shortest:
            continue  # nothing crosses it, or almost nothing is on one side of it
        first = bisect_left(chosen, (candidate.moment - near,))
        for moment, other in chosen[first : bisect_left(chosen, (candidate.moment + near + 1,))]:
            distance = abs(moment - candidate.moment)
            if distance < shortest or other.crossing + distance <= candidate.crossing:
                break
        else:
            insort(chosen, (candidate.moment, candidate))
    return [candidate for _, candidate in chosen]
