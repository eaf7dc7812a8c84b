"""Layouts whose stages differ in their number of replicas: chosen where they win, and costed as they run."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import GB, MB, machines, profile, segment, transformer
from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.cut.partition import all_cuts, balance_over
from varuna.plan.cut.place import Ground
from varuna.plan.plan_file import check_plan
from varuna.plan.search.climb import best_uneven
from varuna.plan.search.search import cut_layout, search
from varuna.plan.search.stages import Terms
from varuna.plan.search.uneven import forecast_uneven
from varuna.types import Plan, StagePlan, format_widths, parse_stage_map

SIZES = (1, 2, 4, 8, 16, 32)


def three_to_one():
    """Two segments that no one device holds, the first three times as long as the second."""
    kinds = [
        segment(3e-3, sizes=SIZES, parameter_bytes=GB, activation_bytes=0),
        segment(1e-3, sizes=SIZES, parameter_bytes=GB, activation_bytes=0),
    ]
    return profile(kinds, [0, 1], cut_bytes=64)


def test_costs_of_three_to_one_on_four_devices_are_planned_with_three_replicas_and_one() -> None:
    """R10: and the even layouts are there to compare with."""
    cluster = machines(1, 4, memory_bytes=6 * GB)
    found = search(three_to_one(), cluster, batch_size=96)
    best = found.best
    assert best.plan.widths == (3, 1) and best.plan.ranks == (0, 1, 2, 3) and not best.idle
    assert "3+1 replicas" in best.reason
    check_plan(best.plan, "the plan")
    even = search(three_to_one(), cluster, batch_size=96, microbatch_sizes=SIZES).best
    assert not even.plan.uneven and best.forecast.seconds < 0.8 * even.forecast.seconds
    # What is planned is what a forecast of that plan says, and what a worker is handed.
    assert forecast_plan(three_to_one(), cluster, best.plan)[0] == best.forecast
    assert decode(encode(best.plan), Plan, "a plan") == best.plan


def test_an_even_layout_wins_where_segments_are_alike() -> None:
    model = profile([segment(1e-3, sizes=SIZES, parameter_bytes=MB)], [0] * 4)
    assert not search(model, machines(1, 4), batch_size=64).best.plan.uneven


def test_a_stage_with_three_replicas_takes_a_third_of_every_microbatch() -> None:
    """All of them compute for as long as the one of the other stage: nobody is the bottleneck."""
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
def test_equal_replicas_cost_the_same_by_both_reckonings(count: int, depth: int, schedule: str) -> None:
    """Else one kind of layout would win by how it is reckoned: cards are shared, and reductions queue."""
    model, cluster, width = transformer(14), machines(count, 4), 4 * count // depth
    stages = tuple(
        StagePlan(16 * s // depth, 16 * (s + 1) // depth, tuple(range(s * width, s * width + width)))
        for s in range(depth)
    )
    plan = Plan(stages, 16 * width, 2, schedule, model.precision, model.fingerprint)
    even, _ = forecast_plan(model, cluster, plan)
    other, _ = forecast_uneven(Costs(model), Ground(cluster), plan, range(4 * count))
    assert other.seconds == pytest.approx(even.seconds, rel=1e-3)
    assert [stage.memory for stage in other.stages] == [stage.memory for stage in even.stages]


def test_unequal_replicas_are_found_among_many_cuts() -> None:
    """R10: what is found for a depth does not depend on which others are asked for."""
    kinds = [
        segment(2e-3, sizes=SIZES, parameter_bytes=MB, activation_bytes=MB),
        segment(1e-3, sizes=SIZES, parameter_bytes=GB // 4, activation_bytes=MB),
    ]
    costs = Costs(profile(kinds, [0] * 12 + [1] * 12, cut_bytes=64))
    ground = Ground(machines(3, 2, memory_bytes=16 * GB))

    def best(depths: Sequence[int]) -> float:
        found = best_uneven(
            costs,
            ground,
            batch_size=48,
            depths=depths,
            schedules=("1f1b",),
            shard_optimizer=False,
            terms=Terms(),
            microbatches=[8, 16],
        )
        assert found is not None and found.plan.uneven
        return found.forecast.seconds

    assert best(range(1, 7)) == min(best([depth]) for depth in (2, 3, 4, 5))


@pytest.mark.parametrize("segments", [8, 60])
def test_a_model_is_cut_for_the_replicas_of_each_stage(segments: int) -> None:
    """Three replicas and one: three quarters of the segments, whether all cuts are looked at or some."""
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
    with pytest.raises(PlanError, match="need 1 cut, but only 0 of the model's can be parted by sample"):
        cut_layout(model, cluster, ((0, 1, 2), (3,)), cuts=[], **asked)
    with pytest.raises(PlanError, match="no cut of the model into 2 stages fits"):
        cut_layout(model, machines(1, 4, memory_bytes=MB), ((0, 1, 2), (3,)), **asked)


def test_a_layout_that_does_not_fit_is_told_with_one_that_does_unless_others_are_asked_about() -> None:
    """R11: the memory of these very places; looking for another layout takes a search."""
    model = profile([segment(1e-3, sizes=SIZES, parameter_bytes=GB)], [0] * 8)
    asked = {"batch_size": 16, "microbatch_size": 4, "schedule": "1f1b"}
    cluster = machines(1, 4, memory_bytes=10 * GB)
    with pytest.raises(PlanError, match=r"with 1 stage.*\(it fits with 4 stages"):
        cut_layout(model, cluster, ((0, 1, 2, 3),), **asked)
    with pytest.raises(PlanError, match=r"^1 stage: stage 0 needs .* at least, a device has .* too little$"):
        cut_layout(model, cluster, ((0, 1, 2, 3),), one_of_many=True, **asked)


few = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@given(st.lists(st.integers(0, 9), min_size=3, max_size=12), few)
def test_work_is_balanced_over_replicas_as_well_as_any_cut_could(costs: list[int], widths: list[int]) -> None:
    def longest(cut: Sequence[tuple[int, int]]) -> float:
        return max(sum(costs[a:b]) / width for (a, b), width in zip(cut, widths, strict=True))

    spans = balance_over(costs, widths)
    assert spans in set(all_cuts(len(costs), len(widths)))
    assert longest(spans) == min(map(longest, all_cuts(len(costs), len(widths))))


def test_a_plan_with_an_empty_stage_is_refused() -> None:
    plan = Plan((StagePlan(0, 1, (0,)), StagePlan(1, 2, ())), 4, 1)
    with pytest.raises(ValueError, match="hold one at least"):
        check_plan(plan, "it")
    with pytest.raises(ValueError, match="a stage without a rank"):
        parse_stage_map("0,1;,;")
    assert parse_stage_map("0,1,2;3;") == ((0, 1, 2), (3,))
    assert format_widths((3, 1)) == "3+1 replicas" and format_widths((1, 1)) == "1 replica"
    assert msgspec.structs.replace(plan, stages=plan.stages[:1]).uneven is False
