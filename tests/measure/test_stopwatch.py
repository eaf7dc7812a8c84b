"""Which time counts, and which of many runs."""

import time
from statistics import median

import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.measure.stopwatch import Stopwatch, ThreadClocks, typical


def one_thread() -> Stopwatch:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    stopwatch = Stopwatch()
    torch.set_num_threads(before)
    return stopwatch


def test_a_core_that_others_take_does_not_count() -> None:
    assert one_thread().seconds(ThreadClocks(10.0, 3.0, 7), ThreadClocks(15.0, 4.0, 7)) == 1.0


def test_what_a_segment_waits_for_counts() -> None:
    stopwatch = one_thread()
    start = stopwatch.mark()
    time.sleep(0.02)  # the segment's own work: a disk, another device
    assert stopwatch.seconds(start, stopwatch.mark()) >= 0.02


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_the_run_that_counts_is_the_median_unless_a_quicker_one_is_asked_for(
    samples: list[float], quantile: float
) -> None:
    assert typical(samples, 0.5) == median(samples) or abs(typical(samples, 0.5) - median(samples)) < 1e-6
    assert min(samples) <= typical(samples, quantile) <= max(samples)
    assert typical(samples, 0.0) == min(samples) and typical(samples, 1.0) == max(samples)
