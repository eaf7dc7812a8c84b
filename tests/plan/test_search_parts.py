"""Parts of the search: its space, its bounds, its explanation, and cuts for a given layout."""

import re
from collections.abc import Iterator
from itertools import pairwise, product
from math import ceil, inf

import msgspec
import pytest
from hypothesis import given, settings

from tests.plan.brute_force import random_case
from tests.plan.profiles import GB, MB, machines, profile, segment, transformer
from tests.plan.test_search import cases
from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import CandidateLayout, forecast_plan, memories, orders_of, pipelines
from varuna.plan.cost.simulate import simulate
from varuna.plan.cut.partition import all_cuts
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.bounds import LayoutBounds, least_of_replicas
from varuna.plan.search.explanation import least_need, why_nothing_fits, why_slower
from varuna.plan.search.queue import LayoutSearch
from varuna.plan.search.request import PREFERENCE, SearchRequest
from varuna.plan.search.search import cut_layout, search
from varuna.plan.search.space import LayoutSpace, Node, node_of
from varuna.schedule import splits
from varuna.types import (
    Cluster,
    CutCost,
    Dim,
    Forecast,
    MemoryForecast,
    Plan,
    Profile,
    StageForecast,
    StagePlan,
)


def space_of(model: Profile, cluster: Cluster, batch: int, **changes: object) -> LayoutSpace:
    costs = CostTable(model)
    request = SearchRequest(
        batch,
        tuple(range(1, costs.num_segments + 1)),
        costs.microbatch_sizes(),
        PREFERENCE,
        ("where needed", "everywhere"),
        shard_optimizer=False,
        headroom=0.0,
    )
    return LayoutSpace(costs, ClusterMap(cluster), request._replace(**changes))


def every_candidate(space: LayoutSpace) -> Iterator[CandidateLayout]:
    """Every layout with equal replicas, whether it fits or not."""
    request, cluster_map, segments = space.request, space.cluster_map, space.costs.num_segments
    for depth in range(1, min(segments, cluster_map.num_devices) + 1):
        for width in range(1, space.most_replicas(depth) + 1):
            for way in cluster_map.arrangements(depth, width):
                placement = cluster_map.place(depth, width, way)
                for size, schedule, spans, recompute in product(
                    request.microbatch_sizes, request.schedules, all_cuts(segments, depth), (False, True)
                ):
                    flags = (recompute,) * depth
                    yield CandidateLayout(spans, flags, schedule, size, request.batch_size, placement)


def simulated_seconds(space: LayoutSpace, candidate: CandidateLayout) -> float:
    orders = orders_of(candidate)
    return simulate(orders, pipelines(space.costs, candidate, orders)).seconds


# ---------------------------------------------------------------- bounds


@settings(max_examples=12)
@given(cases())
def test_bounds_of_nodes_placements_and_cuts_are_sound(case: tuple[Profile, Cluster, int]) -> None:
    """V25: no simulated step is shorter than any bound from which it was refined."""
    model, cluster, batch = case
    space = space_of(model, cluster, batch, schedules=("1f1b", "zero-bubble-2x"))
    bounds = LayoutBounds(space)
    for candidate in every_candidate(space):
        node, seconds = node_of(candidate), simulated_seconds(space, candidate) * (1 + 1e-9)
        orders = orders_of(candidate)
        of_cut, bare = least_of_replicas(orders, pipelines(space.costs, candidate, orders))
        assert bare <= of_cut <= seconds
        assert bounds.of_node(node) <= bounds.of_placement(node, candidate.placement) * (1 + 1e-9)
        assert bounds.of_placement(node, candidate.placement) <= seconds


@settings(max_examples=8)
@given(cases())
def test_the_bound_of_a_node_holds_for_fewer_replicas(case: tuple[Profile, Cluster, int]) -> None:
    """More samples per replica never have a smaller bound."""
    model, cluster, batch = case
    space = space_of(model, cluster, batch)
    bounds = LayoutBounds(space)
    for depth in range(1, min(space.costs.num_segments, space.num_devices) + 1):
        for size, split in product(space.request.microbatch_sizes, (False, True)):
            nodes = [Node(depth, size, split, width) for width in range(1, space.most_replicas(depth) + 1)]
            seconds = [bounds.of_node(node) for node in nodes]
            assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(seconds))


