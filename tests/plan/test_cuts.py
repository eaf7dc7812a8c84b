"""Cuts for speed and memory, against trying every cut."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plan.profiles import MB, profile, segment
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.memory import MemoryTerms, MemoryTotals, held_counts, stage_memory
from varuna.plan.cut.cuts import Cutter, RecomputeMode, StageWork, TimeLimits
from varuna.plan.cut.partition import (
    Spans,
    adjacent_cuts,
    all_cuts,
    balance,
    balance_over,
    cut_for_least,
    cut_within,
    uniform_cuts,
)

works = st.lists(st.integers(1, 20), min_size=1, max_size=8)


# ---------------------------------------------------------------- a row of numbers


def largest(costs: list[int], spans: Spans, widths: list[int] | None = None) -> float:
    shares = widths or [1] * len(spans)
    return max(sum(costs[first:stop]) / share for (first, stop), share in zip(spans, shares, strict=True))


@given(works, st.integers(1, 8))
def test_all_cuts_are_all_and_each_is_a_partition(costs: list[int], stages: int) -> None:
    found = list(all_cuts(len(costs), stages))
    assert len(found) == len(set(found))
    for spans in found:
        assert len(spans) == stages and spans[0][0] == 0 and spans[-1][1] == len(costs)
        assert all(first < stop for first, stop in spans)
        assert all(left[1] == right[0] for left, right in pairwise(spans))
    if stages == 2:
        assert len(found) == len(costs) - 1


@given(works, st.data())
def test_balanced_stages_have_the_smallest_largest_cost(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    best = min(largest(costs, spans) for spans in all_cuts(len(costs), stages))
    assert largest(costs, balance(costs, stages=stages)) == best


@given(works, st.data())
def test_few_bytes_cross_balanced_cuts_within_the_slack(costs: list[int], data: st.DataObject) -> None:
    """Among cuts with a largest stage within 5 % of the smallest possible, it sends the fewest bytes."""
    stages = data.draw(st.integers(1, len(costs)))
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(costs), max_size=len(costs)))
    good = 1.05 * min(largest(costs, spans) for spans in all_cuts(len(costs), stages))

    def crosses(spans: Spans) -> int:
        return sum(crossing[first - 1] for first, _ in spans[1:])

    found = balance(costs, stages=stages, crossing=crossing)
    assert largest(costs, found) <= good + 1e-9
    allowed = [spans for spans in all_cuts(len(costs), stages) if largest(costs, spans) <= good]
    assert crosses(found) == min(map(crosses, allowed))


@given(works, st.data())
def test_stages_with_replicas_are_balanced_by_their_work_per_replica(
    costs: list[int], data: st.DataObject
) -> None:
    widths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=len(costs)))
    best = min(largest(costs, spans, widths) for spans in all_cuts(len(costs), len(widths)))
    assert largest(costs, balance_over(costs, widths), widths) == pytest.approx(best)


def test_more_stages_than_segments_cannot_be_balanced() -> None:
    with pytest.raises(ValueError, match="3 pipeline stages requested, but the model has 1 cuts"):
        balance_over([1.0, 1.0], [1, 2, 1])


@given(works, st.data())
def test_a_cut_within_a_budget_is_found_exactly_if_there_is_one(
    costs: list[int], data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    budget = data.draw(st.integers(1, sum(costs)))

    def reach(_: int, first: int) -> int:
        stop = first
        while stop < len(costs) and sum(costs[first : stop + 1]) <= budget:
            stop += 1
        return stop

    found = cut_within(segments=len(costs), stages=stages, reach=reach)
    possible = any(largest(costs, spans) <= budget for spans in all_cuts(len(costs), stages))
    assert (found is not None) == possible
    assert found is None or largest(costs, found) <= budget


@given(works, st.data())
def test_the_smallest_budget_is_found_to_its_precision(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def cut(budget: float) -> Spans | None:
        good = [spans for spans in all_cuts(len(costs), stages) if largest(costs, spans) <= budget]
        return min(good, key=lambda spans: largest(costs, spans)) if good else None

    found = cut_for_least(0.0, float(sum(costs)), cut, precision=1e-3)
    best = min(largest(costs, spans) for spans in all_cuts(len(costs), stages))
    assert found is not None and largest(costs, found) == best
    assert cut_for_least(0.0, best / 2, cut) is None or best == 0


@given(works, st.data())
def test_uniform_cuts_have_equal_counts_or_equal_work(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    by_count, *by_work = uniform_cuts([float(cost) for cost in costs], stages)
    lengths = [stop - first for first, stop in by_count]
    assert max(lengths) - min(lengths) <= 1
    best = min(largest(costs, spans) for spans in all_cuts(len(costs), stages))
    assert largest(costs, (by_work or [by_count])[0]) == pytest.approx(best, rel=1e-5)


@given(st.integers(2, 8), st.data())
def test_adjacent_cuts_move_one_cut_by_one_step(segments: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, segments))
    spans = data.draw(st.sampled_from(list(all_cuts(segments, stages))))
    step = data.draw(st.integers(1, 3))
    bounds = range(segments + 1)
    expected = {
        other
        for other in all_cuts(segments, stages)
        if sum(a != b for (a, _), (b, _) in zip(spans, other, strict=True)) == 1
        and sum(abs(a - b) for (a, _), (b, _) in zip(spans, other, strict=True)) == step
    }
    assert set(adjacent_cuts(spans, bounds, step)) == expected


# ---------------------------------------------------------------- with a profile


class Case:
    """Segments with random times and memory, on stages with random speeds and memory."""

    def __init__(self, draw: st.DrawFn) -> None:
        count = draw(st.integers(1, 6))
        kinds = [
            segment(
                draw(st.integers(1, 9)) * 1e-3,
                sizes=(1, 2),
                parameter_bytes=draw(st.integers(1, 8)) * MB,
                activation_bytes=draw(st.integers(0, 8)) * MB,
            )
            for _ in range(count)
        ]
        self.costs = CostTable(profile(kinds, range(count), cut_bytes=MB))
        self.sizes = self.costs.sizes(1)
        self.depth = draw(st.integers(1, count))
        self.microbatches = draw(st.integers(1, 6))
        self.schedule = draw(st.sampled_from(["gpipe", "1f1b", "varuna", "zero-bubble"]))
        self.split = self.schedule == "zero-bubble"
        speeds = draw(st.tuples(*[st.sampled_from([0.5, 1.0])] * self.depth))
        self.limits = TimeLimits(
            StageWork(self.costs, self.sizes, split=self.split),
            microbatches=self.microbatches,
            speeds=speeds,
        )
        self.terms = MemoryTerms(self.sizes, draw(st.sampled_from([1, 4])), 8, draw(st.booleans()))
        self.memory = draw(st.tuples(*[st.integers(10, 200).map(lambda n: n * MB)] * self.depth))

    def cutter(self, mode: RecomputeMode, *, every: bool = False) -> Cutter:
        return Cutter(
            self.limits,
            MemoryTotals(self.costs, self.terms),
            schedule=self.schedule,  # type: ignore[arg-type]
            mode=mode,
            memory_bytes=self.memory,
            every=every,
        )

    def need(self, stage: int, first: int, stop: int, recompute: bool) -> int:
        counts = held_counts(
            self.schedule, stage=stage, stages=self.depth, microbatches=self.microbatches, recompute=recompute
        )
        return stage_memory(self.costs, self.terms, first, stop, counts).total

    def fits(self, spans: Spans, recompute: bool) -> list[bool]:
        return [self.need(s, *span, recompute) <= self.memory[s] for s, span in enumerate(spans)]

    def all_cuts(self) -> list[Spans]:
        return list(all_cuts(self.costs.num_segments, self.depth))


cases = st.composite(Case)()


@given(cases)
def test_of_every_cut_those_are_yielded_that_fit_with_recompute_only_where_needed(case: Case) -> None:
    found = {cut.spans: cut.recompute for cut in case.cutter("where needed", every=True).cuts(inf)}
    expected = {}
    for spans in case.all_cuts():
        plain, recomputed = case.fits(spans, False), case.fits(spans, True)
        if all(a or b for a, b in zip(plain, recomputed, strict=True)):
            expected[spans] = tuple(not fits for fits in plain)
    assert found == expected
    assert case.cutter("where needed", every=True).possible(inf) == bool(expected)


@given(cases, st.sampled_from(["never", "everywhere"]))
def test_a_mode_decides_for_all_stages(case: Case, mode: RecomputeMode) -> None:
    flag = mode == "everywhere"
    found = {cut.spans: cut.recompute for cut in case.cutter(mode, every=True).cuts(inf)}
    assert found == {spans: (flag,) * case.depth for spans in case.all_cuts() if all(case.fits(spans, flag))}


@given(cases)
def test_the_chosen_cut_fits_and_none_has_a_clearly_smaller_bound_where_all_fit(case: Case) -> None:
    """Within the precision of the budget, 0.2 %. With unequal speeds or memory the search is greedy."""
    cutter = case.cutter("never")
    (*found,) = cutter.cuts(inf)
    fitting = [spans for spans in case.all_cuts() if all(case.fits(spans, False))]
    if not found:
        return  # where a shorter stage needs more memory, the greedy cut may miss one that fits
    (cut,) = found
    assert cut.spans in fitting

    def least_budget(spans: Spans) -> float:
        low, high = 0.0, case.limits.most
        for _ in range(60):
            middle = (low + high) / 2
            done = all(case.limits.done_within(middle, s, *span, False) for s, span in enumerate(spans))
            low, high = (low, middle) if done else (middle, high)
        return high

    if len(set(case.limits.speeds)) == 1 and len(fitting) == len(case.all_cuts()):
        assert least_budget(cut.spans) <= min(map(least_budget, fitting)) * 1.005


@given(cases)
def test_the_fastest_cut_has_the_smallest_budget_of_all(case: Case) -> None:
    """Every cut meets the largest budget, and none a budget below the least."""
    limits = case.limits

    def done(budget: float, spans: Spans) -> bool:
        return all(limits.done_within(budget, s, *span, False) for s, span in enumerate(spans))

    fastest = limits.fastest(False)
    assert all(done(limits.most, spans) for spans in case.all_cuts())
    assert not any(done(limits.least * 0.99, spans) for spans in case.all_cuts())
    for budget in (limits.least, 1.1 * limits.least, 1.5 * limits.least, 2 * limits.least, limits.most):
        possible = any(done(budget, spans) for spans in case.all_cuts())
        found = limits.possible(budget, False)
        if len(set(limits.speeds)) == 1:
            assert found == possible
            assert not possible or done(budget * 1.005, fastest)
        assert possible or not found


@given(cases)
def test_the_least_need_is_that_of_the_cut_which_fills_its_fullest_device_least(case: Case) -> None:
    need, stage = case.cutter("never").least_need()
    fullest = min(
        max(case.need(s, *span, False) / case.memory[s] for s, span in enumerate(spans))
        for spans in case.all_cuts()
    )
    assert need / case.memory[stage] >= fullest * (1 - 1e-9)
