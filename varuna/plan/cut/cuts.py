"""Where to cut a model for a layout whose depth, width, micro-batch, schedule and places are given."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil, inf
from typing import Literal, NamedTuple

from varuna.plan.cost.costs import Costs, Sizes
from varuna.plan.cost.memory import Kept, Needs, keeps
from varuna.plan.cut.partition import Spans, all_cuts, cut_for_least, cut_within
from varuna.types import ScheduleName

Mode = Literal["never", "where needed", "everywhere"]
"""Which stages recompute their forwards."""


class Cut(NamedTuple):
    spans: Spans
    recompute: tuple[bool, ...]


class Work:
    """Running sums of what a stage does for a micro-batch, wherever the cuts are made."""

    def __init__(self, costs: Costs, sizes: Sizes, *, split: bool) -> None:
        parts = (sizes.inputs, sizes.weights) if split else (sizes.backward,)
        self.split = split
        self.segments = costs.num_segments
        self.overhead = costs.profile.overheads.instruction_seconds * (3 if split else 2)
        self.forward = sizes.forward
        self.whole = {
            False: _add(sizes.forward, *parts),
            True: _add(sizes.forward_only, sizes.forward, *parts),
        }
        # As much of it as the stages around wait for.
        self.chain = _add(sizes.forward, sizes.inputs if split else sizes.backward)
        # The first stage does all of its backward at once.
        self.first = {False: _add(sizes.forward, sizes.backward), True: self.whole[True]}


class Tempo:
    """How fast the stages of a layout are."""

    def __init__(
        self,
        work: Work,
        *,
        microbatches: float,  # the last may be smaller
        speeds: tuple[float, ...],
        sending: Sequence[Sequence[float]] = (),  # by stage and cut after it; none where all are alike
    ) -> None:
        self.work = work
        self.segments = work.segments
        self.microbatches = microbatches
        self.speeds = speeds
        self.sending = sending
        self._fastest_speed = max(speeds)
        self._fastest: dict[bool, Spans] = {}

    @property
    def most(self) -> float:
        """A budget in which any cut is done."""
        slowest = self.work.whole[True][-1] / min(self.speeds) + self.work.overhead
        return slowest * (self.microbatches + 1) * 1.01

    @property
    def least(self) -> float:
        return self.work.whole[False][-1] / sum(self.speeds) * self.microbatches * 0.999

    def reach(self, stage: int, first: int, budget: float, recompute: bool) -> int:
        """How far a stage gets within a budget for down to it, all its work, and up again.

        See `bounds.least_seconds`. Weight parts can be put off: no way leads through them.
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
        if stage < len(
            self.sending
        ):  # rather less than over a cut that could not carry all micro-batches in that time
            sending = self.sending[stage]
            while first < stop < self.segments and sending[stop] * microbatches > budget:
                stop -= 1
        return stop

    def done_within(self, budget: float, stage: int, first: int, stop: int, recompute: bool) -> bool:
        return self.reach(stage, first, budget, recompute) >= stop

    def possible(self, budget: float, recompute: bool) -> bool:
        """Whether there is a cut within a budget, were there memory enough."""
        return budget == inf or self._cut(budget, recompute) is not None

    def fastest(self, recompute: bool) -> Spans:
        """Where memory is no matter."""
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
    """Cuts for speed, within the memory of each stage's device."""

    def __init__(
        self,
        tempo: Tempo,
        needs: Needs,
        *,
        schedule: ScheduleName,
        mode: Mode,
        memory_bytes: tuple[int, ...],  # by stage
        every: bool,  # all cuts, rather than the one that is best as far as a bound tells
    ) -> None:
        self.tempo = tempo
        self._every = every
        self.needs = needs
        self.depth = len(memory_bytes)
        self.memory_bytes = memory_bytes
        self._choices = {"never": (False,), "where needed": (False, True), "everywhere": (True,)}[mode]
        self._room: dict[tuple[int, int, bool], int] = {}
        self._kept = _kept(schedule, self.depth, ceil(tempo.microbatches))

    def cuts(self, worth: float) -> Iterator[Cut]:
        """All that fit; or the one with the smallest bound, if that is small enough."""
        every = all_cuts(self.tempo.segments, self.depth)
        for spans in every if self._every else self._fastest(worth):
            recompute = self.recompute(spans)
            if recompute is not None:
                yield Cut(spans, recompute)

    def recompute(self, spans: Spans) -> tuple[bool, ...] | None:
        """Which stages recompute; None where one does not fit its device either way."""
        flags = []
        for stage, (first, stop) in enumerate(spans):
            for flag in self._choices:
                if self.fits(stage, first, stop, flag):
                    flags.append(flag)
                    break
            else:
                return None
        return tuple(flags)

    def need(self, stage: int, first: int, stop: int, recompute: bool) -> float:
        """In bytes."""
        return self.needs.total(first, stop, self._kept[stage][recompute])

    def fits(self, stage: int, first: int, stop: int, recompute: bool) -> bool:
        return self.need(stage, first, stop, recompute) <= self.memory_bytes[stage]

    def possible(self, budget: float) -> bool:
        """Whether there is a cut that fits; within a budget, where not all are looked at."""
        if self._every:
            return any(map(self.recompute, all_cuts(self.tempo.segments, self.depth)))
        return self._cut(min(budget, self.tempo.most)) is not None

    def _fastest(self, worth: float) -> list[Spans]:
        first_choice = self._choices[0]
        spans = self.tempo.fastest(first_choice)
        if all(self.fits(stage, *span, first_choice) for stage, span in enumerate(spans)):
            return [spans]
        found = cut_for_least(self.tempo.least, min(self.tempo.most, worth), self._cut)
        return [] if found is None else [found]

    def _cut(self, budget: float) -> Spans | None:
        return cut_within(
            segments=self.tempo.segments,
            stages=self.depth,
            reach=lambda stage, first: self._reach(stage, first, budget),
        )

    def _reach(self, stage: int, first: int, budget: float) -> int:
        furthest = first
        for recompute in self._choices:
            stop = min(self.tempo.reach(stage, first, budget, recompute), self.tempo.segments)
            if stop > furthest:
                furthest = max(furthest, self._room_for(stage, first, stop, recompute))
        return furthest

    def _room_for(self, stage: int, first: int, stop: int, recompute: bool) -> int:
        """The furthest stop up to which the stage fits its device."""
        if self.fits(stage, first, stop, recompute):
            return stop
        key = (stage, first, recompute)
        if key not in self._room:
            ends = range(first + 1, self.tempo.segments + 1)
            self._room[key] = first + bisect_left(
                ends, True, key=lambda end: not self.fits(stage, first, end, recompute)
            )
        return min(self._room[key], stop - 1)

    def least_need(self) -> tuple[float, int]:
        """(bytes, stage): of the cut whose fullest device is fullest by least, what that one needs."""
        recompute = self._choices[-1]
        segments = self.tempo.segments

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
        spans = cut_for_least(0.0, 2 * whole / min(self.memory_bytes), cut)
        assert spans is not None, "a budget for the whole model on one device has a cut"
        needs = [self.need(stage, *span, recompute) for stage, span in enumerate(spans)]
        worst = max(range(self.depth), key=lambda stage: needs[stage] / self.memory_bytes[stage])
        return needs[worst], worst


@lru_cache(maxsize=4096)
def _kept(schedule: ScheduleName, stages: int, microbatches: int) -> tuple[tuple[Kept, Kept], ...]:
    """By stage, without and with recompute."""

    def one(stage: int, recompute: bool) -> Kept:
        return keeps(schedule, stage=stage, stages=stages, microbatches=microbatches, recompute=recompute)

    return tuple((one(stage, False), one(stage, True)) for stage in range(stages))


def _add(*sums: list[float]) -> list[float]:
    return [sum(values) for values in zip(*sums, strict=True)]