def test_a_simulated_step_bounds_the_same_layout_with_fewer_replicas() -> None:
    """It grows as the bounds of the nodes do; nothing follows for more replicas, or on unequal machines."""
    space = space_of(transformer(10, sizes=(1, 2)), machines(1, 8), 64)
    bounds = LayoutBounds(space)
    wide, narrow = Node(2, 1, False, 4), Node(2, 1, False, 2)
    assert bounds.from_more_replicas(narrow) == 0.0
    bounds.record_simulated(wide, 3.0)
    bounds.record_simulated(wide, 2.0)
    bounds.record_simulated(narrow, 1.0)  # a wider one is known
    assert bounds.from_more_replicas(narrow) == pytest.approx(
        2.0 + bounds.of_node(narrow) - bounds.of_node(wide)
    )
    assert bounds.from_more_replicas(wide) == 0.0
    assert bounds.from_more_replicas(Node(3, 1, False, 2)) == 0.0


# ---------------------------------------------------------------- the space


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
@pytest.mark.parametrize(("count", "devices"), [(1, 6), (40, 8)])
def test_numbers_of_replicas_descend_to_one_and_keep_every_largest_share(
    batch: int, count: int, devices: int
) -> None:
    """In large clusters, one number stands for all with the same largest share of the batch."""
    space = space_of(transformer(4, sizes=(1, 2)), machines(count, devices), batch)
    for depth in (1, 2, 5):
        width, tried = space.most_replicas(depth), []
        while width:
            tried.append(width)
            width = space.fewer_replicas(width) if width > 1 else 0
        assert tried == sorted(set(tried), reverse=True) and tried[-1] == 1
        shares = {ceil(batch / width) for width in range(1, space.most_replicas(depth) + 1)}
        assert {ceil(batch / width) for width in tried} == shares


@pytest.mark.parametrize(("batch", "width", "size"), [(10, 3, 2), (8, 2, 4), (5, 5, 4), (7, 2, 3)])
def test_micro_batches_hold_the_largest_share_of_the_batch(batch: int, width: int, size: int) -> None:
    space = space_of(transformer(4, sizes=(1, 2, 4)), machines(1, 8), batch)
    number, last = space.microbatches(Node(1, size, False, width))
    assert (number - 1) * size + last == ceil(batch / width) and 1 <= last <= size


def test_a_model_that_no_number_of_devices_can_hold_has_no_node() -> None:
    """Weights, gradients and optimizer state alone: 4 GiB a segment."""
    model = profile([segment(1e-3, parameter_bytes=GB)], [0] * 4)
    space = space_of(model, machines(1, 4, memory_bytes=5 * GB), 8)
    assert [depth for depth in range(1, 5) if space.nodes(depth)] == [4]
    assert [depth for depth in range(1, 6) if space.can_hold_model(depth)] == [4]
    larger = machines(1, 4, memory_bytes=15 * GB)  # 12 GiB and a quarter of 8 GiB of optimizer state
    assert space_of(model, larger, 8, shard_optimizer=True).can_hold_model(1)
    assert not space_of(model, larger, 8).can_hold_model(1)


def test_a_space_of_one_depth_shares_what_was_computed() -> None:
    space = space_of(transformer(30, sizes=(1, 2)), machines(2, 8), 64)
    node = Node(4, 1, False, 4)
    placement = space.cluster_map.place(4, 4, "stages together")
    time_limits = space.place(node, placement).time_limits
    one = space.of_depth(4)
    assert one.request.depths == (4,) and space.request.depths == tuple(range(1, 33))
    assert one.place(node, placement).time_limits is time_limits and not one.has_few_cuts


def test_schedules_are_divided_by_their_backward() -> None:
    space = space_of(transformer(4), machines(1, 4), 8)
    assert space.splits == [False, True]
    for split in (False, True):
        assert all(splits(name) == split for name in space.schedules(split))
    assert sorted([*space.schedules(False), *space.schedules(True)]) == sorted(PREFERENCE)
    assert space_of(transformer(4), machines(1, 4), 8, schedules=("gpipe",)).splits == [False]


# ---------------------------------------------------------------- why nothing fits


