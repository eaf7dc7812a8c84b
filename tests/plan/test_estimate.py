"""Costs from shapes: a device's speed is found again in what was measured on it."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import profile
from varuna.plan.cost.calibrate import calibrate, extended, speed_of
from varuna.plan.cost.estimate import Speed, estimate
from varuna.types import Dim, Duration, Segment, SegmentCost


def segments(count: int, seed: int = 1) -> list[Segment]:
    draw = random.Random(seed)
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
    """R12: a few measured blocks predict the times of others on the same device."""
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


# ---------------------------------------------------------------- what is recovered

rates = st.tuples(st.floats(1e10, 1e15), st.floats(1e9, 1e13), st.floats(1e-7, 1e-4))


@given(rates, st.floats(0.5, 4.0), st.floats(1.0, 3.0), st.integers(0, 2**16))
def test_times_of_any_device_are_predicted_from_its_measured_segments(
    rate: tuple[float, float, float], backward: float, activations: float, seed: int
) -> None:
    """The rates themselves, too, wherever a part is a real share of the time."""
    flops, moved, operations = rate
    speed = Speed(
        flops_per_second=flops,
        bytes_per_second=moved,
        seconds_per_operation=operations,
        memory_bytes=1 << 30,
        backward=backward,
        activations=activations,
    )
    parts = segments(8, seed)
    kinds = [SegmentCost(estimate(part, speed, [1, 2, 4]), 0, 0, 0) for part in parts]
    found = calibrate(profile(kinds, range(8)), parts)
    for unseen in segments(4, seed + 1):
        assert found.seconds(unseen, 3) == pytest.approx(speed.seconds(unseen, 3), rel=2e-2)
    assert found.backward == pytest.approx(backward, rel=1e-6)
    assert found.activations == pytest.approx(activations, rel=1e-6)
    whole = sum(speed.seconds(part, 4) for part in parts)
    if sum(part.flops_per_sample * 4 / flops for part in parts) > 0.2 * whole:
        assert found.flops_per_second == pytest.approx(flops, rel=0.05)


def test_an_estimate_is_the_sum_of_its_three_parts_by_hand() -> None:
    part = Segment(
        index=0,
        parameters=(),
        buffers=(),
        num_operations=10,
        flops_per_sample=2e9,
        parameter_bytes=5_000_000,
        moved_bytes=Dim(1_000_000, 3_000_000),
        kept_bytes=Dim(400_000, 100_000),
    )
    speed = Speed(
        flops_per_second=1e12,
        bytes_per_second=1e9,
        seconds_per_operation=1e-5,
        memory_bytes=1,
        backward=3.0,
        activations=2.0,
    )
    (found,) = estimate(part, speed, [4])
    forward = 10 * 1e-5 + 4 * 2e9 / 1e12 + (4 * 1_000_000 + 3_000_000) / 1e9
    assert found.forward.seconds == pytest.approx(forward)
    assert found.backward.seconds == pytest.approx(3 * forward + 2 * 5_000_000 / 1e9)
    parts = found.backward_inputs.seconds + found.backward_weights.seconds
    assert parts == pytest.approx(found.backward.seconds)
    assert found.activation_bytes == 2 * (4 * 400_000 + 100_000)


def test_sizes_are_estimated_once_and_in_order() -> None:
    speed = Speed(flops_per_second=1e12, bytes_per_second=1e9, memory_bytes=1)
    assert [size.microbatch_size for size in estimate(segments(1)[0], speed, [4, 1, 4, 2])] == [1, 2, 4]


def test_a_profile_with_all_sizes_is_returned_as_it_is() -> None:
    speed = Speed(flops_per_second=1e12, bytes_per_second=1e9, memory_bytes=1)
    parts = segments(2)
    made = profile([SegmentCost(estimate(part, speed, [1, 4]), 0, 0, 0) for part in parts], range(2))
    assert extended(made, parts, speed, [1, 2, 4]) is made
    assert extended(made, parts, speed, [8]).notes[-1].startswith("micro-batches of 8 are estimated")


def test_segments_that_do_no_work_show_no_speed() -> None:
    nothing = segments(1)[0]
    nothing = msgspec.structs.replace(nothing, flops_per_sample=0.0, moved_bytes=Dim(0, 0))
    size = estimate(nothing, Speed(flops_per_second=1.0, bytes_per_second=1.0, memory_bytes=1), [1])[0]
    rows = [(nothing, msgspec.structs.replace(size, forward=Duration(0.0)))]
    with pytest.raises((ValueError, ZeroDivisionError)):
        speed_of(rows, memory_bytes=1, device="a device")
