"""Cuts a model for a layout with given depth, width, micro-batch size, schedule and devices."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import ceil, inf
from typing import Literal, NamedTuple

from varuna.plan.cost.costs import CostTable, SegmentSums
from varuna.plan.cost.memory import HeldCounts, MemoryTotals, held_counts
from varuna.plan.cut.partition import Spans, all_cuts, cut_for_least, cut_within
from varuna.types import ScheduleName

RecomputeMode = Literal["never", "where needed", "everywhere"]
"""The stages that recompute their forwards."""


class Cut(NamedTuple):
    spans: Spans
    recompute: tuple[bool, ...]


class StageWork:
    """Running sums over segments of the work for one micro-batch."""

    def __init__(self, costs: CostTable, sizes: SegmentSums, *, split: bool) -> None:
        parts = (sizes.inputs, sizes.weights) if split else (sizes.backward,)
        self.split = split
        self.segments = costs.num_segments
        self.overhead = costs.profile.overheads.instruction_seconds * (3 if split else 2)
        self.forward = sizes.forward
        self.whole = {
            False: _add(sizes.forward, *parts),
            True: _add(sizes.forward_only, sizes.forward, *parts),
        }
        # The work that other stages wait for.
        self.chain = _add(sizes.forward, sizes.inputs if split else sizes.backward)
        # The first stage runs its backward in one part.
        self.first = {False: _add(sizes.forward, sizes.backward), True: self.whole[True]}


class TimeLimits:
    """The furthest that each stage of a layout reaches within a time budget for the step."""

    def __init__(
        self,
        work: StageWork,
        *,
        microbatches: float,  # the last may be smaller
        speeds: tuple[float, ...],
        sending: Sequence[Sequence[float]] = (),  # by stage and cut after it; empty if all are equal
    ) -> None:
        self.work, self.segments = work, work.segments
        self.microbatches, self.speeds, self.sending = microbatches, speeds, sending
        self._fastest_speed = max(speeds)
        self._fastest: dict[bool, Spans] = {}

    @property
    def most(self) -> float:
        """A budget that every cut meets."""
        slowest = self.work.whole[True][-1] / min(self.speeds) + self.work.overhead
        return slowest * (self.microbatches + 1) * 1.01

    @property
    def least(self) -> float:
        return self.work.whole[False][-1] / sum(self.speeds) * self.microbatches * 0.999

    def reach(self, stage: int, first: int, budget: float, recompute: bool) -> int:
        """Return the furthest stop with which the budget covers the stages before, this stage, and back.

        See `bounds.least_seconds`. Weight parts can be deferred, so no other stage waits for them.
        """
        work, speed, microbatches = self.work, self.speeds[stage], self.microbatches
        whole, chain = (work.whole if stage else work.first)[recompute], work.chain
        left = (budget - chain[first] / self._fastest_speed) / microbatches - work.overhead
        if work.split:
            alone = budget / microbatches - work.overhead
            stop = min(
                bisect_right(chain, chain[first] + left * speed) - 1,
                bisect_right(whole, whole[first] + alone * speed) - 1,
            )
        else:
            stop = bisect_right(whole, whole[first] + left * speed) - 1
        if stage < len(self.sending):  # skip cuts that cannot send all micro-batches within the budget
            sending = self.sending[stage]
            while first < stop < self.segments and sending[stop] * microbatches > budget:
                stop -= 1
        return stop

    def done_within(self, budget: float, stage: int, first: int, stop: int, recompute: bool) -> bool:
        return self.reach(stage, first, budget, recompute) >= stop

    def possible(self, budget: float, recompute: bool) -> bool:
        """Return whether a cut meets the budget, without regard to memory."""
        return budget == inf or self._cut(budget, recompute) is not None

    def fastest(self, recompute: bool) -> Spans:
        """Return the fastest cut, without regard to memory."""
        if recompute not in self._fastest:
            spans = cut_for_least(self.least, self.most, lambda budget: self._cut(budget, recompute))
            assert spans is not None, "a budget for the whole model on each device has a cut"
            self._fastest[recompute] = spans
        return self._fastest[recompute]

    def _cut(self, budget: float, recompute: bool) -> Spans | None:
        return cut_within(
            segments=self.segments,
            stages=len(self.speeds),
            reach=lambda stage, first: self.reach(stage, first, budget, recompute),
        )


class Cutter:
    """Finds fast cuts that fit the memory of each stage's device."""

    def __init__(
        self,
        limits: TimeLimits,
        totals: MemoryTotals,
        *,
        schedule: ScheduleName,
        mode: RecomputeMode,
        memory_bytes: tuple[int, ...],  # by stage
        every: bool,  # yield all cuts, not only the one with the smallest bound
    ) -> None:
        self.limits, self.totals, self._every = limits, totals, every
        self.depth, self.memory_bytes = len(memory_bytes), memory_bytes
        self._choices = {"never": (False,), "where needed": (False, True), "everywhere": (True,)}[mode]
        self._furthest: dict[tuple[int, int, bool], int] = {}
        self._held_counts = _held_counts(schedule, self.depth, ceil(limits.microbatches))

    def cuts(self, worth: float) -> Iterator[Cut]:
        """Yield all cuts that fit, or the one with the smallest bound, if that is below `worth`."""
        every = all_cuts(self.limits.segments, self.depth)
        for spans in every if self._every else self._fastest(worth):
            recompute = self.recompute(spans)
            if recompute is not None:
                yield Cut(spans, recompute)

    def recompute(self, spans: Spans) -> tuple[bool, ...] | None:
        """Return which stages recompute; None if one does not fit its device even with recompute."""
        flags = []
        for stage, span in enumerate(spans):
            flag = next((flag for flag in self._choices if self.fits(stage, *span, flag)), None)
            if flag is None:
                return None
            flags.append(flag)
        return tuple(flags)

    def need(self, stage: int, first: int, stop: int, recompute: bool) -> float:
        """Return the memory of a stage in bytes."""
        return self.totals.total(first, stop, self._held_counts[stage][recompute])

    def fits(self, stage: int, first: int, stop: int, recompute: bool) -> bool:
        return self.need(stage, first, stop, recompute) <= self.memory_bytes[stage]

    def possible(self, budget: float) -> bool:
        """Return whether a cut fits memory and (unless `every`) the budget."""
        if self._every:
            return any(map(self.recompute, all_cuts(self.limits.segments, self.depth)))
        return self._cut(min(budget, self.limits.most)) is not None

    def _fastest(self, worth: float) -> list[Spans]:
        first_choice = self._choices[0]
        spans = self.limits.fastest(first_choice)
        if all(self.fits(stage, *span, first_choice) for stage, span in enumerate(spans)):
            return [spans]
        found = cut_for_least(self.limits.least, min(self.limits.most, worth), self._cut)
        return [] if found is None else [found]

    def _cut(self, budget: float) -> Spans | None:
        return cut_within(
            segments=self.limits.segments,
            stages=self.depth,
            reach=lambda stage, first: self._reach(stage, first, budget),
        )

    def _reach(self, stage: int, first: int, budget: float) -> int:
        furthest = first
        for recompute in self._choices:
            stop = min(self.limits.reach(stage, first, budget, recompute), self.limits.segments)
            if stop > furthest:
                furthest = max(furthest, self._fitting_stop(stage, first, stop, recompute))
        return furthest

    def _fitting_stop(self, stage: int, first: int, stop: int, recompute: bool) -> int:
        """Return the furthest stop, up to `stop`, with which the stage fits its device."""
        if self.fits(stage, first, stop, recompute):
            return stop
        key = (stage, first, recompute)
        if key not in self._furthest:
            ends = range(first + 1, self.limits.segments + 1)
            self._furthest[key] = first + bisect_left(
                ends, True, key=lambda end: not self.fits(stage, first, end, recompute)
            )
        return min(self._furthest[key], stop - 1)

    def least_need(self) -> tuple[float, int]:
        """Return (bytes, stage) of the fullest device, in the cut that fills it least."""
        recompute = self._choices[-1]
        segments = self.limits.segments

        def cut(budget: float) -> Spans | None:
            def reach(stage: int, first: int) -> int:
                bound = budget * self.memory_bytes[stage]
                return first + bisect_left(
                    range(first + 1, segments + 1),
                    True,
                    key=lambda stop: self.need(stage, first, stop, recompute) > bound,
                )

            return cut_within(segments=segments, stages=self.depth, reach=reach)

        whole = max(self.need(stage, 0, segments, recompute) for stage in (0, self.depth - 1))
        # Messages over a cut may need more memory than the whole model: then only infinity is enough.
        spans = cut_for_least(0.0, 2 * whole / min(self.memory_bytes), cut) or cut(inf)
        assert spans is not None, "an infinite budget has a cut"
        totals = [self.need(stage, *span, recompute) for stage, span in enumerate(spans)]
        worst = max(range(self.depth), key=lambda stage: totals[stage] / self.memory_bytes[stage])
        return totals[worst], worst


@lru_cache(maxsize=4096)
def _held_counts(
    schedule: ScheduleName, stages: int, microbatches: int
) -> tuple[tuple[HeldCounts, HeldCounts], ...]:
    """Return the counts by stage, without and with recompute."""
    one = partial(held_counts, schedule, stages=stages, microbatches=microbatches)
    return tuple((one(stage=s, recompute=False), one(stage=s, recompute=True)) for s in range(stages))


def _add(*sums: list[float]) -> list[float]:
    return [sum(values) for values in zip(*sums, strict=True)]
