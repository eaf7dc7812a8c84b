"""Machines that compute more slowly than their peers: those that hold the same stage, and do the same work.

Only computing counts. Who waits for a slow machine is as late as that, and not to blame.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from varuna.types import Layout, spread_evenly


class Rule(msgspec.Struct, frozen=True):
    factor: float = 1.25  # slower than the median of its stage
    least_seconds: float = 0.01  # and by so much: what is shorter varies anyhow
    steps: int = 5  # one after the other


class Watch(msgspec.Struct, frozen=True):
    """How many steps each rank has been slow for, and how far each was when that was last looked at."""

    slow_for: Mapping[int, int] = {}
    iterations: Mapping[int, int] = {}


def look(
    watch: Watch,
    seconds: Mapping[int, tuple[int, float]],
    layout: Layout,
    rule: Rule,
) -> tuple[Watch, frozenset[int]]:
    """From (iteration, compute seconds) of each rank: the ranks that are too slow.

    A replica with more samples may take as much longer. A stage of two has no majority: the slower one is
    found if it is too slow for the faster one.
    """
    slow_for, iterations = dict(watch.slow_for), dict(watch.iterations)
    for ranks in layout.stage_map:
        share = dict(zip(ranks, spread_evenly(layout.batch_size, parts=len(ranks)), strict=True))
        known = {rank: seconds[rank] for rank in ranks if rank in seconds and seconds[rank][1] > 0}
        if len(known) < 2:
            continue
        # What all would take for one's share, once for each share: there are two at most.
        fair_times = {
            own: sorted(
                taken * more_work(own, share[rank], layout.microbatch_size)
                for rank, (_, taken) in known.items()
            )
            for own in {share[rank] for rank in known}
        }
        for rank, (iteration, taken) in known.items():
            if iteration == iterations.get(rank):
                continue  # the same step as last time
            iterations[rank] = iteration
            fair = median_without(fair_times[share[rank]], taken)
            limit = max(rule.factor * fair, fair + rule.least_seconds)
            slow_for[rank] = slow_for.get(rank, 0) + 1 if taken > limit else 0
    found = frozenset(rank for rank, count in slow_for.items() if count >= rule.steps)
    return Watch(slow_for, iterations), found


def more_work(own: int, theirs: int, microbatch_size: int) -> float:
    """How many times another's work a share may be: by samples, or by micro-batches, of which any costs."""
    return max(own / theirs, -(-own // microbatch_size) / -(-theirs // microbatch_size))


def median_without(ordered: Sequence[float], value: float) -> float:
    """Of the values but for one of them, without looking at each: each of a thousand asks."""
    place = bisect_left(ordered, value)

    def other(index: int) -> float:
        return ordered[index if index < place else index + 1]

    count = len(ordered) - 1
    return (other((count - 1) // 2) + other(count // 2)) / 2
