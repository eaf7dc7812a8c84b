"""Estimates the costs of segments from their shapes and the speed of a device, without measuring.

The time of a forward is the sum of three parts: per operation, per flop, and per byte that it moves. A
backward takes a multiple of that, plus the time to add the gradients of the weights.
"""

from collections.abc import Iterable

import msgspec

from varuna.types import Duration, Segment, SizeCost


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Achieved (not nominal) speed of a device."""

    flops_per_second: float
    bytes_per_second: float  # of its own memory
    seconds_per_operation: float = 5e-6
    memory_bytes: int
    backward: float = 2.0  # time of a backward relative to its forward, without the weights
    activations: float = 1.0  # memory held until the backward, relative to the estimate from shapes
    measured_on: str = ""  # device that was calibrated; empty for numbers given by the user

    def seconds(self, segment: Segment, microbatch_size: int) -> float:
        """Return the time of a forward."""
        operations, flops, moved = amounts(segment, microbatch_size)
        return (
            operations * self.seconds_per_operation
            + flops / self.flops_per_second
            + moved / self.bytes_per_second
        )

    def backward_seconds(self, segment: Segment, microbatch_size: int) -> float:
        return self.backward * self.seconds(segment, microbatch_size) + self.weight_seconds(segment)

    def weight_seconds(self, segment: Segment) -> float:
        """Return the time to write the gradients and to add them up; it does not depend on the batch."""
        return 2 * segment.parameter_bytes / self.bytes_per_second


def amounts(segment: Segment, microbatch_size: int) -> tuple[float, float, float]:
    """Return the operations, flops and moved bytes of a forward."""
    return (
        float(max(segment.num_operations, 1)),
        segment.flops_per_sample * microbatch_size,
        float(segment.moved_bytes.size(microbatch_size)),
    )


def estimate(segment: Segment, speed: Speed, microbatch_sizes: Iterable[int]) -> tuple[SizeCost, ...]:
    """Return the estimated costs of a segment at each size, in ascending order."""

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
            # Twice the mean of its kept values.
            working_bytes=2 * kept // max(segment.num_operations, 1),
        )

    return tuple(at(size) for size in sorted(set(microbatch_sizes)))
