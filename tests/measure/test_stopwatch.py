"""Which clock counts, how many runs are made, and which of them is reported."""

from statistics import median, pstdev

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from varuna.measure import stopwatch as module
from varuna.measure.stopwatch import (
    LEAST_SECONDS,
    MOST_HEAD_START_SECONDS,
    CudaStopwatch,
    Effort,
    Stopwatch,
    ThreadClocks,
    stopwatch_for,
    typical,
    typical_duration,
)


def stopwatch_with(threads: int, monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    return Stopwatch()


def test_time_that_others_take_from_the_core_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = stopwatch_with(1, monkeypatch)
    assert stopwatch.seconds(ThreadClocks(10.0, 3.0, 7), ThreadClocks(15.0, 4.0, 7)) == 1.0


def test_time_that_a_segment_waits_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = stopwatch_with(1, monkeypatch)
    assert stopwatch.seconds(ThreadClocks(10.0, 3.0, 7), ThreadClocks(15.0, 4.0, 8)) == 5.0


def test_with_several_threads_the_wall_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = stopwatch_with(2, monkeypatch)
    start, stop = ThreadClocks(10.0, 3.0, 7), ThreadClocks(15.0, 4.0, 7)
    assert stopwatch.seconds(start, stop) == stopwatch.host_seconds(start, stop) == 5.0


def test_a_mark_reads_all_three_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clocks:
        perf_counter = staticmethod(lambda: 1.5)
        thread_time = staticmethod(lambda: 0.5)

    monkeypatch.setattr(module, "time", Clocks)
    mark = stopwatch_with(1, monkeypatch).mark()
    assert (mark.wall, mark.cpu) == (1.5, 0.5) and mark.waits >= 0


def test_a_processor_needs_no_head_start() -> None:
    stopwatch = stopwatch_for(torch.device("cpu"))
    assert not isinstance(stopwatch, CudaStopwatch) and not stopwatch.is_async
    assert stopwatch.head_start(1.0) is False


class FakeEvent:
    """A CUDA event at a given number of milliseconds."""

    def __init__(self, milliseconds: float) -> None:
        self.milliseconds = milliseconds

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.milliseconds - self.milliseconds


def test_cuda_marks_hold_the_time_of_the_device_and_of_the_host() -> None:
    stopwatch = stopwatch_for(torch.device("cuda", 0))
    start, stop = (FakeEvent(5.0), 1.0), (FakeEvent(12.5), 1.25)
    assert stopwatch.is_async
    assert stopwatch.seconds(start, stop) == pytest.approx(0.0075)
    assert stopwatch.host_seconds(start, stop) == pytest.approx(0.25)


def test_a_head_start_on_cuda_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.autograd.set_grad_enabled(True))
    stopwatch = stopwatch_for(torch.device("cuda", 0))
    assert stopwatch.head_start(0.001) and stopwatch.head_start(100.0)
    assert cycles == [2_000_000, round(MOST_HEAD_START_SECONDS * 2e9)]


@pytest.mark.parametrize(
    ("seconds_each", "runs"),
    [(0.1, 10), (0.3, 7), (10.0, 7), (0.01, 60), (0.0, 60)],  # never fewer than 7, never more than 60
)
def test_the_number_of_runs_fills_the_time_within_bounds(seconds_each: float, runs: int) -> None:
    assert Effort().runs(seconds_each) == runs


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_the_median_is_reported_unless_another_quantile_is_set(samples: list[float], quantile: float) -> None:
    assert typical(samples, 0.5) == pytest.approx(median(samples), abs=1e-6)
    assert min(samples) <= typical(samples, quantile) <= max(samples)
    assert typical(samples, 0.0) == min(samples) and typical(samples, 1.0) == max(samples)


def test_a_quantile_lies_between_the_two_nearest_samples_in_proportion() -> None:
    assert typical([4.0, 1.0, 2.0, 3.0, 5.0], 0.1) == pytest.approx(1.4)
    assert typical([1.0, 2.0], 0.75) == pytest.approx(1.75)


def test_one_slow_run_does_not_change_the_duration_but_its_spread() -> None:
    usual, disturbed = [1.0] * 9, [1.0] * 8 + [100.0]
    assert typical_duration(usual).seconds == typical_duration(disturbed).seconds == 1.0
    assert typical_duration(usual).spread == 0
    assert typical_duration(disturbed).spread == pytest.approx(pstdev(disturbed))


def test_what_is_counted_elsewhere_is_taken_off_and_never_leaves_zero() -> None:
    assert typical_duration([3.0, 5.0, 4.0], less=1.5).seconds == 2.5
    assert typical_duration([3.0], less=9.0).seconds == LEAST_SECONDS
