"""Layouts whose stages have different numbers of replicas: the search finds the best, and predicts it."""

from collections.abc import Sequence
from itertools import combinations, pairwise, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.brute_force import all_widths, every_uneven_plan, random_case
from tests.plan.profiles import GB, MB, machines, profile, segment, transformer
from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.cost.uneven import forecast_uneven
from varuna.plan.cut.partition import all_cuts, balance_over
from varuna.plan.cut.place import ClusterMap
from varuna.plan.plan_file import check_plan
from varuna.plan.search.search import UNEVEN_GAIN, cut_layout, search
from varuna.plan.search.uneven import (
    EMPTY_TAIL,
    StageOption,
    StageTable,
    UnevenRequest,
    UnevenSearch,
    best_uneven,
)
from varuna.types import Plan, StagePlan, format_widths, parse_stage_map

SIZES = (1, 2, 4, 8, 16, 32)


def three_to_one():
    """Two segments that do not fit on one device; the first takes three times as long."""
    kinds = [
        segment(3e-3, sizes=SIZES, parameter_bytes=GB, activation_bytes=0),
        segment(1e-3, sizes=SIZES, parameter_bytes=GB, activation_bytes=0),
    ]
    return profile(kinds, [0, 1], cut_bytes=64)


def test_costs_of_three_to_one_on_four_devices_are_planned_with_three_replicas_and_one() -> None:
    """R10: the ranking also has the best layout with equal replicas."""
    cluster = machines(1, 4, memory_bytes=6 * GB)
    found = search(three_to_one(), cluster, batch_size=96)
    best = found.best
    assert best.plan.widths == (3, 1) and best.plan.ranks == (0, 1, 2, 3) and not best.idle
    assert "3+1 replicas" in best.reason
    check_plan(best.plan, "the plan")
    even = search(three_to_one(), cluster, batch_size=96, microbatch_sizes=SIZES).best
    assert not even.plan.uneven and best.forecast.seconds < 0.8 * even.forecast.seconds
    # A forecast of the plan, and the plan that a worker decodes, are the same.
    assert forecast_plan(three_to_one(), cluster, best.plan)[0] == best.forecast
    assert decode(encode(best.plan), Plan, "a plan") == best.plan


def test_equal_segments_get_equal_replicas() -> None:
    model = profile([segment(1e-3, sizes=SIZES, parameter_bytes=MB)], [0] * 4)
    assert not search(model, machines(1, 4), batch_size=64).best.plan.uneven


def test_a_stage_with_three_replicas_takes_a_third_of_every_microbatch() -> None:
    """All replicas compute for as long as the other stage: there is no bottleneck."""
    stages = (StagePlan(0, 1, (0, 1, 2)), StagePlan(1, 2, (3,)))
    plan = Plan(stages, batch_size=96, microbatch_size=6, schedule="1f1b", precision="bf16")
    forecast, simulation = forecast_plan(three_to_one(), machines(1, 4, memory_bytes=8 * GB), plan)
    assert simulation.orders.microbatches == 16
    first, second = forecast.stages
    assert first.compute_seconds == pytest.approx(32 * 3 * 3e-3)
    assert second.compute_seconds == pytest.approx(96 * 3 * 1e-3)
    assert first.waiting_seconds < 0.1 * first.compute_seconds
    ranks = {interval.rank for interval in simulation.timeline([s.ranks for s in stages]).intervals}
    assert ranks == {0, 3}


