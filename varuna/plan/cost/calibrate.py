"""Finds the speed of a device from measured segments.

The speed then estimates segments and micro-batch sizes that were not measured, or a model on `meta`.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from operator import mul
from statistics import fmean, median

import msgspec

from varuna.plan.cost.estimate import Speed, amounts
from varuna.types import Duration, Profile, Segment, SizeCost

UNBOUNDED = 1e30
"""A rate so high that it adds no time. JSON has no infinity."""


def calibrate(profile: Profile, segments: Sequence[Segment]) -> Speed:
    """Return the speed of the device on which these segments were measured."""
    return speed_of(
        (
            (segments[profile.segments.index(kind)], size)
            for kind, cost in enumerate(profile.kinds)
            for size in cost.sizes
        ),
        memory_bytes=profile.device_memory_bytes,
        device=profile.device,
    )


def speed_of(measured: Iterable[tuple[Segment, SizeCost]], *, memory_bytes: int, device: str) -> Speed:
    """Return the speed that predicts the measured times best, by least squares.

    Each subset of the three parts of a forward is fitted; a fit with a negative rate is dropped. Errors
    are relative to the segment's time plus the mean time, so that many tiny segments do not dominate.
    """
    pairs = list(measured)
    mean = fmean(size.forward.seconds for _, size in pairs)
    weights = [1 / (size.forward.seconds + mean) for _, size in pairs]
    targets = [weight * size.forward.seconds for weight, (_, size) in zip(weights, pairs, strict=True)]
    rows = [
        [weight * amount for amount in amounts(segment, size.microbatch_size)]
        for weight, (segment, size) in zip(weights, pairs, strict=True)
    ]
    found = []
    for parts in chain.from_iterable(combinations(range(3), count) for count in (1, 2, 3)):
        chosen = [[row[part] for part in parts] for row in rows]
        rates = _least_squares(chosen, targets)
        if rates is not None and min(rates) > 0:
            errors = (sum(map(mul, rates, row)) - target for row, target in zip(chosen, targets, strict=True))
            found.append((sum(error**2 for error in errors), parts, rates))
    if not found:
        raise ValueError("the speed of the device cannot be estimated: the measured segments do no work")
    _, parts, rates = min(found)
    of = dict(zip(parts, rates, strict=True))
    speed = Speed(
        seconds_per_operation=of.get(0, 0.0),
        flops_per_second=1 / of[1] if 1 in of else UNBOUNDED,
        bytes_per_second=1 / of[2] if 2 in of else UNBOUNDED,
        memory_bytes=memory_bytes,
        measured_on=device,
    )
    return _with_ratios(speed, pairs)


def _with_ratios(speed: Speed, pairs: Sequence[tuple[Segment, SizeCost]]) -> Speed:
    """Add the ratio of all backwards to all forwards, and the median ratio of held memory.

    The memory ratio is at least 1: an estimate that is too low leads to a plan that does not fit.
    """
    forwards = sum(size.forward.seconds for _, size in pairs)
    backwards = sum(size.backward.seconds - speed.weight_seconds(segment) for segment, size in pairs)
    held = [
        size.activation_bytes / shapes
        for segment, size in pairs
        if (shapes := segment.kept_bytes.size(size.microbatch_size))
    ]
    return msgspec.structs.replace(
        speed,
        backward=max(0.1, backwards / forwards),  # very short times are not measured well
        activations=max(1.0, median(held)) if held else 1.0,
    )


def extended(
    profile: Profile, segments: Sequence[Segment], speed: Speed, microbatch_sizes: Iterable[int]
) -> Profile:
    """Return the profile with estimates for sizes outside the measured range."""
    wanted = set(microbatch_sizes)
    kinds = []
    added: set[int] = set()
    for kind, cost in enumerate(profile.kinds):
        segment = segments[profile.segments.index(kind)]
        smallest, largest = cost.sizes[0], cost.sizes[-1]
        outside = {
            size: smallest if size < smallest.microbatch_size else largest
            for size in wanted
            if not smallest.microbatch_size <= size <= largest.microbatch_size
        }
        added.update(outside)
        estimated = [resized(near, segment, speed, size) for size, near in outside.items()]
        sizes = sorted([*cost.sizes, *estimated], key=lambda size: size.microbatch_size)
        kinds.append(msgspec.structs.replace(cost, sizes=tuple(sizes)))
    if not added:
        return profile
    low, high = min(added), max(added)
    text = str(low) if low == high else f"{low} to {high}"
    note = f"micro-batches of {text} are estimated from those that were measured"
    return msgspec.structs.replace(profile, kinds=tuple(kinds), notes=(*profile.notes, note))


def resized(near: SizeCost, segment: Segment, speed: Speed, size: int) -> SizeCost:
    """Return the cost of a segment at a size that was not measured, scaled from one that was."""
    slower = speed.seconds(segment, size) / speed.seconds(segment, near.microbatch_size)
    larger = size / near.microbatch_size
    # A new gradient, before it is added to the accumulated one, does not depend on the size.
    fixed = min(near.working_bytes, segment.parameter_bytes)

    def scaled(duration: Duration) -> Duration:
        return Duration(duration.seconds * slower, duration.spread * slower)

    return SizeCost(
        microbatch_size=size,
        forward=scaled(near.forward),
        forward_only=scaled(near.forward_only),
        backward=scaled(near.backward),
        backward_inputs=scaled(near.backward_inputs),
        backward_weights=scaled(near.backward_weights),
        activation_bytes=round(near.activation_bytes * larger),
        working_bytes=fixed + round((near.working_bytes - fixed) * larger),
        split_bytes=round(near.split_bytes * larger),
        entry_seconds=near.entry_seconds * slower,
    )


def _least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...] | None:
    """Return x that minimises the sum of (row · x - target)²; None if it is not unique."""
    count = len(rows[0])
    scales = [max(abs(row[i]) for row in rows) for i in range(count)]
    if not all(scales):
        return None
    matrix = [
        [sum(row[i] / scales[i] * row[j] / scales[j] for row in rows) for j in range(count)]
        + [sum(row[i] / scales[i] * target for row, target in zip(rows, targets, strict=True))]
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
