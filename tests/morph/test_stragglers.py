"""Slow machines are found by their computing, against those that do the same work."""

from statistics import median

from hypothesis import given
from hypothesis import strategies as st

from varuna.morph.stragglers import Rule, Watch, look, median_of_others

RULE = Rule(factor=1.25, steps=3)


def play(steps: list[dict[int, float]], stages: list[list[int]]) -> frozenset[int]:
    watch, found = Watch(), frozenset[int]()
    for iteration, times in enumerate(steps, start=1):
        watch, found = look(watch, {rank: (iteration, t) for rank, t in times.items()}, stages, RULE)
    return found


def test_a_rank_that_is_slower_than_its_stage_for_some_steps_is_found() -> None:
    """V44"""
    slow = {0: 1.0, 1: 1.0, 2: 1.5, 3: 4.0, 4: 4.1, 5: 4.0}
    stages = [[0, 1, 2], [3, 4, 5]]
    assert play([slow] * 2, stages) == frozenset()
    assert play([slow] * 3, stages) == {2}, "and not those of the stage that has more to do"


def test_one_slow_step_among_good_ones_is_forgiven() -> None:
    good, bad = {0: 1.0, 1: 1.0}, {0: 1.0, 1: 3.0}
    assert play([bad, bad, good, bad, bad], [[0, 1]]) == frozenset()


def test_a_step_that_is_reported_twice_counts_once_and_a_stage_of_one_has_no_peers() -> None:
    watch, found = Watch(), frozenset[int]()
    for _ in range(9):
        watch, found = look(watch, {0: (7, 1.0), 1: (7, 3.0), 2: (7, 99.0)}, [[0, 1], [2]], RULE)
    assert found == frozenset()


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9).map(sorted), st.data())
def test_the_median_of_the_others_is_theirs(ordered: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(ordered) - 1))
    assert median_of_others(ordered, place) == median(ordered[:place] + ordered[place + 1 :])
