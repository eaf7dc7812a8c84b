"""Least work of a whole model for one micro-batch, for any cuts. Lower bounds are built from it."""

from itertools import pairwise
from math import ceil
from typing import NamedTuple

from varuna.plan.cost.costs import CostTable


class LeastWork(NamedTuple):
    """Seconds of the whole model for one micro-batch; each segment counts with the least it can take."""

    forward: float
    backward: float  # the part that the stage before waits for
    weights: float
    at_least: tuple[tuple[float, int], ...]  # (seconds, number): so many segments take so long or longer
    forward_share: float  # largest share of the forward in all three
    gradient_bytes: float  # least bytes per second of a segment

    def heaviest(self, depth: int) -> float:
        """Return the least work of the heaviest stage: n segments in `depth` stages share stages."""
        return max(ceil(number / depth) * seconds for seconds, number in self.at_least)


def least_of(costs: CostTable, size: int, split: bool, speed: float) -> LeastWork:
    """Return the least work of a micro-batch of this size or larger, so bounds never fall with the size.

    Times are linear between two measured sizes, so the least is at a measured size.
    """
    larger = [costs.sizes(s) for s in costs.microbatch_sizes() if s > size]
    tables = [costs.sizes(size), *larger]

    def fastest(*columns: list[float]) -> list[float]:
        of_each = [[after - before for before, after in pairwise(column)] for column in columns]
        return [min(values) / speed for values in zip(*of_each, strict=True)]

    forwards = fastest(*(t.forward for t in tables), *(t.forward_only for t in tables))
    backwards = fastest(*(t.backward for t in tables))
    wholes = backwards
    if split:  # the first stage runs its backward in one part
        both = fastest(*([i + w for i, w in zip(t.inputs, t.weights, strict=True)] for t in tables))
        wholes = list(map(min, both, backwards))
        backwards = list(map(min, fastest(*(t.inputs for t in tables)), wholes))
    # Differences of running sums differ in the last digits for segments of one kind.
    totals = [float(f"{f + b:.9e}") * (1 - 1e-9) for f, b in zip(forwards, wholes, strict=True)]
    shares = [f / total for f, total in zip(forwards, totals, strict=True)]
    gradients = [after - before for before, after in pairwise(costs.gradient_bytes)]
    for tie in costs.profile.ties:  # a stage may reduce a tied tensor only once
        for segment in tie.segments:
            gradients[segment] -= tie.num_bytes
    return LeastWork(
        sum(forwards),
        sum(backwards),
        sum(wholes) - sum(backwards),
        tuple({total: place + 1 for place, total in enumerate(sorted(totals, reverse=True))}.items()),
        max(shares),
        min(g / total for g, total in zip(gradients, totals, strict=True)),
    )
