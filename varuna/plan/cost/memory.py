"""Peak memory of a stage in bytes.

The peak is in the last backwards. The stage then holds as many micro-batches as its schedule allows,
all gradients, and the buckets that reduce them over the replicas. Each gradient is copied into a
bucket. Buckets and optimizer state stay from step to step.
"""

from math import ceil
from typing import NamedTuple

from varuna.plan.cost.costs import CostTable, SegmentSums
from varuna.schedule import half_done, held, recomputes
from varuna.types import MemoryForecast


class HeldCounts(NamedTuple):
    """Numbers of micro-batches that a stage holds at once."""

    held: int  # between their forward and the end of their backward
    whole: int  # of these, with all activations; the others hold only their inputs
    split: int  # of these, between the two parts of their backward


class MemoryTerms(NamedTuple):
    """The properties of a layout that decide the memory of its stages."""

    sizes: SegmentSums
    width: int
    replica_batch: int
    shard: bool  # the optimizer state is sharded over the replicas


def stage_memory(
    costs: CostTable, terms: MemoryTerms, first: int, stop: int, counts: HeldCounts
) -> MemoryForecast:
    """Return the memory of a stage with segments `first` to `stop - 1`, by purpose."""
    profile, sizes = costs.profile, terms.sizes
    tied_bytes, tied_elements = costs.tied_twice(first, stop)
    gradients = costs.gradient_bytes[stop] - costs.gradient_bytes[first] - tied_bytes
    elements = costs.num_trained[stop] - costs.num_trained[first] - tied_elements
    received, sent = sizes.sent_bytes[first], sizes.sent_bytes[stop]
    activations = sizes.activation_bytes[stop] - sizes.activation_bytes[first]
    # One message of each kind is on its way in or out; the batch itself is in memory too.
    boundaries = received + sent + sizes.returned_bytes[first] + sizes.returned_bytes[stop]
    return MemoryForecast(
        fixed=profile.fixed_bytes,
        parameters=int(costs.parameter_bytes[stop] - costs.parameter_bytes[first] - tied_bytes),
        gradients=int(gradients),
        buckets=int(gradients) if terms.width > 1 else 0,
        optimizer=ceil(
            profile.optimizer.state_bytes_per_element * elements / (terms.width if terms.shard else 1)
        ),
        activations=ceil(
            counts.whole * activations
            + (counts.held - counts.whole) * received
            + counts.split * (sizes.split_bytes[stop] - sizes.split_bytes[first])
        ),
        boundaries=boundaries + terms.replica_batch * profile.sample_bytes,
        working=ceil(max(sizes.working_bytes[first:stop])),
    )


class MemoryTotals:
    """Totals of `stage_memory` for many ranges of segments, from running sums."""

    def __init__(self, costs: CostTable, terms: MemoryTerms) -> None:
        profile, sizes = costs.profile, terms.sizes
        copies = 2 if terms.width > 1 else 1
        state = profile.optimizer.state_bytes_per_element / (terms.width if terms.shard else 1)
        self._costs, self._sizes, self._state = costs, sizes, state
        self._copies = copies + 1  # of a tied tensor: the parameter and its gradients
        self._steady = [
            parameters + copies * gradients + state * elements
            for parameters, gradients, elements in zip(
                costs.parameter_bytes, costs.gradient_bytes, costs.num_trained, strict=True
            )
        ]
        self._always = profile.fixed_bytes + terms.replica_batch * profile.sample_bytes
        self._boundaries = [a + b for a, b in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)]
        self._working = costs.working_peaks(sizes.microbatch_size)

    @property
    def least_steady(self) -> float:
        """Return what all stages together keep from step to step, each tied tensor once."""
        num_bytes, num_elements = self._costs.tied_twice(0, self._costs.num_segments)
        return self._steady[-1] - self._copies * num_bytes - self._state * num_elements

    def total(self, first: int, stop: int, counts: HeldCounts) -> float:
        sizes = self._sizes
        activations = sizes.activation_bytes
        total = (
            self._always
            + self._steady[stop]
            - self._steady[first]
            + counts.whole * (activations[stop] - activations[first])
            + (counts.held - counts.whole) * sizes.sent_bytes[first]
            + counts.split * (sizes.split_bytes[stop] - sizes.split_bytes[first])
            + self._boundaries[first]
            + self._boundaries[stop]
            + self._working[first][stop - first - 1]
        )
        if self._costs.profile.ties:
            num_bytes, num_elements = self._costs.tied_twice(first, stop)
            total -= self._copies * num_bytes + self._state * num_elements
        return total


def held_counts(name: str, *, stage: int, stages: int, microbatches: int, recompute: bool) -> HeldCounts:
    """Return how many micro-batches a stage holds.

    A stage with recompute holds one micro-batch whole, or all that wait for their weight part. A stage
    whose backwards follow right after their forwards does not recompute.
    """
    size = {"stage": stage, "stages": stages, "microbatches": microbatches}
    number = held(name, **size)
    split = half_done(name, stage=stage, microbatches=microbatches)
    whole = max(1, split) if recompute and recomputes(name, **size) else number
    return HeldCounts(number, whole, split)
