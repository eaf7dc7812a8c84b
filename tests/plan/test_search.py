"""The search equals trying every layout; and it finds the layouts that simple cases must have."""

import random
import re
from collections.abc import Iterator
from itertools import product
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.profiles import GB, MB, link, machines, profile, reductions, segment, transformer
from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.forecast import CandidateLayout, forecast_plan, memories, orders_of, pipelines
from varuna.plan.cost.simulate import simulate
from varuna.plan.cut.partition import all_cuts, uniform_cuts
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.request import PREFERENCE
from varuna.plan.search.search import search
from varuna.types import (
    Cluster,
    CutCost,
    Dim,
    Duration,
    Machine,
    OptimizerCost,
    Overheads,
    Plan,
    Profile,
    SegmentCost,
    SizeCost,
    StagePlan,
    TieCost,
)

# ---------------------------------------------------------------- against trying everything

durations = st.floats(1e-4, 5e-2).map(Duration)


@st.composite
def kinds(draw: st.DrawFn) -> SegmentCost:
    sizes = tuple(
        SizeCost(
            size,
            *(draw(durations) for _ in range(5)),
            draw(st.integers(0, 40)) * MB,
            draw(st.integers(0, 20)) * MB,
            draw(st.integers(0, 10)) * MB,
            draw(st.floats(0, 1e-3)),
        )
        for size in (1, 3)
    )
    parameters = draw(st.integers(0, 60)) * MB
    return SegmentCost(sizes, parameters, parameters, parameters // 4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Profile, Cluster, int]:
    count = draw(st.integers(1, 4))
    some = draw(st.lists(kinds(), min_size=1, max_size=2))
    dims = st.builds(Dim, st.integers(0, 4 * MB), st.integers(0, MB))
    tied = count > 1 and all(kind.gradient_bytes for kind in some) and draw(st.booleans())
    ties = (TieCost((0, count - 1), MB // 2, MB // 8),) if tied else ()
    made = profile(
        some,
        [draw(st.integers(0, len(some) - 1)) for _ in range(count)],
        within=link(draw(st.floats(1e-6, 1e-3)), draw(st.floats(1e8, 1e11)), both=draw(st.floats(1, 2))),
        between=link(draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e7, 1e10))),
        reduce_costs=reductions(draw(st.floats(1e8, 1e11)), between=False)
        + (reductions(draw(st.floats(1e7, 1e10)), between=True) if draw(st.booleans()) else ()),
        optimizer=OptimizerCost("Adam", 1e-4, draw(st.floats(0, 1e-9)), 8.0),
        overheads=Overheads(draw(st.floats(0, 1e-3)), draw(st.floats(0, 1e-3))),
        cuts=tuple(CutCost(draw(dims), draw(dims)) for _ in range(count - 1)),
        ties=ties,
        precision=draw(st.sampled_from(["bf16", "fp16"])),
    )
    memory = st.sampled_from([300 * MB, 600 * MB, 80 * GB])
    machine = st.builds(
        Machine, st.just("m"), st.integers(1, 3), memory, st.sampled_from([1.0, 1.0, 0.5]), st.integers(1, 2)
    )
    cluster = Cluster(tuple(draw(st.lists(machine, min_size=1, max_size=2))))
    return made, cluster, draw(st.integers(1, 7))


SIZES = (1, 3)


def every_layout(made: Profile, cluster: Cluster, batch_size: int) -> Iterator[float]:
    """Yield the seconds of all layouts with equal replicas that fit."""
    costs, cluster_map = CostTable(made), ClusterMap(cluster)
    for depth in range(1, min(costs.num_segments, cluster_map.num_devices) + 1):
        for width in range(1, min(cluster_map.num_devices // depth, batch_size) + 1):
            for way in cluster_map.arrangements(depth, width):
                placement = cluster_map.place(depth, width, way)
                for size in SIZES:
                    for schedule in PREFERENCE:
                        for spans in all_cuts(costs.num_segments, depth):
                            yield from fitting(costs, placement, schedule, size, batch_size, spans)


def fitting(costs, placement, schedule, size, batch_size, spans):  # type: ignore[no-untyped-def]
    """Simulate with recompute only in stages that do not fit otherwise, and with recompute everywhere."""
    plain = CandidateLayout(spans, (False,) * len(spans), schedule, size, batch_size, placement)
    everywhere = plain._replace(recompute=(True,) * len(spans))
    lacking = tuple(
        memory.total > have
        for memory, have in zip(memories(costs, plain), placement.memory_bytes, strict=True)
    )
    for draft in (plain._replace(recompute=lacking), everywhere):
        if all(
            memory.total <= have
            for memory, have in zip(memories(costs, draft), placement.memory_bytes, strict=True)
        ):
            orders = orders_of(draft)
            yield simulate(orders, pipelines(costs, draft, orders)).seconds


@settings(max_examples=40)
@given(cases())
def test_the_search_equals_simulating_every_layout(case: tuple[Profile, Cluster, int]) -> None:
    """V25, V26: over depths, replicas, placements, micro-batches, schedules, recompute and cuts."""
    made, cluster, batch_size = case
    all_seconds = list(every_layout(made, cluster, batch_size))
    if not all_seconds:
        with pytest.raises(PlanError, match="no layout fits"):
            search(made, cluster, batch_size=batch_size)
        return
    best = search(made, cluster, batch_size=batch_size, microbatch_sizes=SIZES).best
    assert best.forecast.seconds == pytest.approx(min(all_seconds), rel=1e-8)
    free = search(made, cluster, batch_size=batch_size).best  # stages may differ in their replicas, too
    assert free.forecast.seconds <= best.forecast.seconds * (1 + 1e-8)


@st.composite
def long_cases(draw: st.DrawFn) -> tuple[Profile, Cluster, int]:
    """Models of many segments on two devices: there are few cuts, so all are tried."""
    some = draw(st.lists(kinds(), min_size=1, max_size=3))
    count = draw(st.integers(9, 12))
    made = profile(some, [draw(st.integers(0, len(some) - 1)) for _ in range(count)], cut_bytes=MB)
    memory = st.sampled_from([600 * MB, 2 * GB, 80 * GB])
    machine = st.builds(Machine, st.just("m"), st.just(1), memory, st.sampled_from([1.0, 0.5]))
    return made, Cluster((draw(machine), draw(machine))), draw(st.integers(1, 6))


@settings(max_examples=10)
@given(long_cases())
def test_all_cuts_of_a_long_model_are_tried_if_they_are_few(
    case: tuple[Profile, Cluster, int],
) -> None:
    """V25, V26"""
    made, cluster, batch_size = case
    all_seconds = list(every_layout(made, cluster, batch_size))
    if all_seconds:
        best = search(made, cluster, batch_size=batch_size, microbatch_sizes=SIZES).best
        assert best.forecast.seconds == pytest.approx(min(all_seconds), rel=1e-8)


# ---------------------------------------------------------------- simple cases


def blocks(count: int, **more: object) -> Profile:
    """Equal segments of 3 ms per sample."""
    return profile([segment(1e-3, **more)], [0] * count)  # type: ignore[arg-type]


def test_one_device_runs_the_whole_model() -> None:
    best = search(blocks(4), machines(1, 1), batch_size=8).best
    assert (best.plan.depth, best.plan.width, best.idle) == (1, 1, ())
    assert best.forecast.seconds == pytest.approx(4 * 8 * 3e-3 + 4 * MB * 1e-10, rel=1e-6)


def test_with_fast_reductions_replicas_beat_stages() -> None:
    """Pure data parallelism has no bubble."""
    best = search(blocks(8), machines(1, 4), batch_size=64, schedules=["1f1b", "varuna", "gpipe"]).best
    assert (best.plan.depth, best.plan.width) == (1, 4)


def test_with_slow_reductions_stages_beat_replicas() -> None:
    slow = profile(
        [segment(1e-3)], [0] * 8, reduce_costs=reductions(1e6, between=False), within=link(1e-6, 100e9)
    )
    best = search(slow, machines(1, 4), batch_size=64).best
    assert (best.plan.depth, best.plan.width) == (4, 1)


def test_a_model_too_large_for_one_device_is_cut_and_one_too_large_for_all_is_refused() -> None:
    """V25: which limit, by how much, and the nearest layout that fits."""
    large = blocks(4, parameter_bytes=GB)  # with gradients and Adam's state 4 GiB each
    ranking = search(large, machines(1, 4, memory_bytes=9 * GB), batch_size=8, every_depth=True)
    assert {proposal.plan.depth for proposal in ranking.proposals} == {2, 3, 4}
    assert ranking.refused == (
        "1 stage: stage 0 needs at least 16 GiB, but a device has 9 GiB: 7 GiB too little",
    )
    with pytest.raises(PlanError) as error:
        search(large, machines(1, 2, memory_bytes=5 * GB), batch_size=8)
    assert re.search(
        "its stage [01] needs 8 GiB and the device has 5 GiB, 3 GiB too little", str(error.value)
    )
    assert "with 2 more devices, 4 stages would fit" in str(error.value)


def test_a_request_that_does_not_fit_is_answered_with_a_layout_that_does() -> None:
    """V25"""
    large = blocks(4, parameter_bytes=GB)
    with pytest.raises(
        PlanError, match=r"has 1 stage.*it fits with 4 stages, micro-batches of 1, zero-bubble"
    ):
        search(large, machines(1, 4, memory_bytes=5 * GB), batch_size=8, depths=[1])
    hungry = blocks(2, activation_bytes=GB)
    with pytest.raises(PlanError, match=r"and no recompute; .*it fits with"):
        search(
            hungry,
            machines(1, 2, memory_bytes=5 * GB),
            batch_size=64,
            recompute=False,
            depths=[2],
            schedules=["gpipe"],
        )


def test_more_stages_than_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 3 stages were requested, each needs a device"):
        search(blocks(4), machines(1, 2), batch_size=8, depths=[3, 4])


def test_a_machine_of_half_the_speed_gets_half_the_segments() -> None:
    """V26: two stages, of which one is twice as fast."""
    cluster = Cluster((Machine("fast", 1, 80 * GB), Machine("slow", 1, 80 * GB, speed=0.5)))
    best = search(blocks(9), cluster, batch_size=64, depths=[2], microbatch_sizes=[1]).best
    assert [stage.stop - stage.first for stage in best.plan.stages] == [6, 3]


def test_a_smaller_device_gets_fewer_segments() -> None:
    """V26: memory, not only time, decides where to cut."""
    cluster = Cluster((Machine("large", 1, 80 * GB), Machine("small", 1, 9 * GB)))
    best = search(blocks(6, parameter_bytes=GB), cluster, batch_size=16, depths=[2]).best
    assert [stage.stop - stage.first for stage in best.plan.stages] == [4, 2]


def test_stages_are_balanced_by_time_and_not_by_number() -> None:
    """V26"""
    uneven = profile([segment(4e-3), segment(1e-3)], [0, 1, 1, 1, 1])
    best = search(uneven, machines(1, 2), batch_size=32, depths=[2]).best
    assert [(stage.first, stage.stop) for stage in best.plan.stages] == [(0, 1), (1, 5)]


def test_the_larger_of_activations_and_gradients_stays_on_one_machine() -> None:
    """Large gradients keep the replicas of a stage together, large activations the stages of a replica."""
    heavy_cuts = profile([segment(1e-3)], [0] * 4, cut_bytes=64 * MB)
    plan = search(heavy_cuts, machines(2, 2), batch_size=16, depths=[2]).best.plan
    assert plan.width == 1 or [stage.ranks for stage in plan.stages] == [(0, 2), (1, 3)]
    heavy_gradients = profile([segment(1e-3, parameter_bytes=256 * MB)], [0] * 4, cut_bytes=1)
    plan = search(heavy_gradients, machines(2, 2), batch_size=16, depths=[2]).best.plan
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 7, 11, 13])
def test_any_number_of_devices_has_a_plan_and_idle_ones_are_named(num_devices: int) -> None:
    """V25: primes included; P = 1 and P = n + 1 are candidates."""
    ranking = search(blocks(3), machines(1, num_devices), batch_size=64, every_depth=True)
    assert {proposal.plan.depth for proposal in ranking.proposals} == set(range(1, min(3, num_devices) + 1))
    for proposal in ranking.proposals:
        used = len(proposal.plan.ranks)
        assert proposal.plan.ranks == tuple(range(used))
        assert len(proposal.idle) == num_devices - used
    cluster = Cluster((Machine("a", 2, 80 * GB), Machine("b", 1, 80 * GB)))
    (three_on_two,) = search(blocks(2), cluster, batch_size=64, depths=[2]).proposals
    assert three_on_two.idle == ("b:0",)


def test_only_stages_without_enough_memory_recompute() -> None:
    """A device holds the activations of one or two micro-batches, not of four."""
    hungry = blocks(4, activation_bytes=256 * MB, parameter_bytes=MB)
    tight = search(
        hungry,
        machines(1, 4, memory_bytes=GB),
        batch_size=64,
        depths=[4],
        schedules=["1f1b"],
        microbatch_sizes=[1],
    ).best
    assert [stage.recompute for stage in tight.plan.stages] == [True, False, False, False]
    ample = search(hungry, machines(1, 4), batch_size=64, depths=[4], schedules=["1f1b"]).best
    assert not any(stage.recompute for stage in ample.plan.stages)


def test_runners_up_have_a_reason() -> None:
    """B3"""
    ranking = search(blocks(8), machines(1, 4), batch_size=64, every_depth=True)
    assert ranking.best.reason == "the shortest step of all layouts"
    assert [p.forecast.seconds for p in ranking.proposals] == sorted(
        p.forecast.seconds for p in ranking.proposals
    )
    assert all(
        "% slower: " in p.reason and "s a step for " in p.reason and ", not " in p.reason
        for p in ranking.proposals[1:]
    )


def test_forecast_plan_equals_the_search_and_its_parts_add_up() -> None:
    made, cluster = transformer(10, sizes=(1, 2)), machines(2, 4)
    for proposal in search(made, cluster, batch_size=32, every_depth=True).proposals:
        idle = range(len(proposal.plan.ranks), cluster.num_devices)
        forecast, simulation = forecast_plan(made, cluster, proposal.plan, idle=idle)
        if proposal.idle == tuple(f"node{device // 4}:{device % 4}" for device in idle):
            assert forecast == proposal.forecast
        for stage in forecast.stages:
            assert stage.seconds == pytest.approx(forecast.seconds)
            assert 0 <= stage.bubble <= 1
        assert simulation.timeline().seconds >= forecast.seconds - 1e-9


def test_a_plan_of_another_model_precision_or_size_is_refused() -> None:
    made, cluster = blocks(4), machines(1, 2)
    plan = search(made, cluster, batch_size=8, depths=[2]).best.plan
    other = profile([segment(1e-3)], [0] * 4, fingerprint="another")
    with pytest.raises(PlanError, match="the plan is for model by hand, but the profile is of another"):
        forecast_plan(other, cluster, plan)
    with pytest.raises(PlanError, match="runs in bf16, but the profile was measured in fp32"):
        forecast_plan(profile([segment(1e-3)], [0] * 4, precision="fp32"), cluster, plan)
    with pytest.raises(PlanError, match="the plan has 4 segments, but the profile has 5"):
        forecast_plan(blocks(5), cluster, plan)
    with pytest.raises(PlanError, match="the plan has 2 ranks, but only 1 devices are available"):
        forecast_plan(made, machines(1, 1), plan)


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"batch_size": 0}, "at least one sample, not 0"),
        ({"depths": [5]}, "5 stages were requested, but the model has 4 segments and so allows 1 to 4"),
        ({"microbatch_sizes": [8]}, "micro-batches of 8 were requested, but the profile covers 1 to 4"),
        ({"schedules": ["2f2b"]}, "there is no schedule '2f2b'"),
        ({"headroom": 1.0}, "headroom is the share"),
    ],
)
def test_invalid_requests_are_refused(asked: dict[str, object], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        search(blocks(4), machines(1, 2), **{"batch_size": 8, **asked})  # type: ignore[arg-type]


def test_a_link_that_was_not_measured_is_an_error() -> None:
    """V25"""
    alone = profile([segment(1e-3)], [0] * 4, between=None, reduce_costs=reductions(1e10, between=False))
    with pytest.raises(PlanError, match="no link between workers on two machines: `between` is null"):
        search(alone, machines(2, 2), batch_size=8)
    assert search(alone, machines(1, 4), batch_size=8).best
    nothing = profile([segment(1e-3)], [0] * 4, between=None, within=None, reduce_costs=())
    with pytest.raises(PlanError, match=r"within one machine|on one machine"):
        search(nothing, machines(1, 2), batch_size=8)
    assert search(nothing, machines(1, 1), batch_size=8).best.plan.depth == 1


def test_estimates_are_noted() -> None:
    """V25: all-reduces over more ranks than were measured, and micro-batches between measured sizes."""
    best = search(blocks(2), machines(2, 8), batch_size=16 * 3, depths=[1], microbatch_sizes=[4]).best
    said = " ".join(best.forecast.estimates)
    assert "micro-batches of 3 are interpolated between 2 and 4" in said
    assert "over 16 ranks is estimated from 8" in said


@pytest.mark.parametrize("seed", range(2))
def test_no_uniform_cut_is_faster_than_the_plan(seed: int) -> None:
    """R10: equal cuts by segments and by work, in both placements, with every micro-batch and schedule."""
    draw = random.Random(seed)
    some = [
        segment(draw.uniform(1e-3, 4e-3), parameter_bytes=draw.randint(1, 200) * MB, activation_bytes=MB)
        for _ in range(4)
    ]
    made = profile(some, [draw.randrange(4) for _ in range(20)], cut_bytes=draw.randint(1, 4) * MB)
    cluster, batch = machines(3, 2, memory_bytes=4 * GB), 24
    best = search(made, cluster, batch_size=batch).best.forecast.seconds
    work = CostTable(made).work_between(1, range(21))
    for depth in range(1, 7):
        width = 6 // depth
        together = [tuple(range(stage * width, stage * width + width)) for stage in range(depth)]
        by_turns = [tuple(range(stage, depth * width, depth)) for stage in range(depth)]
        for spans, ranks, size, schedule in product(
            uniform_cuts(work, depth), (together, by_turns), (1, 2, 4), PREFERENCE
        ):
            stages = tuple(StagePlan(*span, own) for span, own in zip(spans, ranks, strict=True))
            plan = Plan(stages, batch, size, schedule, made.precision, made.fingerprint)
            forecast, _ = forecast_plan(made, cluster, plan)
            if all(stage.memory.total <= 4 * GB for stage in forecast.stages):
                assert best <= forecast.seconds * (1 + 1e-9), plan


def test_a_cluster_of_thousands_is_planned_with_few_simulations() -> None:
    """4,096 devices, fewer than a hundred simulations."""
    ranking = search(transformer(94), machines(512, 8), batch_size=8192)
    best = ranking.best
    assert ranking.num_simulated < 100
    assert len(best.plan.ranks) + len(best.idle) == 4096
    assert best.plan.stages[0].first == 0 and best.plan.stages[-1].stop == 96
    assert all(stage.memory.total <= 80 * GB for stage in best.forecast.stages)


def test_reductions_that_are_as_fast_when_larger_are_accepted() -> None:
    """Noise can measure that, if all of them are small."""
    noisy = reductions(inf, between=False) + reductions(inf, between=True)
    for count in (4, 12):
        ranking = search(
            profile([segment(1e-3)], [0] * count, reduce_costs=noisy), machines(1, 4), batch_size=16
        )
        assert ranking.best.forecast.seconds > 0
