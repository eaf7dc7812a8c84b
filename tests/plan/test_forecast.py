"""Predictions of whole layouts, against sums by hand."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import MB, link, machines, profile, reductions, segment
from varuna.plan.cost.costs import BUCKET_BYTES, FIRST_BUCKET_BYTES, CostTable
from varuna.plan.cost.forecast import CandidateLayout, forecast_plan, memories, orders_of, pipelines, plan_of
from varuna.plan.cut.place import ARRANGEMENTS, ClusterMap
from varuna.types import Cluster, Overheads, Profile, ScheduleName, TieCost

FREE = link(1e-12, 1e18)


def layout(
    made: Profile,
    cluster: Cluster,
    depth: int,
    width: int,
    *,
    size: int = 1,
    batch: int = 8,
    schedule: ScheduleName = "gpipe",
    recompute: bool = False,
    arrangement: str = "stages together",
) -> CandidateLayout:
    """Equally many segments for each stage."""
    each = len(made.segments) // depth
    spans = tuple((each * stage, each * (stage + 1)) for stage in range(depth))
    placement = ClusterMap(cluster).place(depth, width, arrangement)  # type: ignore[arg-type]
    return CandidateLayout(spans, (recompute,) * depth, schedule, size, batch, placement)


def seconds(made: Profile, cluster: Cluster, draft: CandidateLayout) -> float:
    forecast, simulation = forecast_plan(made, cluster, plan_of(draft, made))
    assert forecast.seconds == simulation.seconds
    return forecast.seconds


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 3))
def test_equal_stages_take_a_round_for_each_micro_batch_and_each_stage_but_one(
    depth: int, samples: int, size: int
) -> None:
    """(M + P - 1) × 3 forwards, and the optimizer; a last micro-batch that is smaller takes less."""
    made = profile([segment(1e-3, sizes=(1, 2, 3))], [0] * depth, within=FREE, reduce_costs=())
    draft = layout(made, machines(1, depth), depth, 1, size=size, batch=samples)
    assert draft.microbatches == ceil(samples / size)
    assert draft.last_size == samples - (draft.microbatches - 1) * size
    optimizer = MB * 1e-10
    found = seconds(made, machines(1, depth), draft)
    if draft.last_size == size:
        expected = 3e-3 * size * (draft.microbatches + depth - 1)
        assert found == pytest.approx(expected + optimizer, rel=1e-6)
    else:
        assert found < 3e-3 * size * (draft.microbatches + depth - 1) + optimizer


def test_every_instruction_and_every_step_has_its_overhead() -> None:
    made = profile([segment(1e-3)], [0], overheads=Overheads(1e-4, 5e-3))
    draft = layout(made, machines(1, 1), 1, 1, batch=8)
    assert seconds(made, machines(1, 1), draft) == pytest.approx(8 * (3e-3 + 2 * 1e-4) + 5e-3 + MB * 1e-10)


def test_recompute_runs_the_forward_again() -> None:
    made = profile([segment(1e-3)], [0, 0], within=FREE, reduce_costs=())
    cluster = machines(1, 2)
    plain = layout(made, cluster, 2, 1, schedule="gpipe")
    again = layout(made, cluster, 2, 1, schedule="gpipe", recompute=True)
    # gpipe holds all micro-batches, so both stages recompute all but none is hidden.
    assert seconds(made, cluster, again) - seconds(made, cluster, plain) == pytest.approx(8e-3, rel=0.13)
    assert memories(CostTable(made), again)[1].activations < memories(CostTable(made), plain)[1].activations


def test_the_first_stage_runs_its_whole_backward_as_the_input_part() -> None:
    made = profile([segment(1e-3)], [0, 0], within=FREE, reduce_costs=())
    draft = layout(made, machines(1, 2), 2, 1, schedule="zero-bubble")
    (times,) = pipelines(CostTable(made), draft, orders_of(draft))
    assert times.stages[0].seconds[3:] == pytest.approx((2e-3, 0.0), abs=1e-9)
    assert times.stages[1].seconds[3:] == pytest.approx((1e-3, 1e-3), abs=1e-9)


def test_messages_over_one_card_take_turns() -> None:
    """Four replicas that cross machines at one cut, on machines with one card or four."""
    made = profile([segment(1e-3)], [0, 0], cut_bytes=MB)
    costs = CostTable(made)
    one = layout(made, machines(2, 4), 2, 4, arrangement="replicas together")
    four = layout(made, machines(2, 4, cards=4), 2, 4, arrangement="replicas together")
    sending = costs.message(MB, between=True).sending
    for draft, expected in ((one, 4 * sending), (four, sending)):
        (times,) = pipelines(costs, draft, orders_of(draft))
        assert times.forward[0].sending == pytest.approx(expected)


def test_a_slower_device_takes_longer_by_its_speed() -> None:
    made = profile([segment(1e-3)], [0, 0], within=FREE, reduce_costs=())
    fast, slow = machines(1, 2), machines(1, 2, speed=0.5)
    draft = layout(made, fast, 2, 1)
    optimizer = MB * 1e-10
    quick = seconds(made, fast, draft) - optimizer
    assert seconds(made, slow, layout(made, slow, 2, 1)) - optimizer == pytest.approx(2 * quick, rel=1e-6)


def test_ties_and_overflow_checks_reach_the_simulator() -> None:
    tie = (TieCost((0, 1), MB, MB // 4),)
    made = profile([segment(1e-3)], [0, 0], ties=tie, precision="fp16")
    costs = CostTable(made)
    draft = layout(made, machines(1, 2), 2, 1)
    (times,) = pipelines(costs, draft, orders_of(draft))
    assert times.ends_together
    assert [tied.stages for tied in times.ties] == [(0, 1)]
    assert times.ties[0].seconds == costs.reduce_seconds(2, MB, between=False)
    whole = layout(made, machines(1, 1), 1, 1)
    (times,) = pipelines(costs, whole, orders_of(whole))
    assert times.ties == ()


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(ARRANGEMENTS))
def test_a_plan_is_predicted_as_the_layout_it_was_made_from(depth: int, width: int, arrangement: str) -> None:
    made = profile([segment(1e-3), segment(2e-3)], [0, 1, 0, 1, 0, 1])
    cluster = machines(3, 3)
    draft = layout(made, cluster, depth, width, batch=12, schedule="1f1b", arrangement=arrangement)
    plan = plan_of(draft, made)
    assert [(stage.first, stage.stop) for stage in plan.stages] == list(draft.spans)
    used = sorted(device for replica in draft.placement.replicas for device in replica)
    idle = [device for device in range(9) if device not in used]
    forecast, _ = forecast_plan(made, cluster, plan, idle=idle)
    assert [stage.memory for stage in forecast.stages] == memories(CostTable(made), draft)
    again, _ = forecast_plan(made, cluster, plan, idle=idle)
    assert again == forecast


def test_parts_of_a_stage_add_up_to_the_step() -> None:
    made = profile([segment(1e-3), segment(2e-3)], [0, 1, 0, 1])
    draft = layout(made, machines(2, 4), 4, 2, schedule="1f1b", batch=32)
    forecast, _ = forecast_plan(made, machines(2, 4), plan_of(draft, made))
    for stage in forecast.stages:
        assert stage.seconds == pytest.approx(forecast.seconds)
        assert 0.0 <= stage.bubble < 1.0
    # The work of all stages is that of the whole model for the replica's 16 samples.
    assert sum(stage.compute_seconds for stage in forecast.stages) == pytest.approx(16 * 6 * 3e-3)


# ---------------------------------------------------------------- buckets


@given(st.lists(st.integers(0, 90), min_size=1, max_size=6), st.booleans())
def test_buckets_are_full_when_their_gradients_are(megabytes: list[int], split: bool) -> None:
    """Against a walk from the last segment to the first that fills one bucket after the other."""
    kinds = [segment(1e-3, parameter_bytes=n * MB) for n in megabytes]
    rates = reductions(1e9, between=False, latency=0.0)
    costs = CostTable(profile(kinds, range(len(kinds)), reduce_costs=rates))
    sizes = costs.sizes(1)
    found = costs.buckets(sizes, 0, len(kinds), group_size=2, between=False, split=split)
    total = sum(megabytes) * MB
    if not total:
        assert found == ()
        return
    shares = [share for share, _ in found]
    assert shares == sorted(shares) and shares[-1] == 1.0
    # All gradients are reduced once: seconds are linear in the bytes here.
    assert sum(seconds for _, seconds in found) == pytest.approx(2 * (1 / 2) * total / 1e9, rel=1e-6)
    if total > FIRST_BUCKET_BYTES:
        backward = sizes.weights if split else sizes.backward
        filled, when = 0, 0.0
        for index in reversed(range(len(kinds))):
            own = megabytes[index] * MB
            took = backward[index + 1] - backward[index]
            if filled + own >= FIRST_BUCKET_BYTES:
                when += took * (FIRST_BUCKET_BYTES - filled) / own
                break
            filled, when = filled + own, when + took
        assert shares[0] == pytest.approx(when / backward[-1])
        assert len(found) <= 2 + ceil((total - FIRST_BUCKET_BYTES) / BUCKET_BYTES)
