"""What a micro-batch takes of a whole model at least, however it is cut: what bounds are made of."""

from itertools import pairwise
from math import ceil
from typing import NamedTuple

from varuna.plan.cost.costs import Costs


class Least(NamedTuple):
    """The whole model for one micro-batch, each segment the fastest way that any stage can run it."""

    forward: float
    backward: float  # what the stage before waits for
    weights: float
    at_least: tuple[tuple[float, int], ...]  # so many segments take so long each, all three
    forward_share: float  # of all three, at most
    gradient_bytes: float  # for each second of a segment, at least

    def heaviest(self, depth: int) -> float:
        """What some stage takes, however the model is cut: so many in so few stages must be together."""
        return max(ceil(number / depth) * seconds for seconds, number in self.at_least)


def least_of(costs: Costs, size: int, split: bool, speed: float) -> Least:
    """Of a micro-batch of a size or larger: so that more work never has a smaller bound.

    (Between two measured sizes times are straight lines, so that the least is at one of them.)
    """
    larger = [costs.sizes(s) for s in costs.microbatch_sizes() if s > size]
    tables = [costs.sizes(size), *larger]

    def fastest(*columns: list[float]) -> list[float]:
        of_each = [[after - before for before, after in pairwise(column)] for column in columns]
        return [min(values) / speed for values in zip(*of_each, strict=True)]

    forwards = fastest(*(t.forward for t in tables), *(t.forward_only for t in tables))
    backwards = fastest(*(t.backward for t in tables))
    wholes = backwards
    if split:  # a first stage does all of its backward at once
        both = fastest(*([i + w for i, w in zip(t.inputs, t.weights, strict=True)] for t in tables))
        wholes = list(map(min, both, backwards))
        backwards = list(map(min, fastest(*(t.inputs for t in tables)), wholes))
    # Segments of one kind differ in their last digits, by the running sums that they were taken from.
    totals = [float(f"{f + b:.9e}") * (1 - 1e-9) for f, b in zip(forwards, wholes, strict=True)]
    shares = [f / total for f, total in zip(forwards, totals, strict=True)]
    gradients = [after - before for before, after in pairwise(costs.gradient_bytes)]
    for tie in costs.profile.ties:  # which a stage may reduce only once
        for segment in tie.segments:
            gradients[segment] -= tie.num_bytes
    return Least(
        sum(forwards),
        sum(backwards),
        sum(wholes) - sum(backwards),
        tuple({total: place + 1 for place, total in enumerate(sorted(totals, reverse=True))}.items()),
        max(shares),
        min(g / total for g, total in zip(gradients, totals, strict=True)),
    )