@pytest.mark.parametrize("schedule", ["varuna", "zero-bubble-2x"])
@pytest.mark.parametrize(("count", "depth"), [(1, 2), (2, 4), (4, 4), (4, 2)])
def test_equal_replicas_cost_the_same_by_both_cost_models(count: int, depth: int, schedule: str) -> None:
    """Otherwise one kind of layout would win by its cost model: cards are shared, and reductions queue."""
    model, cluster, width = transformer(14), machines(count, 4), 4 * count // depth
    stages = tuple(
        StagePlan(16 * s // depth, 16 * (s + 1) // depth, tuple(range(s * width, s * width + width)))
        for s in range(depth)
    )
    plan = Plan(stages, 16 * width, 2, schedule, model.precision, model.fingerprint)
    even, _ = forecast_plan(model, cluster, plan)
    other, _ = forecast_uneven(CostTable(model), ClusterMap(cluster), plan, range(4 * count))
    assert other.seconds == pytest.approx(even.seconds, rel=1e-3)
    assert [stage.memory for stage in other.stages] == [stage.memory for stage in even.stages]


def test_unequal_replicas_are_found_among_many_cuts() -> None:
    """R10: the result for a depth does not depend on the other depths of the request."""
    kinds = [
        segment(2e-3, sizes=SIZES, parameter_bytes=MB, activation_bytes=MB),
        segment(1e-3, sizes=SIZES, parameter_bytes=GB // 4, activation_bytes=MB),
    ]
    costs = CostTable(profile(kinds, [0] * 12 + [1] * 12, cut_bytes=64))
    cluster_map = ClusterMap(machines(3, 2, memory_bytes=16 * GB))

    def best(depths: Sequence[int]) -> float:
        found = best_uneven(
            costs, cluster_map, UnevenRequest(48, depths, ("1f1b",), microbatch_counts=[8, 16])
        )
        assert found is not None and found.plan.uneven
        return found.forecast.seconds

    assert best(range(1, 7)) == min(best([depth]) for depth in (2, 3, 4, 5))


def counts_of(batch: int, numbers: Sequence[int]) -> list[int]:
    return UnevenSearch(
        CostTable(three_to_one()),
        ClusterMap(machines(1, 3)),
        UnevenRequest(batch, [2], ("1f1b",), microbatch_counts=numbers),
    ).counts


@pytest.mark.parametrize("first", range(0, 48, 16))
def test_the_best_uneven_layout_equals_that_of_trying_every_layout(first: int) -> None:
    """R10: over cuts, replicas and numbers of micro-batches; with recompute only where memory requires it."""
    for seed in range(first, first + 16):
        model, cluster, batch, numbers = random_case(seed, most_segments=5, most_devices=5)
        costs, cluster_map = CostTable(model), ClusterMap(cluster)
        request = UnevenRequest(batch, range(1, 6), ("1f1b",), microbatch_counts=numbers)
        found = best_uneven(costs, cluster_map, request)
        plans = [*every_uneven_plan(costs, cluster_map, batch, counts_of(batch, numbers))]
        if not plans:
            assert found is None, seed
            continue
        assert found is not None, seed
        least = min(forecast.seconds for _, forecast in plans)
        assert found.forecast.seconds == pytest.approx(least, rel=1e-9), seed
        assert found.devices == tuple(
            range(cluster_map.num_devices - len(found.plan.ranks), cluster_map.num_devices)
        )
        check_plan(found.plan, "the plan")


@pytest.mark.parametrize("seed", range(8))
def test_search_takes_unequal_replicas_exactly_if_they_gain_two_percent(seed: int) -> None:
    """R10"""
    model, cluster, batch, _ = random_case(100 + seed, most_segments=4, most_devices=4)
    costs, cluster_map = CostTable(model), ClusterMap(cluster)
    try:
        ranking = search(model, cluster, batch_size=batch, schedules=["1f1b"])
    except PlanError:
        return
    even = next(proposal for proposal in ranking.proposals if not proposal.plan.uneven)
    counts = counts_of(batch, [number for number in (1, 2, 4, 8, 16) if number <= batch])
    plans = [*every_uneven_plan(costs, cluster_map, batch, counts)]
    least = min((forecast.seconds for _, forecast in plans), default=float("inf"))
    assert ranking.best.plan.uneven == (least < even.forecast.seconds / UNEVEN_GAIN)
    if ranking.best.plan.uneven:
        assert ranking.best.forecast.seconds == pytest.approx(least, rel=1e-9)


def every_layout(table: StageTable) -> list[tuple[StageOption, ...]]:
    found = []
    for depth in range(1, min(table.num_devices, table.num_segments) + 1):
        for widths, cuts in product(
            all_widths(table.num_devices, depth), combinations(range(1, table.num_segments), depth - 1)
        ):
            options = [
                table.option(first, stop, sum(widths[stage + 1 :]), depth - 1 - stage, widths[stage])
                for stage, (first, stop) in enumerate(pairwise([0, *cuts, table.num_segments]))
            ]
            if None not in options:
                found.append(tuple(option for option in options if option is not None))
    return found


def ticks(table: StageTable, options: Sequence[StageOption]) -> float:
    tail = EMPTY_TAIL
    for option in reversed(options):
        tail = tail.prepend(option)
    return table.ticks(tail)


@pytest.mark.parametrize("recompute", [None, True])
def test_dynamic_programming_finds_the_best_layout_of_each_depth(recompute: bool | None) -> None:
    """R10: by its own objective, over all cuts and numbers of replicas."""
    for seed in range(60):
        model, cluster, batch, numbers = random_case(seed, most_segments=6)
        costs, cluster_map = CostTable(model), ClusterMap(cluster)
        request = UnevenRequest(batch, [], ("1f1b",), recompute=recompute)
        (number,) = counts_of(batch, numbers[:1])
        table = StageTable(costs, cluster_map, request, number, range(1, costs.num_segments))
        best: dict[int, float] = {}
        for options in every_layout(table):
            seconds = ticks(table, options)
            best[len(options)] = min(best.get(len(options), seconds), seconds)
        found = {len(some[0]): ticks(table, some[0]) for some in table.best_layouts(6) if some}
        assert found == pytest.approx(best), seed


def test_dynamic_programming_over_whole_machines_gives_every_stage_whole_machines() -> None:
    model = transformer(8, sizes=(1, 2, 4, 8, 16))
    costs, cluster_map = CostTable(model), ClusterMap(machines(4, 2))
    table = StageTable(
        costs, cluster_map, UnevenRequest(64, [], ("1f1b",), uses_all_devices=True), 8, range(1, 10)
    )
    found = [options for layouts in table.best_layouts(4, unit=2) for options in layouts]
    assert {len(options) for options in found} == {1, 2, 3, 4}
    for options in found:
        assert all(option.devices % 2 == 0 for option in options)
        assert sum(option.devices for option in options) == 8
        assert [option.first for option in options] == [0, *(option.stop for option in options[:-1])]
        assert options[-1].stop == 10


@pytest.mark.parametrize("uses_all_devices", [False, True])
def test_requirements_are_kept_by_complete_search_and_by_climbing(uses_all_devices: bool) -> None:
    """Cuts, recompute, micro-batches, schedule and idle devices."""
    for segments, devices in ((6, 4), (30, 7)):
        kinds = [segment(2e-3, sizes=SIZES), segment(1e-3, sizes=SIZES)]
        model = profile(kinds, [0] * (segments // 3) + [1] * (segments - segments // 3))
        cuts = list(range(2, segments, 2))
        request = UnevenRequest(
            24,
            [2, 3],
            ("gpipe",),
            recompute=True,
            cuts=cuts,
            uses_all_devices=uses_all_devices,
            microbatch_counts=[2, 6],
            start_schedule="gpipe",
        )
        costs, cluster_map = CostTable(model), ClusterMap(machines(1, devices))
        assert UnevenSearch(costs, cluster_map, request).has_few_layouts == (segments == 6)
        found = best_uneven(costs, cluster_map, request)
        assert found is not None and found.plan.uneven and found.plan.depth in (2, 3)
        assert found.plan.schedule == "gpipe" and all(stage.recompute for stage in found.plan.stages)
        assert all(stage.first in cuts for stage in found.plan.stages[1:])
        assert len(found.devices) == devices or not uses_all_devices
        share = -(-24 // min(found.plan.widths))
        assert -(-share // found.plan.microbatch_size) in (2, 6)
        assert best_uneven(costs, cluster_map, request, limit=found.forecast.seconds) is None


def test_a_stage_recomputes_only_where_memory_requires_it() -> None:
    kinds = [
        segment(1e-3, sizes=SIZES, parameter_bytes=MB, activation_bytes=100 * MB),
        segment(1e-3, sizes=SIZES, parameter_bytes=100 * MB, activation_bytes=MB),
    ]
    model = profile(kinds, [0, 0, 1], cut_bytes=64)
    found = cut_layout(
        model,
        machines(1, 3, memory_bytes=600 * MB),
        ((0,), (1, 2)),
        batch_size=32,
        microbatch_size=1,
        schedule="gpipe",
        cuts=[2],
    )
    assert [stage.recompute for stage in found.plan.stages] == [True, False]
    assert all(stage.memory.total <= 600 * MB for stage in found.forecast.stages)


@pytest.mark.parametrize("segments", [8, 60])
def test_a_model_is_cut_for_the_replicas_of_each_stage(segments: int) -> None:
    """Three replicas and one: three quarters of the segments, with all cuts tried or only some."""
    model = profile([segment(1e-3, sizes=SIZES, parameter_bytes=MB)], [0] * segments)
    asked = {"batch_size": 48, "microbatch_size": 6, "schedule": "varuna"}
    cluster = machines(1, 4, memory_bytes=8 * GB)
    found = cut_layout(model, cluster, ((0, 1, 2), (3,)), **asked)
    assert found.plan.stages[0].stop == pytest.approx(segments * 3 / 4, abs=1)
    assert [stage.ranks for stage in found.plan.stages] == [(0, 1, 2), (3,)]
    thrice = cut_layout(model, cluster, ((0,), (1, 2), (3,)), **asked)
    assert thrice.forecast.stages[1].compute_seconds == pytest.approx(found.forecast.seconds, rel=0.5)
    some = cut_layout(model, cluster, ((0, 1, 2), (3,)), cuts=[1, 2, 5], **asked)
    assert some.plan.stages[0].stop == 5
    with pytest.raises(PlanError, match="need 1 cut, but only 0 of the model's cuts can be divided"):
        cut_layout(model, cluster, ((0, 1, 2), (3,)), cuts=[], **asked)
    with pytest.raises(PlanError, match="no cut of the model into 2 stages fits"):
        cut_layout(model, machines(1, 4, memory_bytes=MB), ((0, 1, 2), (3,)), **asked)


def test_a_layout_that_does_not_fit_is_refused_with_one_that_does_if_a_suggestion_is_wanted() -> None:
    """R11: with the memory of these devices; a suggestion takes a search."""
    model = profile([segment(1e-3, sizes=SIZES, parameter_bytes=GB)], [0] * 8)
    asked = {"batch_size": 16, "microbatch_size": 4, "schedule": "1f1b"}
    cluster = machines(1, 4, memory_bytes=10 * GB)
    with pytest.raises(PlanError, match=r"has 1 stage.*\(it fits with 4 stages"):
        cut_layout(model, cluster, ((0, 1, 2, 3),), **asked)
    with pytest.raises(PlanError, match=r"^1 stage: stage 0 needs at least .*, but a device .* too little$"):
        cut_layout(model, cluster, ((0, 1, 2, 3),), suggest=False, **asked)


few = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=12), few)
def test_balance_over_replicas_equals_the_best_of_all_cuts(costs: list[int], widths: list[int]) -> None:
    def longest(cut: Sequence[tuple[int, int]]) -> float:
        return max(sum(costs[a:b]) / width for (a, b), width in zip(cut, widths, strict=True))

    spans = balance_over(costs, widths)
    assert spans in set(all_cuts(len(costs), len(widths)))
    assert longest(spans) == min(map(longest, all_cuts(len(costs), len(widths))))


def test_a_plan_with_an_empty_stage_is_refused() -> None:
    plan = Plan((StagePlan(0, 1, (0,)), StagePlan(1, 2, ())), 4, 1)
    with pytest.raises(ValueError, match="have at least one rank"):
        check_plan(plan, "it")
    with pytest.raises(ValueError, match="has a stage without ranks"):
        parse_stage_map("0,1;,;")
    assert parse_stage_map("0,1,2;3;") == ((0, 1, 2), (3,))
    assert format_widths((3, 1)) == "3+1 replicas" and format_widths((1, 1)) == "1 replica"
    assert msgspec.structs.replace(plan, stages=plan.stages[:1]).uneven is False
