"""Stages are neighbouring segments, the heaviest stage as light as can be."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.plan import balance

COSTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=8)


@given(costs=COSTS, data=st.data())
def test_no_other_cut_has_a_lighter_heaviest_stage(costs: list[float], data: st.DataObject) -> None:
    """V2, V26: against brute force; every segment in exactly one stage, no stage empty."""
    stages = data.draw(st.integers(1, len(costs)))
    spans = balance(costs, stages=stages)
    assert len(spans) == stages and spans[0][0] == 0 and spans[-1][1] == len(costs)
    assert all(first < stop for first, stop in spans)
    assert all(left[1] == right[0] for left, right in pairwise(spans))

    def heaviest(bounds: tuple[int, ...]) -> float:
        edges = [0, *bounds, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    least = min(heaviest(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))
    assert heaviest(tuple(first for first, _ in spans[1:])) == pytest.approx(least)


def test_a_depth_beyond_the_segments_is_refused_with_the_range() -> None:
    """V2, V7."""
    for stages in (0, 4):
        with pytest.raises(ValueError, match="allows 1 to 3"):
            balance([1.0, 1.0, 1.0], stages=stages)


@given(costs=st.lists(st.sampled_from([0.0, 1.0, 1.0, 2.5]), min_size=1, max_size=9), data=st.data())
def test_among_equally_good_cuts_the_last_stages_begin_earliest(
    costs: list[float], data: st.DataObject
) -> None:
    """Every rank and every version finds the same cut: compared with the plain recurrence."""
    stages = data.draw(st.integers(1, len(costs)))
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for used in range(1, stages + 1):
        for stop in range(used, len(costs) + 1):
            best[used, stop] = min(
                (max(best[used - 1, first][0], sum(costs[first:stop])), first)
                for first in range(stop)
                if (used - 1, first) in best
            )
    bounds = [len(costs)]
    for used in range(stages, 0, -1):
        bounds.append(best[used, bounds[-1]][1])
    assert balance(costs, stages=stages) == tuple(pairwise(reversed(bounds)))
