"""Memory of a stage, part by part."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import MB, profile, segment
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.memory import HeldCounts, MemoryTerms, MemoryTotals, held_counts, stage_memory
from varuna.schedule import NAMES, build
from varuna.types import MemoryForecast, TieCost


def memory(*, width: int = 1, shard: bool = False, kept: HeldCounts = HeldCounts(3, 3, 0)) -> MemoryForecast:  # noqa: B008
    made = profile([segment(1e-3, activation_bytes=5 * MB)], [0, 0, 0, 0], cut_bytes=MB)
    costs = CostTable(made)
    return stage_memory(costs, MemoryTerms(costs.sizes(2), width, 16, shard), 1, 3, kept)


def test_every_part_is_what_it_says() -> None:
    """Two segments of 4 MiB of weights, micro-batches of 2, three of them held."""
    found = memory()
    assert (found.parameters, found.gradients, found.buckets) == (8 * MB, 8 * MB, 0)
    assert found.optimizer == 8 * 2 * MB
    assert found.activations == 3 * 2 * (2 * 5 * MB)
    assert found.boundaries == 4 * 2 * MB + 16 * 1024
    assert found.working == 2 * MB
    assert found.total == sum(
        (8 * MB, 8 * MB, 16 * MB, 60 * MB, 8 * MB + 16 * 1024, 2 * MB),
    )


def test_replicas_add_buckets_and_may_share_the_optimizers_state() -> None:
    assert memory(width=4).buckets == 8 * MB
    assert memory(width=4).optimizer == 16 * MB
    assert memory(width=4, shard=True).optimizer == 4 * MB


def test_recompute_leaves_of_a_micro_batch_what_it_was_given() -> None:
    assert memory(kept=HeldCounts(3, 1, 0)).activations == 2 * (2 * 5 * MB) + 2 * 2 * MB


def test_a_tied_tensor_is_held_once() -> None:
    tie = (TieCost((0, 1), MB, MB // 4),)
    costs = CostTable(profile([segment(1e-3)], [0, 0], ties=tie))
    found = stage_memory(costs, MemoryTerms(costs.sizes(1), 2, 1, False), 0, 2, HeldCounts(1, 1, 0))
    assert (found.parameters, found.gradients, found.buckets) == (7 * MB, 7 * MB, 7 * MB)
    assert found.optimizer == 14 * MB


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 15), st.booleans())
def test_as_many_micro_batches_are_counted_as_the_order_holds(
    name: str, stages: int, microbatches: int, recompute: bool
) -> None:
    """An order may hold fewer than its limit: varuna's lets a stage run ahead."""
    schedule = build(name, stages=stages, microbatches=microbatches, recompute=(recompute,) * stages)
    for stage, row in enumerate(schedule.rows):
        kept = held_counts(name, stage=stage, stages=stages, microbatches=microbatches, recompute=recompute)
        held = whole = most_held = most_whole = most_split = split = 0
        last = "W" if any(i.op == "W" for i in row) else "B"
        recomputes = any(i.op == "R" for i in row)
        for i in row:
            held += (i.op == "F") - (i.op == last)
            whole += (i.op == ("R" if recomputes else "F")) - (i.op == last)
            split += (i.op == "I") - (i.op == "W")
            most_held, most_whole, most_split = (
                max(most_held, held),
                max(most_whole, whole),
                max(most_split, split),
            )
        assert most_held <= kept.held <= microbatches
        assert most_whole <= kept.whole
        assert most_split == kept.split
        if name != "varuna":
            assert most_held == kept.held


