"""What segments cost on a device that is not there: from their shapes, and how fast such a device is.

A forward takes a time for each operation that it starts, one for what it computes and one for what it
moves. A backward takes some times as long, and adds gradients to those of the weights.
"""

from collections.abc import Iterable

import msgspec

from varuna.types import Duration, Segment, SizeCost

WEIGHT_PASSES = 2
"""A gradient is written, and added to what is there."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a device is, in what it reaches rather than in what its makers promise."""

    flops_per_second: float
    bytes_per_second: float  # of its own memory
    seconds_per_operation: float = 5e-6
    memory_bytes: int
    backward: float = 2.0  # a backward, in forwards, but for the weights
    activations: float = 1.0  # what is held from a forward to its backward, in what its shapes tell
    measured_on: str = ""  # the device that it was found on; empty where somebody has stated it

    def seconds(self, segment: Segment, microbatch_size: int) -> float:
        """Of a forward."""
        operations, flops, moved = amounts(segment, microbatch_size)
        return (
            operations * self.seconds_per_operation
            + flops / self.flops_per_second
            + moved / self.bytes_per_second
        )

    def backward_seconds(self, segment: Segment, microbatch_size: int) -> float:
        return self.backward * self.seconds(segment, microbatch_size) + self.weight_seconds(segment)

    def weight_seconds(self, segment: Segment) -> float:
        """To move the gradients of the weights, however few samples there are."""
        return WEIGHT_PASSES * segment.parameter_bytes / self.bytes_per_second


def amounts(segment: Segment, microbatch_size: int) -> tuple[float, float, float]:
    """The operations, flops and moved bytes of a forward."""
    return (
        float(max(segment.num_operations, 1)),
        segment.flops_per_sample * microbatch_size,
        float(segment.moved_bytes.size(microbatch_size)),
    )


def estimate(segment: Segment, speed: Speed, microbatch_sizes: Iterable[int]) -> tuple[SizeCost, ...]:
    def at(size: int) -> SizeCost:
        forward, backward = speed.seconds(segment, size), speed.backward_seconds(segment, size)
        kept = round(speed.activations * segment.kept_bytes.size(size))
        return SizeCost(
            microbatch_size=size,
            forward=Duration(forward),
            forward_only=Duration(forward),
            backward=Duration(backward),
            backward_inputs=Duration(backward / 2),
            backward_weights=Duration(backward / 2),
            activation_bytes=kept,
            # As much again as its largest values; of those, a few out of all that are kept.
            working_bytes=2 * kept // max(segment.num_operations, 1),
        )

    return tuple(at(size) for size in sorted(set(microbatch_sizes)))
