"""What a segment costs beside the call of one that does nothing: on a processor, and on a device."""

import pytest

from varuna.measure.segments import SegmentSamples


def samples(*, is_async: bool, seconds: list[float], host: list[float]) -> SegmentSamples:
    return SegmentSamples(is_async, {"forward": seconds}, {"forward": host})


def test_on_a_processor_the_call_is_taken_out() -> None:
    own = samples(is_async=False, seconds=[5.0, 5.0], host=[5.0, 5.0])
    nothing = samples(is_async=False, seconds=[2.0], host=[2.0])
    assert own.cost("forward", nothing, 0.5, 0.5).seconds == pytest.approx(5 - 2 - 0.5)


def test_work_of_a_device_is_all_its_own_though_the_host_is_as_busy() -> None:
    own = samples(is_async=True, seconds=[5.0, 5.0], host=[5.5, 6.0])
    nothing = samples(is_async=True, seconds=[0.0], host=[2.0])
    assert own.cost("forward", nothing, 0.0, 0.5).seconds == pytest.approx(5)


def test_a_host_that_cannot_follow_sets_the_pace_at_its_best() -> None:
    own = samples(is_async=True, seconds=[5.0, 5.0], host=[20.0, 9.0])
    nothing = samples(is_async=True, seconds=[0.0], host=[2.0, 3.0])
    assert own.cost("forward", nothing, 0.0, 0.5).seconds == pytest.approx(9 - 2)