@pytest.mark.parametrize("seed", range(6))
def test_the_least_need_of_a_depth_is_that_of_its_best_cut(seed: int) -> None:
    """V25: over all cuts, the least share by which the fullest stage fills its device."""
    model, _, batch, _ = random_case(seed, most_segments=7)
    cluster = machines(1, 4, memory_bytes=400 * MB)
    space = space_of(model, cluster, batch)
    for depth in range(1, min(4, len(model.segments)) + 1):
        placement = space.cluster_map.place(depth, 1, "stages together")
        needs = [
            max(memory.total for memory in memories(space.costs, candidate))
            for spans in all_cuts(len(model.segments), depth)
            for candidate in [CandidateLayout(spans, (True,) * depth, "1f1b", 1, batch, placement)]
        ]
        found = least_need(space, depth)
        assert found.num_bytes == pytest.approx(min(needs), rel=5e-3)
        assert found.device_bytes == 400 * MB and 0 <= found.stage < depth


@pytest.mark.parametrize("gigabytes", [1, 3, 5, 7, 9, 17])
def test_the_explanation_names_a_depth_that_is_short_and_a_solution_that_fits(gigabytes: int) -> None:
    """V25: 4 GiB a segment, on two devices."""
    model = profile([segment(1e-3, parameter_bytes=GB)], [0] * 4)
    cluster = machines(1, 2, memory_bytes=gigabytes * GB)
    if gigabytes >= 9:
        assert search(model, cluster, batch_size=4).best
        return
    with pytest.raises(PlanError) as error:
        search(model, cluster, batch_size=4)
    said = str(error.value)
    assert said == why_nothing_fits(space_of(model, cluster, 4))
    assert "has 2 stages, micro-batches of 1 and recompute; its stage" in said and "too little" in said
    if gigabytes >= 5:
        assert "(with 2 more devices, 4 stages would fit)" in said
        assert search(model, machines(1, 4, memory_bytes=gigabytes * GB), batch_size=4).best
    else:
        assert "(use devices with 8" in said and "shard the optimizer state over the replicas" in said
        sharded = why_nothing_fits(space_of(model, cluster, 4, shard_optimizer=True))
        assert "shard the optimizer" not in sharded


def test_a_cut_that_carries_more_than_the_model_is_explained_like_any_other() -> None:
    """Its messages need more memory than the whole model on one device."""
    cut = CutCost(Dim(1024, 0), Dim(1024, GB))
    model = profile([segment(1e-3, parameter_bytes=MB)], [0] * 2, cuts=(cut,))
    with pytest.raises(PlanError, match=r"no layout fits.*stage [01] needs 1.01 GiB and the device has 256"):
        search(model, machines(1, 2, memory_bytes=256 * MB), batch_size=1, depths=[2])


def test_a_request_that_rules_out_every_layout_is_answered_with_one_that_fits() -> None:
    model = profile([segment(1e-3, parameter_bytes=GB, activation_bytes=GB)], [0] * 2)
    cluster = machines(1, 2, memory_bytes=8 * GB)
    with pytest.raises(PlanError) as error:
        search(model, cluster, batch_size=32, schedules=["gpipe"], recompute=False)
    solution = re.search(r"it fits with (\d) stages?, micro-batches of (\d), ([a-z0-9-]+)", str(error.value))
    assert solution is not None
    depth, size, schedule = solution.groups()
    assert search(
        model,
        cluster,
        batch_size=32,
        depths=[int(depth)],
        microbatch_sizes=[int(size)],
        schedules=[schedule],  # type: ignore[list-item]
    ).best


def forecast_of(**parts: float) -> Forecast:
    memory = MemoryForecast(0, 0, 0, 0, 0, 0, 0, 0)
    numbers = {"compute": 1.0, "waiting": 0.5, "reduce": 0.25, "optimizer": 0.125} | parts
    stage = StageForecast(*numbers.values(), memory)
    return Forecast(sum(numbers.values()), (stage, stage), ())


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"compute": 2.0, "waiting": 0.75}, "66.7% slower: 2 s a step for computing, not 1 s"),
        ({"waiting": 1.0}, "26.7% slower: 1 s a step for waiting for other stages, not 500 ms"),
        ({"reduce": 0.75, "compute": 1.1}, "32.0% slower: 750 ms a step for the all-reduce, not 250 ms"),
        ({"optimizer": 0.5}, "20.0% slower: 500 ms a step for the optimizer, not 125 ms"),
        ({}, "as fast, with more devices or more memory"),
    ],
)
def test_a_slower_layout_is_explained_by_the_part_that_grew_most(
    parts: dict[str, float], reason: str
) -> None:
    assert why_slower(forecast_of(**parts), forecast_of()) == reason


