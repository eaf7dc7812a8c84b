"""What a layout costs whose stages differ in their number of replicas.

Every stage runs the same micro-batches, each of its replicas an equal part of them
(`varuna.execute.step.division` says which). So one pipeline
stands for all: a stage in it is any one of its replicas.
"""

from collections import Counter
from collections.abc import Sequence
from math import ceil, inf
from typing import NamedTuple

import msgspec

from varuna.plan.cost.bounds import least_seconds
from varuna.plan.cost.costs import Costs, Message
from varuna.plan.cost.memory import Room, keeps, stage_memory
from varuna.plan.cost.simulate import (
    Orders,
    Pipeline,
    Simulation,
    StageTimes,
    Tie,
    Way,
    name_orders,
    simulate,
)
from varuna.plan.cut.place import Ground, lanes
from varuna.types import Forecast, MemoryForecast, Plan, StageForecast, StagePlan

TOTALS_BYTES = 16
COUNTS_BYTES = 8
"""Before each step all ranks tell how many samples they were given."""


class Uneven(NamedTuple):
    """A layout that fits, with its cost; of two, the better has the shorter step."""

    plan: Plan
    forecast: Forecast
    devices: tuple[int, ...]  # of its ranks, counted over the cluster


def forecast_uneven(
    costs: Costs, ground: Ground, plan: Plan, devices: Sequence[int], *, shard_optimizer: bool = False
) -> tuple[Forecast, Simulation]:
    """`devices` are those of its ranks."""
    layout = Layout(costs, ground, plan, devices, shard_optimizer)
    costs.start_notes()
    orders = layout.orders
    simulation = simulate(orders, [layout.pipeline(orders)])
    stages = []
    for stage in range(plan.depth):
        compute, reduce = simulation.compute_seconds(stage), simulation.finishing_seconds(stage)
        ending = simulation.replicas[0].stages[stage].ending_seconds
        waiting = max(0.0, simulation.seconds - compute - reduce - ending)
        stages.append(StageForecast(compute, waiting, reduce, ending, layout.memory(stage)))
    return Forecast(simulation.seconds, tuple(stages), costs.profile.notes + costs.take_notes()), simulation


def fitting(
    costs: Costs,
    ground: Ground,
    plan: Plan,
    devices: Sequence[int],
    *,
    shard_optimizer: bool,
    recompute: bool | None,  # None: where memory asks for it
    headroom: float,  # the share of each device's memory to leave free
    than: float = inf,  # seconds that it must not take
) -> tuple[Plan, Simulation] | None:
    """A plan with recompute as asked for; None where it does not fit, or takes longer."""
    flags = (bool(recompute),) * plan.depth
    layout = Layout(costs, ground, _recomputing(plan, flags), devices, shard_optimizer)
    short = layout.too_full(headroom)
    if short and recompute is None:
        flags = tuple(stage in short for stage in range(plan.depth))
        layout = Layout(costs, ground, _recomputing(plan, flags), devices, shard_optimizer)
        short = layout.too_full(headroom)
    if short:
        return None
    orders = layout.orders
    pipeline = layout.pipeline(orders)
    if least_seconds(orders, pipeline)[0] >= than:
        return None
    simulation = simulate(orders, [pipeline])
    return (layout.plan, simulation) if simulation.seconds < than else None


def _recomputing(plan: Plan, flags: Sequence[bool]) -> Plan:
    stages = tuple(
        StagePlan(stage.first, stage.stop, stage.ranks, flag)
        for stage, flag in zip(plan.stages, flags, strict=True)
    )
    return msgspec.structs.replace(plan, stages=stages)


class Side(NamedTuple):
    """What crosses a cut with a micro-batch, as one replica before or behind it has it."""

    message: Message
    number: int  # one for each replica of the other side that it shares samples with
    crowd: int  # replicas of its stage that share a card with it

    @property
    def sending(self) -> float:
        return self.message.sending * self.number * self.crowd


Sides = tuple[Side, Side]
"""Of the stage before a cut, and of the one behind it."""