@given(
    st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2), st.booleans(), st.booleans()
)
def test_totals_for_many_spans_are_those_of_the_parts(
    first: int, length: int, held: int, split: int, wide: bool, shard: bool
) -> None:
    kinds = [
        segment(1e-3, parameter_bytes=3 * MB),
        segment(1e-3, activation_bytes=7 * MB, working_bytes=9 * MB),
    ]
    costs = CostTable(profile(kinds, [0, 1, 1, 0, 1, 0, 0], ties=(TieCost((0, 3), MB, MB // 4),)))
    room = MemoryTerms(costs.sizes(3), 4 if wide else 1, 8, shard)
    kept = HeldCounts(held, min(held, 2), split)
    parts = stage_memory(costs, room, first, first + length, kept).total
    assert MemoryTotals(costs, room).total(first, first + length, kept) == pytest.approx(parts, abs=4)


# ---------------------------------------------------------------- hand counts

HELD = {
    # 4 stages, 8 micro-batches: held, and between the two parts of their backward
    "gpipe": ((8, 8, 8, 8), (0, 0, 0, 0)),
    "1f1b": ((4, 3, 2, 1), (0, 0, 0, 0)),
    "varuna": ((8, 7, 5, 1), (0, 0, 0, 0)),
    "zero-bubble": ((4, 4, 4, 4), (1, 2, 3, 4)),
    "zero-bubble-2x": ((7, 7, 7, 7), (1, 3, 5, 7)),
}


@pytest.mark.parametrize("name", NAMES)
def test_held_micro_batches_are_those_of_the_schedule(name: str) -> None:
    held, split = HELD[name]
    for stage in range(4):
        counts = held_counts(name, stage=stage, stages=4, microbatches=8, recompute=False)
        assert counts == HeldCounts(held[stage], held[stage], split[stage])


@pytest.mark.parametrize("name", NAMES)
def test_recompute_leaves_one_micro_batch_whole_or_those_between_the_two_parts(name: str) -> None:
    held, split = HELD[name]
    for stage in range(4):
        counts = held_counts(name, stage=stage, stages=4, microbatches=8, recompute=True)
        follows_at_once = stage == 3 and name != "gpipe"  # the last stage has nothing to recompute
        whole = held[stage] if follows_at_once else max(1, split[stage])
        assert counts == HeldCounts(held[stage], whole, split[stage])


@pytest.mark.parametrize("name", NAMES)
def test_one_micro_batch_is_held_once_by_every_schedule(name: str) -> None:
    for stage in range(3):
        counts = held_counts(name, stage=stage, stages=3, microbatches=1, recompute=True)
        assert (counts.held, counts.whole) == (1, 1)


@given(
    st.sampled_from(NAMES),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
)
def test_the_total_is_the_sum_counted_by_hand(
    name: str, stages: int, microbatches: int, recompute: bool, width: int, shard: bool
) -> None:
    """Segments of 4 MiB of weights and 5 MiB of activations per sample; cuts of 1 MiB; one per stage."""
    costs = CostTable(
        profile([segment(1e-3, activation_bytes=5 * MB)], [0] * stages, cut_bytes=MB, fixed_bytes=7 * MB)
    )
    terms = MemoryTerms(costs.sizes(2), width, 16, shard)
    for stage in range(stages):
        counts = held_counts(name, stage=stage, stages=stages, microbatches=microbatches, recompute=recompute)
        received = 2 * MB if stage else 0
        sent = 2 * MB if stage < stages - 1 else 0
        expected = (
            7 * MB  # fixed
            + 4 * MB * (3 if width > 1 else 2)  # weights, gradients, buckets
            + 8 * MB // (width if shard else 1)  # two numbers of state for each weight
            + counts.whole * 10 * MB
            + (counts.held - counts.whole) * received
            + 2 * (received + sent)  # a message in and out, in both directions
            + 16 * 1024  # the samples
            + 2 * MB  # working
        )
        found = stage_memory(costs, terms, stage, stage + 1, counts)
        assert found.total == pytest.approx(expected, abs=1)


def test_split_bytes_count_for_each_micro_batch_between_the_two_parts() -> None:
    one = segment(1e-3)
    sizes = tuple(msgspec.structs.replace(size, split_bytes=3 * MB) for size in one.sizes)
    costs = CostTable(profile([msgspec.structs.replace(one, sizes=sizes)], [0, 0]))
    terms = MemoryTerms(costs.sizes(1), 1, 1, False)
    plain = stage_memory(costs, terms, 0, 2, HeldCounts(4, 4, 0))
    split = stage_memory(costs, terms, 0, 2, HeldCounts(4, 4, 3))
    assert split.activations - plain.activations == 3 * 2 * 3 * MB


def test_what_all_stages_keep_counts_a_tied_tensor_once() -> None:
    tie = (TieCost((0, 2), MB, MB // 4),)
    costs = CostTable(profile([segment(1e-3)], [0, 0, 0], ties=tie))
    totals = MemoryTotals(costs, MemoryTerms(costs.sizes(1), 2, 1, False))
    # 12 MiB of weights less one tied MiB: weights, gradients, buckets, and twice that for the optimizer.
    assert totals.least_steady == 11 * MB * 5
