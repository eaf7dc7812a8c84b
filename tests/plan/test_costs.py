"""Looking up what was measured, and saying what was not."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import ADAM, GB, MB, link, profile, reductions, segment
from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable, with_network
from varuna.types import CutCost, Dim, Duration, LinkCost, MessageCost, Overheads, ReduceCost, TieCost


def test_spans_are_sums_of_their_segments() -> None:
    costs = CostTable(profile([segment(1e-3), segment(3e-3)], [0, 1, 0]))
    sizes = costs.sizes(2)
    assert [sizes.forward[3] - sizes.forward[1], sizes.backward[1]] == pytest.approx([8e-3, 4e-3])
    assert sizes.sent_bytes == [0, 128 << 10, 128 << 10, 0]
    assert costs.parameter_bytes == [0, 4 * MB, 8 * MB, 12 * MB]


def test_between_measured_sizes_it_interpolates_and_says_so() -> None:
    costs = CostTable(profile([segment(1e-3, sizes=(2, 6), fixed=1e-3)], [0]))
    costs.start_notes()
    assert costs.sizes(3).forward[-1] == pytest.approx(4e-3)
    assert costs.take_notes() == ("micro-batches of 3 are interpolated between 2 and 6",)
    costs.start_notes()
    assert costs.sizes(6).forward[-1] == pytest.approx(7e-3)
    assert costs.take_notes() == ()
    costs.start_notes()
    assert costs.sizes(3).forward[-1] == pytest.approx(4e-3)  # a second time, and it says so again
    assert len(costs.take_notes()) == 1


def test_below_the_smallest_size_it_takes_that_and_above_the_largest_it_refuses() -> None:
    costs = CostTable(profile([segment(1e-3, sizes=(2, 4))], [0]))
    costs.start_notes()
    assert costs.sizes(1).forward[-1] == pytest.approx(2e-3)
    assert costs.take_notes() == ("a micro-batch of 1 is assumed to cost as much as one of 2",)
    with pytest.raises(PlanError, match=r"micro-batches of 8 are larger than any that was measured .* 4"):
        costs.sizes(8)


def test_a_message_is_latency_and_time_on_the_way() -> None:
    costs = CostTable(profile([segment(1e-3)], [0, 0], within=link(1e-3, 1e6, both=1.5)))
    message = costs.message(500_000, between=False)
    assert (message.latency, message.sending) == pytest.approx((1e-3, 0.5))
    # 1.5 times as long as one way: of the time that two meet, the later one loses half.
    assert message.sharing == pytest.approx(0.5, rel=2e-2)
    costs.start_notes()
    assert costs.message(640 * MB, between=False).sending == pytest.approx(640 * MB / 1e6)
    assert "of 671088640 bytes are estimated from 67108864, the largest measured" in costs.take_notes()[0]


def test_what_sender_and_receiver_spend_is_kept() -> None:
    measured = LinkCost((MessageCost(MB, Duration(1e-3, 1e-4), Duration(1e-3), 2e-4, 3e-4),))
    message = CostTable(profile([segment(1e-3)], [0, 0], within=measured)).message(MB, between=False)
    assert (message.sender_seconds, message.receiver_seconds, message.spread) == (2e-4, 3e-4, 1e-4)


def test_an_all_reduce_over_a_group_that_was_not_measured_is_estimated_aloud() -> None:
    costs = CostTable(profile([segment(1e-3)], [0], reduce_costs=reductions(1e9, between=False, latency=0.0)))
    exact = costs.reduce_seconds(4, 100 * MB, between=False)
    assert exact == pytest.approx(1.5 * 100 * MB / 1e9)
    costs.start_notes()
    assert exact < costs.reduce_seconds(6, 100 * MB, between=False) < 2 * 100 * MB / 1e9
    larger = costs.reduce_seconds(1000, 100 * MB, between=False)
    assert larger == pytest.approx(2 * 100 * MB / 1e9, rel=1e-2)
    assert costs.take_notes() == (
        "an all-reduce within one machine over 6 ranks is estimated from 4 and 8",
        "an all-reduce within one machine over 1000 ranks is estimated from 8",
    )
    assert costs.reduce_seconds(1, 100 * MB, between=False) == 0.0


def test_without_a_measured_all_reduce_a_ring_over_the_link_is_taken_and_without_a_link_none() -> None:
    costs = CostTable(profile([segment(1e-3)], [0], reduce_costs=(), within=link(1e-6, 1e9), between=None))
    costs.start_notes()
    assert costs.reduce_seconds(4, 64 * MB, between=False) == pytest.approx(6 * (1e-6 + 16 * MB / 1e9))
    assert costs.take_notes() == (
        "the all-reduce within one machine is estimated from the link between two workers",
    )
    with pytest.raises(PlanError, match="neither an all-reduce nor a link between machines"):
        costs.reduce_seconds(4, MB, between=True)


def test_larger_messages_never_take_less_by_extrapolation() -> None:
    falling = (
        ReduceCost(2, MB, False, Duration(2e-3)),
        ReduceCost(2, 2 * MB, False, Duration(1e-3)),
    )
    costs = CostTable(profile([segment(1e-3)], [0], reduce_costs=falling))
    assert costs.reduce_seconds(2, GB, between=False) == pytest.approx(1e-3)


def test_buckets_fill_from_the_last_segment_on() -> None:
    """An embedding's gradients come last of all; of equal blocks they come evenly."""
    rates = reductions(1e9, between=False, latency=0.0)

    def buckets(sizes: list[int]) -> tuple[tuple[float, float], ...]:
        kinds = [segment(1e-3, parameter_bytes=size * MB) for size in sizes]
        costs = CostTable(profile(kinds, range(len(kinds)), reduce_costs=rates))
        return costs.buckets(costs.sizes(1), 0, len(kinds), group_size=2, between=False, split=False)

    even = buckets([100, 100, 100, 100])
    assert [share for share, _ in even] == sorted(share for share, _ in even)
    assert even[0][0] == pytest.approx(1 / 400) and even[-1][0] == 1.0
    assert sum(seconds for _, seconds in even) == pytest.approx(400 * MB / 1e9)
    assert even[2][0] == pytest.approx(0.57, abs=0.02)
    first_heavy = buckets([397, 1, 1, 1])
    assert first_heavy[1][0] > 0.75
    assert buckets([0, 0]) == ()
    assert buckets([1, 0]) == ((1.0, pytest.approx(MB / 1e9)),)


