"""The curve of any length in bounded memory, with every spike."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.page.buckets import StepBuckets

VALUES = st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan))


@given(st.lists(VALUES, min_size=1, max_size=300), st.integers(2, 40))
def test_the_whole_curve_keeps_ends_extremes_and_mean(values: list[float | None], points: int) -> None:
    buckets = StepBuckets(("loss",), max_buckets=16)
    for step, value in enumerate(values, start=1):
        buckets.add(step, 100.0 + step, (value,))
    window = buckets.window(-math.inf, math.inf, axis="step", points=points)
    assert len(window.steps) <= min(points, 16)
    assert (window.first_step, window.last_step, window.steps[-1]) == (1, len(values), len(values))
    assert window.steps == sorted(set(window.steps)) and window.times == [100.0 + s for s in window.steps]
    found, band = [value for value in values if value is not None and value == value], window.bands["loss"]
    lows = [low for low in band.low if low == low]
    highs = [high for high in band.high if high == high]
    assert (bool(lows), bool(highs)) == (bool(found), bool(found))
    if found:
        assert (min(lows), max(highs)) == (min(found), max(found))
        means = [mean for mean in band.mean if mean == mean]
        assert min(found) - 1e-6 <= min(means) <= max(means) <= max(found) + 1e-6


def test_a_part_has_one_point_beside_it_on_each_side() -> None:
    buckets = StepBuckets(("loss",))
    for step in range(1, 101):
        buckets.add(step, float(step), (float(step),))
    window = buckets.window(40, 50, axis="step", points=100)
    assert window.steps == list(range(39, 52)) and window.bands["loss"].mean == [
        float(s) for s in range(39, 52)
    ]
    assert buckets.window(40.5, 41.5, axis="time", points=100).steps == [40, 41, 42]
    assert buckets.window(500, 600, axis="step", points=100).steps == [100]
    assert buckets.step_at(17.3) == 17 and buckets.step_at(0.0) == 1


def test_steps_that_are_run_again_are_left_out_and_time_never_goes_back() -> None:
    buckets = StepBuckets(("loss",))
    for step, time in [(1, 10.0), (2, 11.0), (1, 12.0), (2, 13.0), (3, 5.0)]:
        buckets.add(step, time, (time,))
    window = buckets.window(-math.inf, math.inf, axis="step", points=10)
    assert (window.steps, window.times) == ([1, 2, 3], [10.0, 11.0, 11.0])


def test_an_empty_curve_has_no_points() -> None:
    window = StepBuckets(("loss",)).window(0, 1, axis="time", points=10)
    assert (window.steps, window.last_step) == ([], -1)
    assert window.bands["loss"].mean == []


def test_a_spike_of_one_step_survives_every_merge() -> None:
    buckets = StepBuckets(("loss",), max_buckets=64)
    for step in range(1, 50_001):
        buckets.add(step, step * 0.1, (100.0 if step == 17_284 else 1.0,))
    high = buckets.window(-math.inf, math.inf, axis="step", points=50).bands["loss"].high
    assert high.count(100.0) == 1 and high.index(100.0) / len(high) == pytest.approx(
        17_284 / 50_000, abs=0.05
    )
