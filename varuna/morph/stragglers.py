"""Machines that compute more slowly than their peers: those that hold the same stage, and do the same work.

Only computing counts. Who waits for a slow machine is as late as that, and not to blame.
"""

from collections.abc import Collection, Mapping, Sequence

import msgspec


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
    stages: Collection[Collection[int]],
    rule: Rule,
) -> tuple[Watch, frozenset[int]]:
    """From (iteration, compute seconds) of each rank, and each stage's ranks: the ranks that are too slow.

    A stage of two has no majority: the slower one is found if it is too slow for the faster one.
    """
    slow_for, iterations = dict(watch.slow_for), dict(watch.iterations)
    for ranks in stages:
        known = {rank: seconds[rank] for rank in ranks if rank in seconds and seconds[rank][1] > 0}
        if len(known) < 2:
            continue
        by_time = sorted(known, key=lambda rank: known[rank][1])
        ordered = [known[rank][1] for rank in by_time]
        for place, rank in enumerate(by_time):
            iteration, taken = known[rank]
            if iteration == iterations.get(rank):
                continue  # the same step as last time
            iterations[rank] = iteration
            usual = median_of_others(ordered, place)
            limit = max(rule.factor * usual, usual + rule.least_seconds)
            slow_for[rank] = slow_for.get(rank, 0) + 1 if taken > limit else 0
    found = frozenset(rank for rank, count in slow_for.items() if count >= rule.steps)
    return Watch(slow_for, iterations), found


def median_of_others(ordered: Sequence[float], place: int) -> float:
    """Of all but the one at that place; without looking at each of them, since each of them asks."""

    def other(index: int) -> float:
        return ordered[index if index < place else index + 1]

    count = len(ordered) - 1
    return (other((count - 1) // 2) + other(count // 2)) / 2