class Layout:
    """One plan over the machines of its ranks."""

    def __init__(
        self, costs: Costs, ground: Ground, plan: Plan, devices: Sequence[int], shard_optimizer: bool
    ) -> None:
        self.costs, self.ground, self.plan = costs, ground, plan
        self.homes = [[ground.machine_of[devices[rank]] for rank in stage.ranks] for stage in plan.stages]
        self.shard = shard_optimizer
        self.microbatches = ceil(ceil(plan.batch_size / plan.width) / plan.microbatch_size)

    @property
    def orders(self) -> Orders:
        return name_orders(
            self.plan.schedule,
            stages=self.plan.depth,
            microbatches=self.microbatches,
            recompute=tuple(stage.recompute for stage in self.plan.stages),
        )

    def share(self, stage: int) -> int:
        """The samples of its replica that gets most."""
        return ceil(self.plan.batch_size / self.plan.widths[stage])

    def largest(self, stage: int) -> int:
        return ceil(self.share(stage) / self.microbatches)

    def pipeline(self, orders: Orders) -> Pipeline:
        split = "I" in orders.letters[0]
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
            sharing=tuple(
                max(side.message.sharing for side in (*go, *come))
                for go, come in zip(there, here, strict=True)
            ),
            lanes=lanes([homes[0] for homes in self.homes], self.ground.cluster.machines)
            if any(map(self._spans_machines, range(self.plan.depth)))
            else (),
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

    def too_full(self, headroom: float) -> list[int]:
        """The stages that need more memory than a device of theirs has."""
        machines = self.ground.cluster.machines
        return [
            stage
            for stage, homes in enumerate(self.homes)
            if self.memory(stage).total
            > min(machines[home].memory_bytes for home in set(homes)) * (1 - headroom)
        ]

    def _telling(self) -> float:
        return self._all_ranks_seconds(COUNTS_BYTES)

    def _all_ranks_seconds(self, num_bytes: int) -> float:
        several = len({home for homes in self.homes for home in homes}) > 1
        return self.costs.reduce_seconds(len(self.plan.ranks), num_bytes, between=several)

    def _spans_machines(self, stage: int) -> bool:
        return len(set(self.homes[stage])) > 1

    def _messages(self, cut: int, *, gradients: bool) -> Sides:
        """Over the cut after a stage."""
        crossing = len({*self.homes[cut], *self.homes[cut + 1]}) > 1
        widths = self.plan.widths[cut : cut + 2]
        sides = []
        for stage, own, other in ((cut, *widths), (cut + 1, *reversed(widths))):
            peers = 1 + ceil((other - 1) / own) if own != other else 1
            sizes = self.costs.sizes(self.largest(stage))
            crossed = sizes.returned_bytes if gradients else sizes.sent_bytes
            num_bytes = ceil(crossed[self.plan.stages[cut].stop] / peers)
            message = self.costs.message(num_bytes, between=crossing)
            sides.append(Side(message, peers, self._crowd(stage) if crossing else 1))
        return sides[0], sides[1]

    def _crowd(self, stage: int) -> int:
        machines = self.ground.cluster.machines
        return max(ceil(number / machines[home].cards) for home, number in Counter(self.homes[stage]).items())

    def _instructions(
        self,
        stage: int,
        there: list[Sides],
        here: list[Sides],
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
            message, answer = there[stage - 1][1], here[stage - 1][1]
            with_forward += message.number * message.message.taking
            with_backward += answer.number * answer.message.leaving
        if stage < self.plan.depth - 1:
            message, answer = there[stage][0], here[stage][0]
            with_forward += message.number * message.message.leaving
            with_backward += answer.number * answer.message.taking
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


def _way(sent: Side, taken: Side) -> Way:
    """As slow as the side with more to carry."""
    sending = max(sent.sending, taken.sending)
    latency = max(sent.message.latency, taken.message.latency)
    return Way(sending, sending, latency, 0.0, sent.message.leaving)
