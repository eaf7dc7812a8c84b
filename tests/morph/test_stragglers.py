"""Slow ranks are found by their compute time, compared with ranks of the same stage."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from varuna.morph.stragglers import SLOW_STEPS, StragglerWatch, find_stragglers, median_without
from varuna.types import Layout, StageMap


def play(steps: list[dict[int, float]], stages: StageMap, *, batch: int = 12) -> frozenset[int]:
    watch, found = StragglerWatch(), frozenset[int]()
    for iteration, times in enumerate(steps, start=1):
        seconds = {rank: (iteration, t) for rank, t in times.items()}
        watch, found = find_stragglers(watch, seconds, Layout(stages, batch, 2))
    return found


def test_a_rank_that_is_slower_than_its_stage_for_some_steps_is_found() -> None:
    """V44"""
    slow = {0: 1.0, 1: 1.0, 2: 1.5, 3: 4.0, 4: 4.1, 5: 4.0}
    stages = ((0, 1, 2), (3, 4, 5))
    assert play([slow] * (SLOW_STEPS - 1), stages) == frozenset()
    assert play([slow] * SLOW_STEPS, stages) == {2}, "and not the stage with more work"


def test_single_slow_steps_are_ignored() -> None:
    good, bad = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 3.0}
    assert play([*[bad] * 4, good, *[bad] * 4], ((0, 1),)) == frozenset()


def test_a_step_that_is_reported_twice_counts_once_and_a_stage_of_one_has_no_peers() -> None:
    watch, found = StragglerWatch(), frozenset[int]()
    layout = Layout(((0, 1), (2, 3)), 12, 2)
    for _ in range(9):
        watch, found = find_stragglers(watch, {0: (7, 1.0), 1: (7, 3.0), 2: (7, 99.0)}, layout)
    assert found == frozenset()


def test_a_replica_with_more_samples_may_take_longer() -> None:
    """V44: of 5 samples in micro-batches of 2, one replica runs two micro-batches and the other one."""
    assert play([{0: 2.0, 1: 1.0}] * 9, ((0, 1),), batch=5) == frozenset()
    assert play([{0: 3.0, 1: 1.0}] * 9, ((0, 1),), batch=5) == {0}
    assert play([{0: 2.0, 1: 2.0}] * 9, ((0, 1),), batch=5) == {1}, "the one with less work"


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9).map(sorted), st.data())
def test_median_without_is_the_median_of_the_other_values(ordered: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ordered) - 1))
    assert median_without(ordered, ordered[place]) == median(ordered[:place] + ordered[place + 1 :])
