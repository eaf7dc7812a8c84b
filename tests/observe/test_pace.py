"""Step times: the median of many steps, and where the time went."""

import pytest

from varuna.observe import Pace, Recorder, merge
from varuna.observe.pace import KEPT, WARMUPS, WINDOW, RankPace, summarise, typical_step
from varuna.observe.record import on_one_clock, to_timeline
from varuna.types import Forecast, Interval, MemoryForecast, StageForecast, StageTime, StepReport, Timeline


def recorded(start: float, compute: float, wait: float = 0.0, reduce: float = 0.0) -> Recorder:
    recorder = Recorder()
    for what, seconds in (("F", compute), ("wait", wait), ("reduce", reduce)):
        recorder.add(what, 0 if what == "F" else -1, start, start + seconds)
        start += seconds
    return recorder


def ran(pace: Pace, seconds: list[float], start: float = 0.0, compute: float = 0.25) -> float:
    for length in seconds:
        pace.enter(start)
        pace.leave(recorded(start, compute * length, 0.125 * length, 0.0625 * length).snapshot())
        start += length
    return start


def test_the_first_steps_do_not_count_and_the_median_ignores_outliers() -> None:
    """V28"""
    pace = Pace()
    stop = ran(pace, [50.0] * WARMUPS + [1.0, 1.0, 9.0, 1.0, 1.0])
    pace.enter(stop)
    found = pace.found(stage=2)
    assert found is not None
    assert (found.stage, found.num_steps, found.seconds) == (2, 5, 1.0)
    assert (found.compute_seconds, found.waiting_seconds, found.reduce_seconds) == (0.25, 0.125, 0.0625)
    assert found.kept == {4: 1.0, 5: 1.0, 6: 9.0, 7: 1.0, 8: 1.0}


def test_a_step_before_other_work_is_not_measured() -> None:
    """V28: an evaluation, a checkpoint."""
    pace = Pace()
    stop = ran(pace, [1.0] * (WARMUPS + 1))
    pace.interrupt()
    ran(pace, [1.0, 1.0], start=stop + 100.0)
    found = pace.found(stage=0)
    assert found is not None and found.kept == {WARMUPS + 2: 1.0}


def test_entries_after_the_end_of_a_step_do_not_belong_to_it() -> None:
    pace = Pace()
    start = ran(pace, [1.0] * WARMUPS)
    pace.enter(start)
    recorder = recorded(start, 0.5)
    pace.leave(recorder.snapshot())
    recorder.add("F", 0, start + 0.6, start + 0.9)
    pace.enter(start + 1.0)
    found = pace.found(stage=0)
    assert found is not None and found.compute_seconds == 0.5


def test_a_limited_number_of_steps_is_kept() -> None:
    pace = Pace()
    pace.enter(ran(pace, [1.0] * (2 * WINDOW)))
    found = pace.found(stage=0)
    assert found is not None and (found.num_steps, len(found.kept)) == (WINDOW, KEPT)


def test_there_is_no_result_before_the_first_measured_step() -> None:
    pace = Pace()
    ran(pace, [1.0] * WARMUPS)
    assert pace.found(stage=0) is None


def rank(stage: int, seconds: float, compute: float, **kept: float) -> RankPace:
    numbers = {int(name[1:]): length for name, length in kept.items()}
    return RankPace(stage, 7, seconds, compute, 0.25, 0.125, numbers, 3)


def test_a_report_covers_all_stages_and_its_parts_sum_to_the_step() -> None:
    """V28, B4: measured bubble per stage."""
    report = summarise(20, [rank(0, 2.0, 1.0), rank(1, 2.0, 1.5), rank(0, 1.9, 0.5), rank(1, 1.9, 1.5)], None)
    assert (report.step, report.num_steps, report.seconds) == (20, 7, 2.0)
    assert report.stages == (StageTime(0.75, 0.25, 0.125, 0.875), StageTime(1.5, 0.25, 0.125, 0.125))
    assert [stage.bubble for stage in report.stages] == [0.625, 0.25]
    assert report.excess is None and "predicted" not in str(report)


def test_measured_and_predicted_times_are_shown_together() -> None:
    """V28"""
    memory = MemoryForecast(0, 0, 0, 0, 0, 0, 0, 0)
    forecast = Forecast(1.6, (StageForecast(0.8, 0.4, 0.2, 0.2, memory),))
    report = StepReport(100, 97, 2.0, (StageTime(1.0, 0.5, 0.25, 0.25),), forecast)
    assert report.excess == pytest.approx(0.25)
    assert str(report).splitlines() == [
        "step 100: 2 s measured, the median of 97; 1.6 s predicted (+25.0%)",
        "  stage 0: compute 1 s, waiting 500 ms, bubble 50%; "
        "predicted compute 800 ms, waiting 400 ms, bubble 50%",
    ]


def test_the_drawn_step_is_typical_and_kept_by_all_ranks() -> None:
    """B4"""
    ranks = [rank(0, 1.0, 0.5, s4=1.0, s5=3.0, s6=1.2), rank(1, 1.0, 0.5, s5=3.0, s6=1.1, s7=1.0)]
    assert typical_step(ranks) == 6
    assert typical_step([rank(0, 1.0, 0.5, s4=1.0), rank(1, 1.0, 0.5, s5=1.0)]) is None


def test_a_step_is_drawn_to_its_end() -> None:
    """B4: the time after the last reduction is the optimizer's."""
    pace = Pace()
    start = ran(pace, [1.0] * (WARMUPS + 1))
    pace.enter(start)
    assert pace.entries(WARMUPS + 1)[-1] == ("optimizer", -1, 3.4375, 4.0)


def test_machines_with_different_clocks_are_drawn_on_one() -> None:
    """B4: a step's last sum is over all ranks and ends everywhere at the same time."""
    here = to_timeline([("F", 0, 5.0, 6.0), ("reduce", -1, 6.0, 7.0), ("optimizer", -1, 7.0, 9.0)], 0, 0)
    there = to_timeline([("F", 0, 1005.5, 1006.0), ("reduce", -1, 1006.0, 1007.0)], 1, 1)
    merged = merge(on_one_clock([here, there], ["a", "b"]))
    assert Interval(1, 1, "F", 0, 0.5, 1.0) in merged.intervals
    assert merge(on_one_clock([here, there], ["a", "a"])).seconds == 1002.0
    assert on_one_clock([Timeline(()), here], ["a", "b"]) == [Timeline(()), here]
