"""The interval between checkpoints that loses the least."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from varuna.morph.interval import failure_seconds, interval_seconds


def share_lost(interval: float, cost: float, mean: float) -> float:
    """Of all time: saving, and doing again half an interval for each failure."""
    return cost / (interval + cost) + (interval + cost) / 2 / mean


@settings(deadline=None)
@given(st.floats(0.01, 60), st.floats(600, 1e6))
def test_no_other_interval_loses_noticeably_less(cost: float, mean: float) -> None:
    best = share_lost(interval_seconds(cost, mean), cost, mean)
    for factor in (0.5, 0.8, 1.25, 2):
        assert best <= share_lost(interval_seconds(cost, mean) * factor, cost, mean) * 1.02


def test_many_failures_or_cheap_saves_ask_for_more_checkpoints() -> None:
    assert interval_seconds(2.0, 3600.0) == pytest.approx(118.6, abs=1)
    assert interval_seconds(0.02, 3600.0) < interval_seconds(2.0, 600.0) < interval_seconds(2.0, 3600.0)
    assert failure_seconds(10, 3600.0) < failure_seconds(0, 3600.0)
    assert interval_seconds(0.0, 3600.0) == 0.0
    assert interval_seconds(100.0, 10.0) == 10.0