def test_a_tied_tensor_counts_once_in_a_stage() -> None:
    tie = TieCost((0, 2), 3 * MB, 3 * MB // 4)
    costs = CostTable(profile([segment(1e-3)], [0, 0, 0], ties=(tie,)))
    assert costs.tied_twice(0, 3) == (3 * MB, 3 * MB // 4)
    assert costs.tied_twice(0, 2) == costs.tied_twice(1, 3) == (0, 0)


def test_the_end_of_a_step_is_the_optimizer_on_what_the_stage_trains() -> None:
    made = profile([segment(1e-3)], [0, 0], overheads=Overheads(0.0, 5e-3))
    costs = CostTable(made)
    elements = 2 * MB
    assert costs.ending_seconds(0, 2, width=1, between=False, shard=False) == pytest.approx(
        5e-3 + elements * ADAM.seconds_per_element
    )
    shared = costs.ending_seconds(0, 2, width=4, between=False, shard=True)
    sent = costs.reduce_seconds(4, 8 * MB, between=False) / 2
    assert shared == pytest.approx(5e-3 + elements / 4 * ADAM.seconds_per_element + sent)
    measured = (ReduceCost(4, 8 * MB, False, Duration(2e-3), sharing=Duration(7e-3)),)
    told = CostTable(msgspec.structs.replace(made, reductions=measured))
    shared = told.ending_seconds(0, 2, width=4, between=False, shard=True)
    assert shared == pytest.approx(5e-3 + elements / 4 * ADAM.seconds_per_element + 7e-3)


def test_another_network_replaces_what_was_measured_between_machines_and_says_so() -> None:
    other = with_network(profile([segment(1e-3)], [0, 0]), 1e-5, 1e9)
    costs = CostTable(other)
    assert costs.message(100 * MB, between=True).sending == pytest.approx(100 * MB / 1e9, rel=1e-3)
    assert all(not cost.between_machines for cost in other.reductions)
    assert other.notes == ("the network between machines is assumed: 8 Gbit/s, 10 µs",)
    with pytest.raises(PlanError, match="a latency and a bandwidth above zero"):
        with_network(other, 0.0, 1e9)


# ---------------------------------------------------------------- properties


@given(st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=6))
def test_all_reduce_times_go_through_the_measured_points_and_never_fall_beyond_them(
    rows: list[tuple[int, int]],
) -> None:
    points = {size * MB: seconds * 1e-3 for size, seconds in rows}
    costs_of = tuple(ReduceCost(2, size, False, Duration(seconds)) for size, seconds in points.items())
    costs = CostTable(profile([segment(1e-3)], [0], reduce_costs=costs_of))
    for size, seconds in points.items():
        assert costs.reduce_seconds(2, size, between=False) == pytest.approx(seconds)
    largest = max(points)
    beyond = [costs.reduce_seconds(2, largest + more * MB, between=False) for more in (0, 1, 10, 100)]
    assert all(later >= earlier * (1 - 1e-9) for earlier, later in pairwise(beyond))
    ordered = sorted(points.items())
    for (low, first), (high, second) in pairwise(ordered):
        middle = costs.reduce_seconds(2, (low + high) // 2, between=False)
        assert min(first, second) - 1e-12 <= middle <= max(first, second) + 1e-12
    assert costs.reduction_sizes(2, between=False) == sorted(points)


@given(st.integers(2, 64), st.integers(1, 1000))
def test_an_all_reduce_over_any_group_lies_between_its_measured_groups(group: int, megabytes: int) -> None:
    rates = reductions(1e9, between=False, groups=(2, 4, 8, 64))
    costs = CostTable(profile([segment(1e-3)], [0], reduce_costs=rates))
    found = costs.reduce_seconds(group, megabytes * MB, between=False)
    assert costs.reduce_seconds(2, megabytes * MB, between=False) <= found * (1 + 1e-9)
    assert found <= costs.reduce_seconds(64, megabytes * MB, between=False) * (1 + 1e-9)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.data())
def test_ranges_are_differences_of_running_sums(each: list[int], data: st.DataObject) -> None:
    kinds = [segment(n * 1e-3, parameter_bytes=n * MB, working_bytes=n * MB) for n in each]
    costs = CostTable(profile(kinds, range(len(each))))
    sizes = costs.sizes(2)
    first = data.draw(st.integers(0, len(each) - 1))
    stop = data.draw(st.integers(first + 1, len(each)))
    assert sizes.forward[stop] - sizes.forward[first] == pytest.approx(2e-3 * sum(each[first:stop]))
    assert costs.gradient_bytes[stop] - costs.gradient_bytes[first] == MB * sum(each[first:stop])
    assert costs.working_peaks(2)[first][stop - first - 1] == 2 * MB * max(each[first:stop])
    work = costs.work_between(2, [0, first, stop] if first else [0, stop])
    assert sum(work) == pytest.approx(3 * 2e-3 * sum(each[:stop]))


def test_with_fill_in_a_size_that_some_segments_lack_scales_in_proportion() -> None:
    kinds = [segment(1e-3, sizes=(1, 2)), segment(1e-3, sizes=(1, 2, 4))]
    made = profile(kinds, [0, 1])
    assert CostTable(made).microbatch_sizes() == (1, 2)
    costs = CostTable(made, fill_in=True)
    assert costs.microbatch_sizes() == (1, 2, 4)
    costs.start_notes()
    sizes = costs.sizes(4)
    assert sizes.forward[1] == pytest.approx(2 * 2e-3)
    assert sizes.activation_bytes[1] == 2 * 2 * MB
    assert costs.take_notes() == ("micro-batches of 4 are estimated from 2 for some segments",)
    with pytest.raises(PlanError, match="micro-batches of 4 are larger"):
        CostTable(made).sizes(4)


def test_extremes_are_the_smallest_message_of_all_and_the_largest_forward() -> None:
    cuts = tuple(CutCost(Dim(sent * MB, 0), Dim(back * MB, 0)) for sent, back in ((4, 1), (2, 8), (3, 3)))
    costs = CostTable(profile([segment(1e-3)], [0] * 4, cuts=cuts))
    assert costs.extremes(2) == (2 * MB, 8 * MB)
    assert costs.cuts_differ and not CostTable(profile([segment(1e-3)], [0] * 4)).cuts_differ


def test_notes_are_taken_only_between_start_and_take() -> None:
    costs = CostTable(profile([segment(1e-3, sizes=(1, 4))], [0]))
    costs.sizes(2)
    assert costs.take_notes() == ()
    costs.start_notes()
    costs.sizes(2)
    costs.sizes(3)
    assert len(costs.take_notes()) == 2
