"""Layouts whose stages differ in their number of replicas: what they cost, and whether one is the fastest.

Every stage runs the same micro-batches, each of its replicas an equal part of them (`varuna.execute.division`
says which). So one pipeline stands for all: a stage in it is any one of its replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import ceil, comb
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.costs import Costs, Message
from varuna.plan.memory import Room, keeps, stage_memory
from varuna.plan.partition import Spans, all_cuts, balance_over, neighbours
from varuna.plan.place import Ground
from varuna.plan.simulate import Pipeline, Simulation, StageTimes, Tie, Way, name_orders, simulate
from varuna.plan.stages import Share, Table
from varuna.types import (
    Forecast,
    MemoryForecast,
    Plan,
    ScheduleName,
    StageForecast,
    StageMap,
    StagePlan,
)

MOST_STAGES_LOOKED_AT = 300_000
"""Spans of segments with devices, over all numbers of micro-batches: two seconds' worth."""
FEW_CUTS = 600
"""Where a model can be cut for a map in up to so many ways, every one is looked at."""
MOST_FOLLOWED_UP = 4
"""Of the layouts for one number of micro-batches, so many are costed in full."""
TOTALS_BYTES = 16
COUNTS_BYTES = 8
"""Before each step all ranks tell how many samples they were given."""


class Uneven(NamedTuple):
    """A layout with its cost; of two, the better has the shorter step."""

    plan: Plan
    forecast: Forecast
    devices: tuple[int, ...]  # of its ranks, counted over the cluster


def forecast_uneven(
    costs: Costs, ground: Ground, plan: Plan, devices: Sequence[int], *, shard_optimizer: bool = False
) -> tuple[Forecast, Simulation]:
    """`devices` are those of its ranks."""
    homes = [[ground.machine_of[devices[rank]] for rank in stage.ranks] for stage in plan.stages]
    layout = _Layout(costs, ground, plan, homes, shard_optimizer)
    costs.start_notes()
    orders = name_orders(
        plan.schedule,
        stages=plan.depth,
        microbatches=layout.microbatches,
        recompute=tuple(stage.recompute for stage in plan.stages),
    )
    simulation = simulate(orders, [layout.pipeline(split="I" in orders.letters[0])])
    stages = []
    for stage in range(plan.depth):
        compute, reduce = simulation.compute_seconds(stage), simulation.finishing_seconds(stage)
        ending = simulation.replicas[0].stages[stage].ending_seconds
        waiting = max(0.0, simulation.seconds - compute - reduce - ending)
        stages.append(StageForecast(compute, waiting, reduce, ending, layout.memory(stage)))
    return Forecast(simulation.seconds, tuple(stages), costs.profile.notes + costs.take_notes()), simulation


