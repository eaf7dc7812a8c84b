"""Recording, merging, and the share of the step in which a stage did not compute."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.observe import Recorder, bubble, merge
from varuna.types import Interval, Timeline

whats = st.sampled_from(["F", "R", "B", "I", "W", "reduce", "wait"])
clocks = st.floats(-1e6, 1e6)


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    rank = draw(st.integers(0, 5))
    start = draw(clocks)
    stop = start + draw(st.floats(0, 1e3))
    return Interval(rank, rank % 3, draw(whats), draw(st.integers(-1, 9)), start, stop)


timelines = st.lists(intervals(), max_size=12).map(lambda found: Timeline(tuple(found)))


def test_entries_become_intervals_of_their_rank_and_stage() -> None:
    recorder = Recorder()
    recorder.add("F", 0, 5.0, 6.0)
    recorder.add("reduce", -1, 6.0, 9.0)
    assert recorder.timeline(3, 1) == Timeline(
        (Interval(3, 1, "F", 0, 5.0, 6.0), Interval(3, 1, "reduce", -1, 6.0, 9.0))
    )
    recorder.clear()
    assert recorder.timeline(3, 1) == Timeline(())


@given(st.lists(timelines, max_size=4))
def test_a_merged_timeline_starts_at_zero_and_loses_nothing(parts: list[Timeline]) -> None:
    merged = merge(parts).intervals
    before = [interval for part in parts for interval in part.intervals]
    assert sorted((i.rank, i.what, i.microbatch) for i in merged) == sorted(
        (i.rank, i.what, i.microbatch) for i in before
    )
    if before:
        zero = min(interval.start_seconds for interval in before)
        assert min(interval.start_seconds for interval in merged) == 0.0
        assert sorted(i.stop_seconds for i in merged) == pytest.approx(
            sorted(i.stop_seconds - zero for i in before)
        )
        assert list(merged) == sorted(merged, key=lambda i: (i.rank, i.start_seconds))


@given(timelines)
def test_a_bubble_is_a_share_and_every_stage_has_one(timeline: Timeline) -> None:
    """B4"""
    shares = bubble(merge([timeline]))
    assert shares.keys() == {interval.stage for interval in timeline.intervals}
    assert all(0.0 <= share <= 1.0 for share in shares.values())


def test_the_bubble_is_the_time_not_computed_by_the_clock_of_the_whole_step() -> None:
    """B4: waiting and reducing are not compute; overlapping time counts once."""
    timeline = Timeline(
        (
            Interval(0, 0, "F", 0, 0.0, 2.0),
            Interval(0, 0, "wait", -1, 2.0, 6.0),
            Interval(0, 0, "B", 0, 6.0, 8.0),
            Interval(0, 0, "W", 0, 7.0, 8.0),
            Interval(0, 0, "reduce", -1, 8.0, 10.0),
            Interval(1, 1, "F", 0, 2.0, 4.0),
        )
    )
    assert bubble(timeline) == pytest.approx({0: 0.6, 1: 0.8})


def test_the_bubble_of_a_stage_is_the_mean_of_its_replicas() -> None:
    """B4"""
    timeline = Timeline((Interval(0, 0, "F", 0, 0.0, 4.0), Interval(1, 0, "F", 0, 0.0, 2.0)))
    assert bubble(timeline) == {0: 0.25}


def test_the_bubble_does_not_depend_on_where_the_clock_starts() -> None:
    timeline = Timeline((Interval(0, 0, "F", 0, 100.0, 101.0), Interval(1, 1, "F", 0, 101.0, 104.0)))
    assert bubble(timeline) == pytest.approx({0: 0.75, 1: 0.25})


def test_nothing_recorded_has_no_bubble() -> None:
    assert bubble(Timeline(())) == {}
    assert bubble(Timeline((Interval(0, 0, "F", 0, 1.0, 1.0),))) == {0: 0.0}
