"""Detection of slow machines: compare compute times of ranks that run the same stage.

Only compute time counts: a rank that waits for a slow machine is late, but not slow.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from varuna.types import Layout, spread_evenly

# A rank is slow if its compute time exceeds the median of its stage
SLOW_FACTOR = 1.25  # by this factor,
LEAST_SECONDS = 0.01  # and by this much, because shorter differences are noise,
SLOW_STEPS = 5  # for this many steps in a row.


class StragglerWatch(msgspec.Struct, frozen=True):
    """Number of slow steps in a row of each rank, and the last iteration that was counted."""

    slow_for: Mapping[int, int] = {}
    iterations: Mapping[int, int] = {}


def find_stragglers(
    watch: StragglerWatch, seconds: Mapping[int, tuple[int, float]], layout: Layout
) -> tuple[StragglerWatch, frozenset[int]]:
    """Return the slow ranks, from the (iteration, compute seconds) of each rank.

    A replica with more samples may take proportionally longer. In a stage with two replicas, the
    slower one is compared with the faster one.
    """
    slow_for, iterations = dict(watch.slow_for), dict(watch.iterations)
    for ranks in layout.stage_map:
        samples = dict(zip(ranks, spread_evenly(layout.batch_size, parts=len(ranks)), strict=True))
        known = {rank: seconds[rank] for rank in ranks if rank in seconds and seconds[rank][1] > 0}
        if len(known) < 2:
            continue
        # The times of all ranks scaled to a number of samples; there are at most two numbers.
        scaled_times = {
            count: sorted(
                taken * work_ratio(count, samples[rank], layout.microbatch_size)
                for rank, (_, taken) in known.items()
            )
            for count in {samples[rank] for rank in known}
        }
        for rank, (iteration, taken) in known.items():
            if iteration == iterations.get(rank):
                continue  # this step was counted before
            iterations[rank] = iteration
            usual = median_without(scaled_times[samples[rank]], taken)
            limit = max(SLOW_FACTOR * usual, usual + LEAST_SECONDS)
            slow_for[rank] = slow_for.get(rank, 0) + 1 if taken > limit else 0
    found = frozenset(rank for rank, count in slow_for.items() if count >= SLOW_STEPS)
    return StragglerWatch(slow_for, iterations), found


def work_ratio(own: int, theirs: int, microbatch_size: int) -> float:
    """Return the larger ratio of two replicas' work: by samples, or by number of micro-batches."""
    return max(own / theirs, -(-own // microbatch_size) / -(-theirs // microbatch_size))


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of the sorted values without one occurrence of `value`, in O(log n)."""
    place = bisect_left(ordered, value)

    def other(index: int) -> float:
        return ordered[index if index < place else index + 1]

    count = len(ordered) - 1
    return (other((count - 1) // 2) + other(count // 2)) / 2