# ---------------------------------------------------------------- cuts for a given layout


@pytest.mark.parametrize("recompute", [None, True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_cut_of_a_given_layout_is_the_best_of_all_cuts(schedule: str, recompute: bool | None) -> None:
    """V26: by trying every cut, with recompute only where memory requires it."""
    for seed in range(12):
        model, _, batch, _ = random_case(200 + seed, most_segments=6)
        cluster = machines(1, 4, memory_bytes=(500 + 100 * seed) * MB)
        stage_map = ((0, 2), (1, 3)) if seed % 2 else ((0,), (1,), (2,))
        if len(stage_map) > len(model.segments):
            continue
        best = best_cut(model, cluster, stage_map, batch, schedule, recompute)
        try:
            found = cut_layout(
                model,
                cluster,
                stage_map,
                batch_size=batch,
                microbatch_size=2,
                schedule=schedule,  # type: ignore[arg-type]
                recompute=recompute,
            )
        except PlanError:
            assert best == inf, seed
            continue
        assert found.forecast.seconds == pytest.approx(best), seed
        assert tuple(stage.ranks for stage in found.plan.stages) == stage_map


def best_cut(
    model: Profile,
    cluster: Cluster,
    stage_map: tuple[tuple[int, ...], ...],
    batch: int,
    schedule: str,
    recompute: bool | None,
) -> float:
    limit, best = cluster.machines[0].memory_bytes, inf
    for spans in all_cuts(len(model.segments), len(stage_map)):
        stages = tuple(
            StagePlan(*span, ranks, bool(recompute)) for span, ranks in zip(spans, stage_map, strict=True)
        )
        plan = Plan(stages, batch, 2, schedule, model.precision, model.fingerprint)  # type: ignore[arg-type]
        forecast, _ = forecast_plan(model, cluster, plan)
        short = [stage.memory.total > limit for stage in forecast.stages]
        if recompute is None and any(short):
            flags = tuple(
                msgspec.structs.replace(stage, recompute=flag)
                for stage, flag in zip(stages, short, strict=True)
            )
            forecast, _ = forecast_plan(model, cluster, msgspec.structs.replace(plan, stages=flags))
            short = [stage.memory.total > limit for stage in forecast.stages]
        if not any(short):
            best = min(best, forecast.seconds)
    return best


@pytest.mark.parametrize("segments", [40, 80])
def test_moving_any_single_cut_of_a_long_model_does_not_help(segments: int) -> None:
    """V26: the search stops only at a local optimum, even where cuts are too many to try."""
    some = [segment(1e-3, parameter_bytes=MB), segment(5e-3, parameter_bytes=MB)]
    model = profile(some, [i % 7 == 0 for i in range(segments)], cut_bytes=MB)
    cluster = machines(1, 4)
    options = {"batch_size": 32, "microbatch_size": 2}
    found = cut_layout(model, cluster, ((0,), (1,), (2,), (3,)), schedule="1f1b", **options)  # type: ignore[arg-type]
    bounds = [0, *(stage.stop for stage in found.plan.stages)]
    for cut, step in product((1, 2, 3), (-1, 1)):
        moved = [*bounds[:cut], bounds[cut] + step, *bounds[cut + 1 :]]
        stages = tuple(StagePlan(first, stop, (rank,)) for rank, (first, stop) in enumerate(pairwise(moved)))
        plan = msgspec.structs.replace(found.plan, stages=stages)
        assert forecast_plan(model, cluster, plan)[0].seconds >= found.forecast.seconds * (1 - 1e-9)


def test_a_search_keeps_the_better_of_two_layouts_by_time_devices_preference_and_memory() -> None:
    """B3: of equally fast layouts the one with fewer devices, then the schedule that comes first."""
    model = profile([segment(1e-3)], [0] * 2)
    one_stage = LayoutSearch(space_of(model, machines(1, 4), 1, depths=(1,)))
    one_stage.run()
    (best,) = one_stage.ranked()
    assert best.num_devices == 1 and best.candidate.schedule == PREFERENCE[0]
    found = LayoutSearch(space_of(model, machines(1, 4), 8), every_depth=True)
    found.run()
    assert [each[:4] for each in found.ranked()] == sorted(each[:4] for each in found.ranked())
    assert {each.candidate.depth for each in found.ranked()} == {1, 2}