class _Layout:
    """One plan over the machines of its ranks."""

    def __init__(
        self, costs: Costs, ground: Ground, plan: Plan, homes: list[list[int]], shard_optimizer: bool
    ) -> None:
        self.costs, self.ground, self.plan, self.homes = costs, ground, plan, homes
        self.shard = shard_optimizer
        self.microbatches = ceil(ceil(plan.batch_size / plan.width) / plan.microbatch_size)

    def share(self, stage: int) -> int:
        """The samples of its replica that gets most."""
        return ceil(self.plan.batch_size / self.plan.widths[stage])

    def largest(self, stage: int) -> int:
        return ceil(self.share(stage) / self.microbatches)

    def pipeline(self, *, split: bool) -> Pipeline:
        cuts = range(self.plan.depth - 1)
        there = [self._messages(cut, gradients=False) for cut in cuts]
        here = [self._messages(cut, gradients=True) for cut in cuts]
        stages = []
        for stage, own in enumerate(self.plan.stages):
            seconds = self._instructions(stage, there, here)
            last = self.costs.sizes(self.largest(stage))
            width, between = self.plan.widths[stage], self._spans_machines(stage)
            buckets = self.costs.buckets(
                last, own.first, own.stop, group_size=width, between=between, split=split
            )
            ending = self.costs.ending_seconds(
                own.first, own.stop, width=width, between=between, shard=self.shard
            )
            stages.append(
                StageTimes(seconds, seconds, buckets=tuple(buckets), ending_seconds=ending + self._telling())
            )
        return Pipeline(
            tuple(stages),
            tuple(_way(sent, taken) for sent, taken in there),
            tuple(_way(sent, taken) for taken, sent in here),
            ties=self._ties(),
            totals_seconds=self._all_ranks_seconds(TOTALS_BYTES),
            ends_together=self.costs.profile.precision == "fp16",
        )

    def memory(self, stage: int) -> MemoryForecast:
        own = self.plan.stages[stage]
        kept = keeps(
            self.plan.schedule,
            stage=stage,
            stages=self.plan.depth,
            microbatches=self.microbatches,
            recompute=own.recompute,
        )
        sizes = self.costs.sizes(self.largest(stage))
        room = Room(sizes, self.plan.widths[stage], self.share(stage), self.shard)
        return stage_memory(self.costs, room, own.first, own.stop, kept)

    def _telling(self) -> float:
        return self._all_ranks_seconds(COUNTS_BYTES)

    def _all_ranks_seconds(self, num_bytes: int) -> float:
        several = len({home for homes in self.homes for home in homes}) > 1
        return self.costs.reduce_seconds(len(self.plan.ranks), num_bytes, between=several)

    def _spans_machines(self, stage: int) -> bool:
        return len(set(self.homes[stage])) > 1

    def _messages(self, cut: int, *, gradients: bool) -> tuple[tuple[Message, int], tuple[Message, int]]:
        """Over the cut after a stage: a message as each side has it, and how many it has of a micro-batch."""
        crossing = len({*self.homes[cut], *self.homes[cut + 1]}) > 1
        widths = self.plan.widths[cut : cut + 2]
        sides = []
        for stage, own, other in ((cut, *widths), (cut + 1, *reversed(widths))):
            peers = 1 + ceil((other - 1) / own) if own != other else 1
            sizes = self.costs.sizes(self.largest(stage))
            crossed = sizes.returned_bytes if gradients else sizes.sent_bytes
            num_bytes = ceil(crossed[self.plan.stages[cut].stop] / peers)
            sides.append((self.costs.message(num_bytes, between=crossing), peers))
        return sides[0], sides[1]

    def _instructions(
        self,
        stage: int,
        there: list[tuple[tuple[Message, int], tuple[Message, int]]],
        here: list[tuple[tuple[Message, int], tuple[Message, int]]],
    ) -> tuple[float, float, float, float, float]:
        """Seconds of F, R, B, I, W. Parts are of two sizes that differ by one sample: their mean."""
        smaller, larger = divmod(self.share(stage), self.microbatches)
        few = self._alone(stage, smaller) if larger < self.microbatches else (0.0,) * 5
        many = self._alone(stage, smaller + 1) if larger else (0.0,) * 5
        part = larger / self.microbatches
        overhead = self.costs.profile.overheads.instruction_seconds
        forward, again, backward, inputs, weights = (
            overhead + part * m + (1 - part) * f for m, f in zip(many, few, strict=True)
        )
        with_forward = with_backward = 0.0
        if stage:
            (message, number), (answer, _) = there[stage - 1][1], here[stage - 1][1]
            with_forward += number * message.taking
            with_backward += number * answer.leaving
        if stage < self.plan.depth - 1:
            (message, number), (answer, _) = there[stage][0], here[stage][0]
            with_forward += number * message.leaving
            with_backward += number * answer.taking
        return (
            forward + with_forward,
            again,
            backward + with_backward,
            inputs + with_backward,
            weights,
        )

    def _alone(self, stage: int, size: int) -> tuple[float, float, float, float, float]:
        if not size:
            return (0.0,) * 5
        own, sizes = self.plan.stages[stage], self.costs.sizes(size)
        speed = min(self.ground.cluster.machines[home].speed for home in self.homes[stage])

        def run(sums: list[float]) -> float:
            return (sums[own.stop] - sums[own.first]) / speed

        entry = sizes.entry_seconds[own.first] / speed
        forward = run(sizes.forward) + entry
        first = run(sizes.forward_only) + entry if own.recompute else forward
        backward = run(sizes.backward)
        inputs, weights = (run(sizes.inputs), run(sizes.weights)) if stage else (backward, 0.0)
        return first, forward, backward, inputs, weights

    def _ties(self) -> tuple[Tie, ...]:
        """All ranks of stages that share a tensor sum it, where not every one has as many."""
        found = []
        for tie in self.costs.profile.ties:
            stages = [
                number
                for number, stage in enumerate(self.plan.stages)
                if any(stage.first <= segment < stage.stop for segment in tie.segments)
            ]
            if len(stages) > 1:
                widths = [self.plan.widths[stage] for stage in stages]
                group = len(stages) if len(set(widths)) == 1 else sum(widths)
                several = len({home for stage in stages for home in self.homes[stage]}) > 1
                seconds = self.costs.reduce_seconds(group, tie.num_bytes, between=several)
                found.append(Tie(tuple(stages), seconds))
        return tuple(found)


def _way(sent: tuple[Message, int], taken: tuple[Message, int]) -> Way:
    """As slow as the side with more to carry."""
    sending = max(message.sending * number for message, number in (sent, taken))
    return Way(sending, sending, max(sent[0].latency, taken[0].latency), 0.0, sent[0].leaving)


# ---------------------------------------------------------------- the best of them


