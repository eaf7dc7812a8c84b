"""Estimated profiles: they follow from shapes and speed, and agree with what is counted on a device."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from tests.profile.ladders import WIDTH, Ladder, get_batch
from varuna.profile.estimate import (
    ADAM,
    Speed,
    assumed_link,
    assumed_reductions,
    estimate_profile,
)
from varuna.profile.profiler import Profiler
from varuna.types import LinkCost, Profile

LATENCY, BANDWIDTH = 1e-4, 1e9
SPEED = Speed(flops_per_second=1e9, bytes_per_second=1e9, seconds_per_operation=1e-6, memory_bytes=1 << 30)


def estimated(model: nn.Module | None = None, sizes: tuple[int, ...] = (1, 4), **options: Any) -> Profile:
    given = {"speed": SPEED, "within": assumed_link(LATENCY, BANDWIDTH), **options}
    return estimate_profile(model or Ladder(4), get_batch, sizes, **given)


def test_shapes_and_bytes_are_those_of_a_measured_profile(make_profiler: Callable[..., Profiler]) -> None:
    measured = make_profiler(Ladder(4)).profile_all([4])
    found = estimated()
    assert found.fingerprint == measured.fingerprint
    assert (found.segments, found.cuts, found.ties) == (measured.segments, measured.cuts, measured.ties)
    assert found.sample_bytes == measured.sample_bytes == 2 * WIDTH * 4
    for own, other in zip(found.kinds, measured.kinds, strict=True):
        assert (own.parameter_bytes, own.gradient_bytes, own.num_trained) == (
            other.parameter_bytes,
            other.gradient_bytes,
            other.num_trained,
        )


def test_a_model_without_values_gives_the_same_estimate() -> None:
    with torch.device("meta"):
        empty = Ladder(4)
    assert estimated(empty) == estimated()


def test_every_size_is_there_and_time_grows_with_it() -> None:
    for kind in estimated(sizes=(1, 2, 8)).kinds:
        assert [cost.microbatch_size for cost in kind.sizes] == [1, 2, 8]
        times = [cost.forward.seconds for cost in kind.sizes]
        assert times == sorted(times) and times[0] < times[-1]
        held = [cost.activation_bytes for cost in kind.sizes]
        assert held[2] - held[1] == 6 * (held[1] - held[0]) > 0


def test_a_device_twice_as_fast_takes_half_the_time() -> None:
    fast = Speed(flops_per_second=2e9, bytes_per_second=2e9, seconds_per_operation=5e-7, memory_bytes=1 << 30)
    for slow, quick in zip(estimated().kinds, estimated(speed=fast).kinds, strict=True):
        for one, other in zip(slow.sizes, quick.sizes, strict=True):
            assert other.forward.seconds == pytest.approx(one.forward.seconds / 2, rel=0.01)
            assert other.activation_bytes == one.activation_bytes


def test_a_profile_says_that_it_is_estimated_and_with_which_speed() -> None:
    found = estimated()
    assert found.device == "estimated" and found.device_memory_bytes == SPEED.memory_bytes
    assert found.notes == ("everything is estimated from the model's shapes",)
    assert found.optimizer == ADAM and found.fixed_bytes == 0
    calibrated = msgspec.structs.replace(SPEED, measured_on="NVIDIA Abacus")
    assert estimated(speed=calibrated).notes[0].endswith("with the speed of NVIDIA Abacus")


# ---------------------------------------------------------------- links


def link() -> LinkCost:
    return assumed_link(LATENCY, BANDWIDTH)


def test_an_assumed_link_has_the_given_latency_and_bandwidth() -> None:
    small, *_, large = link().messages
    bandwidth = (large.num_bytes - small.num_bytes) / (large.one_way.seconds - small.one_way.seconds)
    assert bandwidth == pytest.approx(BANDWIDTH, rel=1e-6)
    assert small.one_way.seconds == pytest.approx(LATENCY + small.num_bytes / BANDWIDTH, rel=1e-6)


@pytest.mark.parametrize("between", [False, True])
def test_a_ring_of_two_sends_every_byte_once(between: bool) -> None:
    for cost, message in zip(assumed_reductions(link(), between), link().messages, strict=True):
        assert (cost.group_size, cost.num_bytes, cost.between_machines) == (2, message.num_bytes, between)
        assert cost.duration.seconds == message.one_way.seconds and cost.sharing is None


def test_reductions_are_assumed_for_every_link_that_is_given() -> None:
    near = estimated()
    assert near.between is None and not any(cost.between_machines for cost in near.reductions)
    both = estimated(between=assumed_link(1e-3, 1e8))
    assert both.between is not None and both.within == near.within
    assert sum(cost.between_machines for cost in both.reductions) == len(both.between.messages)
