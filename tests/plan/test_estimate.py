"""Costs from shapes: a device's speed is found again in what was measured on it."""

import random

import msgspec
import pytest

from tests.plan.profiles import profile
from varuna.plan.cost.calibrate import calibrate, extended, speed_of
from varuna.plan.cost.estimate import Speed, estimate
from varuna.types import Dim, Duration, Segment, SegmentCost


def segments(count: int) -> list[Segment]:
    draw = random.Random(1)
    return [
        Segment(
            index=index,
            parameters=(),
            buffers=(),
            num_operations=draw.randint(1, 40),
            flops_per_sample=draw.uniform(1e8, 1e11),
            parameter_bytes=0,
            moved_bytes=Dim(draw.randint(1 << 20, 1 << 28), draw.randint(0, 1 << 28)),
            kept_bytes=Dim(1 << 20, 0),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("seconds_per_operation", [0.0, 5e-6])
def test_the_speed_by_which_costs_were_made_is_found_again(seconds_per_operation: float) -> None:
    """R12: so that a few measured blocks tell what others of the same device take."""
    speed = Speed(
        flops_per_second=5e13,
        bytes_per_second=1e12,
        seconds_per_operation=seconds_per_operation,
        memory_bytes=80 << 30,
    )
    parts = segments(6)
    kinds = [SegmentCost(estimate(part, speed, [1, 2, 4]), 0, 0, 0) for part in parts]
    found = calibrate(profile(kinds, range(6)), parts)
    assert found.flops_per_second == pytest.approx(5e13, rel=1e-3)
    assert found.bytes_per_second == pytest.approx(1e12, rel=1e-3)
    assert found.seconds_per_operation == pytest.approx(seconds_per_operation, rel=1e-3, abs=1e-9)
    (unseen,) = segments(7)[6:]
    assert found.seconds(unseen, 8) == pytest.approx(speed.seconds(unseen, 8), rel=1e-3)


def test_a_device_that_only_computes_has_no_other_part_in_its_times() -> None:
    speed = Speed(
        flops_per_second=1e12, bytes_per_second=float("inf"), seconds_per_operation=0.0, memory_bytes=1
    )
    parts = segments(4)
    kinds = [SegmentCost(estimate(part, speed, [1, 8]), 0, 0, 0) for part in parts]
    found = calibrate(profile(kinds, range(4)), parts)
    assert found.seconds(parts[0], 3) == pytest.approx(speed.seconds(parts[0], 3), rel=1e-6)


def test_sizes_that_were_not_measured_follow_from_those_that_were() -> None:
    """By the same speed they cost what they would have been found to cost."""
    speed = Speed(flops_per_second=5e13, bytes_per_second=1e12, memory_bytes=80 << 30)
    parts = segments(3)
    kinds = [SegmentCost(estimate(part, speed, [2, 4]), 0, 0, 0) for part in parts]
    found = extended(profile(kinds, range(3)), parts, speed, [1, 3, 4, 16])
    assert [size.microbatch_size for size in found.kinds[0].sizes] == [1, 2, 4, 16]  # 3 lies in between
    assert found.notes[-1] == "micro-batches of 1 to 16 are estimated from those that were measured"
    for part, kind in zip(parts, found.kinds, strict=True):
        for size in kind.sizes:
            expected = speed.seconds(part, size.microbatch_size)
            assert size.forward.seconds == pytest.approx(expected, rel=1e-9)
            assert size.activation_bytes == part.kept_bytes.size(size.microbatch_size)


def test_segments_that_take_next_to_nothing_do_not_decide_how_fast_a_device_is() -> None:
    """Views were measured at a tenth of a microsecond, and the flops of a whole model were lost to them."""
    speed = Speed(flops_per_second=1e11, bytes_per_second=1e10, memory_bytes=1, backward=1.5)
    parts = segments(6)
    rows = [(part, estimate(part, speed, [2])[0]) for part in parts]
    nothing = msgspec.structs.replace(rows[0][1], forward=Duration(1e-7), backward=Duration(1e-7))
    found = speed_of([*rows, *((parts[0], nothing) for _ in range(3))], memory_bytes=1, device="a device")
    whole = sum(speed.seconds(part, 2) for part in parts[1:])
    assert sum(found.seconds(part, 2) for part in parts[1:]) == pytest.approx(whole, rel=0.5)
    assert found.measured_on == "a device"
