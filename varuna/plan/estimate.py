"""What segments cost on a device that is not there: from their shapes, and how fast such a device is.

A forward takes a time for each operation that it starts, one for what it computes and one for what it
moves; a backward takes twice as long. `calibrate` finds the three in a profile, so that what was
measured of some segments tells what others of the same device will take.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec

from varuna.types import Duration, Profile, Segment, SizeCost

BACKWARD = 2.0


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a device is, in what it reaches rather than in what its makers promise."""

    flops_per_second: float
    bytes_per_second: float  # of its own memory
    seconds_per_operation: float = 5e-6
    memory_bytes: int

    def seconds(self, segment: Segment, microbatch_size: int) -> float:
        """Of a forward."""
        operations, flops, moved = amounts(segment, microbatch_size)
        return (
            operations * self.seconds_per_operation
            + flops / self.flops_per_second
            + moved / self.bytes_per_second
        )


def amounts(segment: Segment, microbatch_size: int) -> tuple[float, float, float]:
    """The operations, flops and moved bytes of a forward."""
    return (
        float(max(segment.num_operations, 1)),
        segment.flops_per_sample * microbatch_size,
        float(segment.moved_bytes.size(microbatch_size)),
    )


def estimate(segment: Segment, speed: Speed, microbatch_sizes: Iterable[int]) -> tuple[SizeCost, ...]:
    def at(size: int) -> SizeCost:
        forward = speed.seconds(segment, size)
        kept = segment.kept_bytes.size(size)
        return SizeCost(
            microbatch_size=size,
            forward=Duration(forward),
            forward_only=Duration(forward),
            backward=Duration(BACKWARD * forward),
            backward_inputs=Duration(BACKWARD / 2 * forward),
            backward_weights=Duration(BACKWARD / 2 * forward),
            activation_bytes=kept,
            # As much again as its largest values; of those, a few out of all that are kept.
            working_bytes=2 * kept // max(segment.num_operations, 1),
        )

    return tuple(at(size) for size in sorted(set(microbatch_sizes)))


def calibrate(profile: Profile, segments: Sequence[Segment]) -> Speed:
    """The speed by which the segments would take what they were measured to take, as nearly as may be.

    Least squares of the shares by which estimates are off, over all ways to leave out some of the three
    parts: what would come out negative has no part in it.
    """
    rows = []
    for kind, cost in enumerate(profile.kinds):
        segment = segments[profile.segments.index(kind)]
        for size in cost.sizes:
            forward = size.forward.seconds
            rows.append([amount / forward for amount in amounts(segment, size.microbatch_size)])
    found = []
    for count in (1, 2, 3):
        for parts in combinations(range(3), count):
            rates = _least_squares([[row[part] for part in parts] for row in rows])
            if rates is not None and min(rates) > 0:
                error = sum(
                    (sum(rate * row[part] for rate, part in zip(rates, parts, strict=True)) - 1) ** 2
                    for row in rows
                )
                found.append((error, parts, rates))
    if not found:
        raise ValueError("the profile tells nothing of the device's speed (its segments do no work)")
    _, parts, rates = min(found)
    of = dict(zip(parts, rates, strict=True))
    return Speed(
        seconds_per_operation=of.get(0, 0.0),
        flops_per_second=1 / of[1] if 1 in of else float("inf"),
        bytes_per_second=1 / of[2] if 2 in of else float("inf"),
        memory_bytes=profile.device_memory_bytes,
    )


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, ...] | None:
    """x for which all row · x are nearest to 1; None where the rows do not tell it."""
    count = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) for i in range(count)]
    if not all(scales):
        return None
    matrix = [
        [sum(row[i] / scales[i] * row[j] / scales[j] for row in rows) for j in range(count)]
        + [sum(row[i] / scales[i] for row in rows)]
        for i in range(count)
    ]
    for i in range(count):
        pivot = max(range(i, count), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-9:
            return None
        for other in range(count):
            if other != i:
                factor = matrix[other][i] / matrix[i][i]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[i], strict=True)]
    return tuple(matrix[i][count] / matrix[i][i] / scales[i] for i in range(count))