def best_uneven(
    costs: Costs,
    ground: Ground,
    *,
    batch_size: int,
    depths: Sequence[int],
    schedules: Sequence[ScheduleName],
    shard_optimizer: bool,
    headroom: float,
) -> Uneven | None:
    """The fastest that fits; None where there is none, or too many to look at."""
    numbers = [2**i for i in range(7) if 2**i <= batch_size]
    segments, devices = costs.num_segments, ground.num_devices
    each = min(segments, devices, max(depths)) * segments**2 * devices**2 // 4
    if devices < 3 or max(depths) < 2 or each * len(numbers) > MOST_STAGES_LOOKED_AT:
        return None
    best: Uneven | None = None
    for number in numbers:
        for shares in _promising(Table(costs, ground, batch_size, number), depths):
            for found in _costed(costs, ground, shares, batch_size, number, schedules, shard_optimizer):
                if not _too_full(found, ground, headroom, found.devices) and (
                    best is None or found.forecast.seconds < best.forecast.seconds
                ):
                    best = found
    return best


def cut_uneven(
    costs: Costs,
    ground: Ground,
    stage_map: StageMap,
    *,
    batch_size: int,
    microbatch_size: int,
    schedule: ScheduleName,
    recompute: bool | None,  # None: where memory asks for it
    shard_optimizer: bool,
    headroom: float,
) -> Uneven:
    """The fastest way to cut a model for a map that is given."""
    devices = tuple(rank for ranks in stage_map for rank in ranks)

    def costed(spans: Spans) -> Uneven | None:
        flags = [bool(recompute)] * len(spans)
        while True:
            stages = (
                StagePlan(first, stop, ranks, flag)
                for (first, stop), ranks, flag in zip(spans, stage_map, flags, strict=True)
            )
            profile = costs.profile
            plan = Plan(
                tuple(stages), batch_size, microbatch_size, schedule, profile.precision, profile.fingerprint
            )
            forecast, _ = forecast_uneven(
                costs, ground, plan, range(ground.num_devices), shard_optimizer=shard_optimizer
            )
            found = Uneven(plan, forecast, devices)
            short = _too_full(found, ground, headroom, range(ground.num_devices))
            if not short:
                return found
            if recompute is not None or all(flags[stage] for stage in short):
                return None
            flags = [flag or stage in short for stage, flag in enumerate(flags)]

    number, depth = costs.num_segments, len(stage_map)
    if depth <= number and comb(number - 1, depth - 1) <= FEW_CUTS:
        found = [way for spans in all_cuts(number, depth) if (way := costed(spans)) is not None]
    else:
        sizes = costs.sizes(microbatch_size)
        work = [
            f1 - f0 + b1 - b0
            for (f0, f1), (b0, b1) in zip(pairwise(sizes.forward), pairwise(sizes.backward), strict=True)
        ]
        start = costed(balance_over(work, [len(ranks) for ranks in stage_map]))
        found = [] if start is None else [_improved(start, costed)]
    if not found:
        raise PlanError(
            f"no cut of the model into {depth} stages fits with {microbatch_size} samples at once "
            "(a smaller micro-batch, more replicas, or more stages)"
        )
    return min(found, key=lambda way: way.forecast.seconds)


def _improved(best: Uneven, costed: Callable[[Spans], Uneven | None]) -> Uneven:
    """Moves one segment over one cut for as long as that helps."""
    while True:
        spans = tuple((stage.first, stage.stop) for stage in best.plan.stages)
        ways = [way for moved in neighbours(spans) if (way := costed(moved)) is not None]
        better = min(ways, key=lambda way: way.forecast.seconds, default=best)
        if better.forecast.seconds >= best.forecast.seconds:
            return best
        best = better


def _promising(table: Table, depths: Sequence[int]) -> list[tuple[Share, ...]]:
    if not table.sensible:
        return []
    every = table.all_layouts() if table.has_few else table.best_layouts()
    uneven = [
        shares for shares in every if len(shares) in depths and len({share.devices for share in shares}) > 1
    ]
    return sorted(uneven, key=lambda shares: (table.least(shares), shares))[:MOST_FOLLOWED_UP]


def _costed(
    costs: Costs,
    ground: Ground,
    shares: tuple[Share, ...],
    batch_size: int,
    microbatches: int,
    schedules: Sequence[ScheduleName],
    shard_optimizer: bool,
) -> Iterator[Uneven]:
    plan = Table(costs, ground, batch_size, microbatches).plan(shares)
    devices = plan.ranks
    first = devices[0]
    stages = tuple(
        msgspec.structs.replace(stage, ranks=tuple(rank - first for rank in stage.ranks))
        for stage in plan.stages
    )
    for schedule in schedules:
        changed = msgspec.structs.replace(plan, stages=stages, schedule=schedule)
        try:
            forecast, _ = forecast_uneven(costs, ground, changed, devices, shard_optimizer=shard_optimizer)
        except PlanError:  # a size that was not measured
            continue
        yield Uneven(changed, forecast, devices)


def _too_full(found: Uneven, ground: Ground, headroom: float, devices: Sequence[int]) -> list[int]:
    """The stages that need more memory than a device of theirs has."""
    machines = ground.cluster.machines
    return [
        number
        for number, (stage, forecast) in enumerate(zip(found.plan.stages, found.forecast.stages, strict=True))
        if forecast.memory.total
        > min(machines[ground.machine_of[devices[rank]]].memory_bytes for rank in stage.ranks)
        * (1 - headroom)
    ]
