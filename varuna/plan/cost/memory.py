"""How many bytes a stage needs on its device at the fullest moment of a step.

That moment is in the last backwards: all micro-batches that the schedule lets a stage hold are held,
the gradients are there, and so are the buckets in which they travel over the replicas (each gradient
is copied into its bucket; the buckets stay from step to step, as does the optimizer's state).
"""

from math import ceil
from typing import NamedTuple

from varuna.plan.cost.costs import Costs, Sizes
from varuna.schedule import half_done, held, recomputes
from varuna.types import MemoryForecast


class Kept(NamedTuple):
    """The micro-batches that a stage holds at once."""

    held: int  # between their forward and the end of their backward
    whole: int  # of these, those with all their activations, and not only what they were given
    split: int  # of these, those between the two parts of their backward


class Room(NamedTuple):
    """What of a layout decides how much memory each of its stages needs."""

    sizes: Sizes
    width: int
    replica_batch: int
    shard: bool  # the optimizer's state is spread over the replicas


def stage_memory(
    costs: Costs,
    room: Room,
    first: int,
    stop: int,
    kept: Kept,
) -> MemoryForecast:
    profile, sizes = costs.profile, room.sizes
    tied_bytes, tied_elements = costs.tied_twice(first, stop)
    gradients = costs.gradient_bytes[stop] - costs.gradient_bytes[first] - tied_bytes
    elements = costs.num_trained[stop] - costs.num_trained[first] - tied_elements
    received, sent = sizes.sent_bytes[first], sizes.sent_bytes[stop]
    activations = sizes.activation_bytes[stop] - sizes.activation_bytes[first]
    # Besides what is held: a message of each kind on its way in or out, and the batch itself.
    boundaries = received + sent + sizes.returned_bytes[first] + sizes.returned_bytes[stop]
    return MemoryForecast(
        fixed=profile.fixed_bytes,
        parameters=int(costs.parameter_bytes[stop] - costs.parameter_bytes[first] - tied_bytes),
        gradients=int(gradients),
        buckets=int(gradients) if room.width > 1 else 0,
        optimizer=ceil(
            profile.optimizer.state_bytes_per_element * elements / (room.width if room.shard else 1)
        ),
        activations=ceil(
            kept.whole * activations
            + (kept.held - kept.whole) * received
            + kept.split * (sizes.split_bytes[stop] - sizes.split_bytes[first])
        ),
        boundaries=boundaries + room.replica_batch * profile.sample_bytes,
        working=ceil(max(sizes.working_bytes[first:stop])),
    )


class Needs:
    """The totals of `stage_memory` for many spans: sums made once, so that each is a few differences."""

    def __init__(self, costs: Costs, room: Room) -> None:
        profile, sizes = costs.profile, room.sizes
        copies = 2 if room.width > 1 else 1
        state = profile.optimizer.state_bytes_per_element / (room.width if room.shard else 1)
        self._costs = costs
        self._sizes = sizes
        self._copies = copies + 1  # of a tied tensor: the parameter, and its gradients
        self._state = state
        self._steady = [
            parameters + copies * gradients + state * elements
            for parameters, gradients, elements in zip(
                costs.parameter_bytes, costs.gradient_bytes, costs.num_trained, strict=True
            )
        ]
        self._always = profile.fixed_bytes + room.replica_batch * profile.sample_bytes
        self._boundaries = [a + b for a, b in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)]
        self._working = costs.working_peaks(sizes.microbatch_size)
        self._ties = bool(profile.ties)

    @property
    def least_steady(self) -> float:
        """What all stages together keep from step to step, each tied tensor once."""
        num_bytes, num_elements = self._costs.tied_twice(0, self._costs.num_segments)
        return self._steady[-1] - self._copies * num_bytes - self._state * num_elements

    def total(self, first: int, stop: int, kept: Kept) -> float:
        sizes = self._sizes
        activations = sizes.activation_bytes
        total = (
            self._always
            + self._steady[stop]
            - self._steady[first]
            + kept.whole * (activations[stop] - activations[first])
            + (kept.held - kept.whole) * sizes.sent_bytes[first]
            + kept.split * (sizes.split_bytes[stop] - sizes.split_bytes[first])
            + self._boundaries[first]
            + self._boundaries[stop]
            + self._working[first][stop - first - 1]
        )
        if self._ties:
            num_bytes, num_elements = self._costs.tied_twice(first, stop)
            total -= self._copies * num_bytes + self._state * num_elements
        return total


def keeps(name: str, *, stage: int, stages: int, microbatches: int, recompute: bool) -> Kept:
    """A stage that recomputes holds one micro-batch whole, and with it those whose weight part is to come.

    One whose backward follows right upon its forward has nothing to recompute.
    """
    size = {"stage": stage, "stages": stages, "microbatches": microbatches}
    number = held(name, **size)
    split = half_done(name, stage=stage, microbatches=microbatches)
    whole = max(1, split) if recompute and recomputes(name, **size) else number
    return Kept(number, whole, split)
