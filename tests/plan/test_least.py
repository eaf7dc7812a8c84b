"""Bounds for layouts that are not cut yet, against every cut of small models."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import MB, machines, profile, segment
from varuna.plan.cost.bounds import UncutLayout, exposed, least_of_any_cut, least_seconds
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import CandidateLayout, orders_of, pipelines
from varuna.plan.cost.least import least_of
from varuna.plan.cost.simulate import simulate
from varuna.plan.cut.partition import all_cuts
from varuna.plan.cut.place import ClusterMap
from varuna.schedule import NAMES, splits
from varuna.types import ScheduleName, TieCost


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    count = draw(st.integers(1, 6))
    kinds = [
        segment(
            draw(st.integers(1, 9)) * 1e-3,
            sizes=(1, 2),
            fixed=draw(st.integers(0, 3)) * 1e-3,
            parameter_bytes=draw(st.integers(1, 40)) * MB,
        )
        for _ in range(count)
    ]
    return CostTable(profile(kinds, range(count)))


@given(tables(), st.booleans(), st.sampled_from([0.5, 1.0, 2.0]))
def test_the_least_work_is_that_of_the_whole_model(costs: CostTable, split: bool, speed: float) -> None:
    least = least_of(costs, 1, split, speed)
    sizes = costs.sizes(1)
    assert least.forward == pytest.approx(sizes.forward[-1] / speed)
    assert least.backward + least.weights == pytest.approx(sizes.backward[-1] / speed)
    assert least.backward == pytest.approx((sizes.inputs if split else sizes.backward)[-1] / speed)


@given(tables(), st.integers(1, 6))
def test_no_cut_has_a_heaviest_stage_below_the_bound(costs: CostTable, depth: int) -> None:
    sizes = costs.sizes(1)
    heaviest = least_of(costs, 1, False, 1.0).heaviest(depth)

    def work(first: int, stop: int) -> float:
        return sizes.forward[stop] - sizes.forward[first] + sizes.backward[stop] - sizes.backward[first]

    for spans in all_cuts(costs.num_segments, min(depth, costs.num_segments)):
        assert heaviest <= max(work(*span) for span in spans) * (1 + 1e-9)


def test_the_heaviest_stage_counts_how_many_large_segments_must_share_one() -> None:
    """Five segments of 6 ms, three of 3 ms. On three stages, two large ones are together."""
    kinds = [segment(2e-3), segment(1e-3)]
    costs = CostTable(profile(kinds, [0, 1, 0, 0, 1, 0, 0, 1]))
    assert least_of(costs, 1, False, 1.0).heaviest(3) == pytest.approx(2 * 6e-3)
    assert least_of(costs, 1, False, 1.0).heaviest(1) == pytest.approx(5 * 6e-3)


def test_a_tied_tensor_counts_at_most_once_in_the_bytes_to_reduce() -> None:
    kinds = [segment(1e-3, parameter_bytes=4 * MB)]
    plain = least_of(CostTable(profile(kinds, [0, 0])), 1, False, 1.0)
    tied = least_of(CostTable(profile(kinds, [0, 0], ties=(TieCost((0, 1), MB, MB // 4),))), 1, False, 1.0)
    assert plain.gradient_bytes == pytest.approx(4 * MB / 3e-3)
    assert tied.gradient_bytes == pytest.approx(3 * MB / 3e-3)


@given(
    tables(),
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([1, 2]),
)
def test_the_bound_before_cutting_is_below_every_cut(
    costs: CostTable, name: ScheduleName, depth: int, width: int, samples: int, size: int
) -> None:
    """No cut of the model takes less in the simulator, nor has a smaller bound of its own."""
    depth = min(depth, costs.num_segments)
    split = splits(name)
    least = least_of(costs, size, split, 1.0)
    batch = samples * width
    microbatches = ceil(samples / size)
    last = least_of(costs, samples - (microbatches - 1) * size, split, 1.0)
    first = least if microbatches > 1 else last
    bound = least_of_any_cut(
        UncutLayout(
            depth,
            microbatches,
            first.forward,
            first.backward,
            first.weights,
            last.forward,
            last.backward,
            last.weights,
            (microbatches - 1) * first.heaviest(depth) + last.heaviest(depth) * (microbatches == 1),
            first.forward_share,
            0.0,
        )
    )
    placement = ClusterMap(machines(1, depth * width)).place(depth, width, "stages together")
    for spans in all_cuts(costs.num_segments, depth):
        layout = CandidateLayout(spans, (False,) * depth, name, size, batch, placement)
        orders = orders_of(layout)
        (times,) = pipelines(costs, layout, orders)
        own, bare = least_seconds(orders, times)
        assert bound <= own * (1 + 1e-9)
        assert bare <= own <= simulate(orders, [times]).seconds * (1 + 1e-9)


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 3.0)), max_size=5), st.floats(0.01, 4.0))
def test_exposed_reductions_are_those_of_a_queue_that_starts_with_the_backward(
    buckets: list[tuple[float, float]], backward: float
) -> None:
    ordered = tuple(sorted(buckets))
    free = 0.0
    for share, seconds in ordered:
        free = max(free, share * backward) + seconds
    assert exposed(ordered, backward) == pytest.approx(max(0.0, free - backward), abs=1e-12)
