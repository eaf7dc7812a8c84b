"""Cost of a layout whose stages have different numbers of replicas.

All stages run the same micro-batches, and each stage divides every micro-batch equally among its replicas
(see `varuna.execute.step.division`). So one simulated pipeline stands for the whole job: each of its stages
is one replica of that stage.
"""

from collections import Counter
from collections.abc import Container, Sequence
from functools import cached_property
from math import ceil, inf
from typing import NamedTuple

import msgspec

from varuna.plan.cost.bounds import least_seconds
from varuna.plan.cost.costs import CostTable, MessageTimes
from varuna.plan.cost.memory import MemoryTerms, held_counts, stage_memory
from varuna.plan.cost.simulate import (
    LinkTimes,
    Orders,
    PipelineTimes,
    Seconds,
    Simulation,
    StageTimes,
    TiedStages,
    name_orders,
    simulate,
)
from varuna.plan.cut.place import ClusterMap, lanes
from varuna.types import Forecast, MemoryForecast, Plan, StageForecast, StagePlan

TOTALS_BYTES = 16
"""Sums of losses and of weights over all ranks: two numbers in double precision."""
COUNTS_BYTES = 8
"""Number of samples of each rank, exchanged before each step."""


def forecast_uneven(
    costs: CostTable,
    cluster_map: ClusterMap,
    plan: Plan,
    devices: Sequence[int],
    *,
    shard_optimizer: bool = False,
) -> tuple[Forecast, Simulation]:
    """Predict the step of a plan; `devices[rank]` is the device of a rank."""
    layout = UnevenCost(costs, cluster_map, plan, devices, shard_optimizer)
    costs.start_notes()
    simulation = simulate(layout.orders, [layout.pipeline()])
    return to_forecast(costs, simulation, [layout.memory(stage) for stage in range(plan.depth)]), simulation


def to_forecast(costs: CostTable, simulation: Simulation, memories: Sequence[MemoryForecast]) -> Forecast:
    """Return the time of a step and, for each stage, its parts and its memory."""
    stages = []
    for stage, memory in enumerate(memories):
        compute, reduce = simulation.compute_seconds(stage), simulation.finishing_seconds(stage)
        ending = simulation.replicas[0].stages[stage].ending_seconds
        waiting = max(0.0, simulation.seconds - compute - reduce - ending)
        stages.append(StageForecast(compute, waiting, reduce, ending, memory))
    return Forecast(simulation.seconds, tuple(stages), costs.profile.notes + costs.take_notes())


def simulate_if_it_fits(
    costs: CostTable,
    cluster_map: ClusterMap,
    plan: Plan,
    devices: Sequence[int],
    *,
    shard_optimizer: bool,
    recompute: bool | None,  # None: only stages that do not fit without it
    headroom: float,  # share of each device's memory to leave free
    limit: float = inf,  # seconds: a step must be shorter
) -> tuple[Plan, Simulation] | None:
    """Set the recompute flags of a plan and simulate it. None: it does not fit, or is not below the limit."""

    def with_recompute(chosen: Container[int]) -> UnevenCost:
        stages = tuple(
            StagePlan(stage.first, stage.stop, stage.ranks, number in chosen)
            for number, stage in enumerate(plan.stages)
        )
        flagged = msgspec.structs.replace(plan, stages=stages)
        return UnevenCost(costs, cluster_map, flagged, devices, shard_optimizer)

    layout = with_recompute(range(plan.depth) if recompute else ())
    too_large = layout.stages_out_of_memory(headroom)
    if too_large and recompute is None:
        layout = with_recompute(too_large)
        too_large = layout.stages_out_of_memory(headroom)
    if too_large:
        return None
    pipeline = layout.pipeline()
    if least_seconds(layout.orders, pipeline)[0] >= limit:
        return None
    simulation = simulate(layout.orders, [pipeline])
    return (layout.plan, simulation) if simulation.seconds < limit else None


class CutSide(NamedTuple):
    """Messages of one micro-batch that one replica on one side of a cut sends or receives."""

    message: MessageTimes
    number: int  # one for each replica on the other side that shares samples with this one
    card_users: int  # replicas of the stage that share a network card

    @property
    def sending(self) -> float:
        return self.message.sending * self.number * self.card_users


CutSides = tuple[CutSide, CutSide]
"""A replica of the stage before a cut, and one of the stage after it."""


class UnevenCost:
    """Times and memory of one plan on the machines of its ranks."""

    def __init__(
        self,
        costs: CostTable,
        cluster_map: ClusterMap,
        plan: Plan,
        devices: Sequence[int],
        shard_optimizer: bool,
    ) -> None:
        self.costs, self.plan = costs, plan
        self._widths = plan.widths
        self._machines = cluster_map.cluster.machines
        self._machines_of = [
            [cluster_map.machine_of[devices[rank]] for rank in stage.ranks] for stage in plan.stages
        ]
        self._between = [len(set(machines)) > 1 for machines in self._machines_of]
        self._shard = shard_optimizer
        self._microbatches = ceil(ceil(plan.batch_size / plan.width) / plan.microbatch_size)

    @cached_property
    def orders(self) -> Orders:
        return name_orders(
            self.plan.schedule,
            stages=self.plan.depth,
            microbatches=self._microbatches,
            recompute=tuple(stage.recompute for stage in self.plan.stages),
        )

    def pipeline(self) -> PipelineTimes:
        cuts = range(self.plan.depth - 1)
        forward = [self._messages(cut, gradients=False) for cut in cuts]
        backward = [self._messages(cut, gradients=True) for cut in cuts]
        return PipelineTimes(
            tuple(self._stage_times(stage, forward, backward) for stage in range(self.plan.depth)),
            tuple(_link_direction(sender, receiver) for sender, receiver in forward),
            tuple(_link_direction(sender, receiver) for receiver, sender in backward),
            sharing=tuple(
                max(side.message.sharing for side in (*there, *back))
                for there, back in zip(forward, backward, strict=True)
            ),
            lanes=lanes([machines[0] for machines in self._machines_of], self._machines)
            if any(self._between)
            else (),
            ties=self._ties(),
            totals_seconds=self._all_ranks_seconds(TOTALS_BYTES),
            ends_together=self.costs.profile.precision == "fp16",
        )

    def memory(self, stage: int) -> MemoryForecast:
        own = self.plan.stages[stage]
        number = {"stage": stage, "stages": self.plan.depth, "microbatches": self._microbatches}
        kept = held_counts(self.plan.schedule, **number, recompute=own.recompute)
        sizes = self.costs.sizes(self._largest_microbatch(stage))
        terms = MemoryTerms(sizes, self._widths[stage], self._samples(stage), self._shard)
        return stage_memory(self.costs, terms, own.first, own.stop, kept)

    def stages_out_of_memory(self, headroom: float) -> list[int]:
        """Return the stages that need more memory than their smallest device has."""
        return [
            stage
            for stage, machines in enumerate(self._machines_of)
            if self.memory(stage).total
            > min(self._machines[machine].memory_bytes for machine in set(machines)) * (1 - headroom)
        ]

    def _samples(self, stage: int) -> int:
        """Samples per step of the replica that gets most."""
        return ceil(self.plan.batch_size / self._widths[stage])

    def _largest_microbatch(self, stage: int) -> int:
        return ceil(self._samples(stage) / self._microbatches)

    def _stage_times(self, stage: int, forward: list[CutSides], backward: list[CutSides]) -> StageTimes:
        seconds = self._instructions(stage, forward, backward)
        span = self.plan.stages[stage].first, self.plan.stages[stage].stop
        sizes, split = self.costs.sizes(self._largest_microbatch(stage)), "I" in self.orders.letters[0]
        width, between = self._widths[stage], self._between[stage]
        buckets = self.costs.buckets(sizes, *span, group_size=width, between=between, split=split)
        ending = self.costs.ending_seconds(*span, width=width, between=between, shard=self._shard)
        ending += self._all_ranks_seconds(COUNTS_BYTES)
        return StageTimes(seconds, seconds, buckets=buckets, ending_seconds=ending)

    def _instructions(self, stage: int, forward: list[CutSides], backward: list[CutSides]) -> Seconds:
        """Return the mean seconds of each instruction: micro-batches may differ by one sample."""
        smaller, num_larger = divmod(self._samples(stage), self._microbatches)
        few = self._compute(stage, smaller) if num_larger < self._microbatches else (0.0,) * 5
        many = self._compute(stage, smaller + 1) if num_larger else (0.0,) * 5
        share = num_larger / self._microbatches
        overhead = self.costs.profile.overheads.instruction_seconds
        run, again, whole, inputs, weights = (
            overhead + share * m + (1 - share) * f for m, f in zip(many, few, strict=True)
        )
        with_forward = with_backward = 0.0
        if stage:
            activations, gradients = forward[stage - 1][1], backward[stage - 1][1]
            with_forward += activations.number * activations.message.receiver_seconds
            with_backward += gradients.number * gradients.message.sender_seconds
        if stage < self.plan.depth - 1:
            activations, gradients = forward[stage][0], backward[stage][0]
            with_forward += activations.number * activations.message.sender_seconds
            with_backward += gradients.number * gradients.message.receiver_seconds
        return run + with_forward, again, whole + with_backward, inputs + with_backward, weights

    def _compute(self, stage: int, size: int) -> Seconds:
        """Return the compute seconds of a micro-batch, without messages and overheads."""
        if not size:
            return (0.0,) * 5
        own, sizes = self.plan.stages[stage], self.costs.sizes(size)
        speed = min(self._machines[machine].speed for machine in self._machines_of[stage])

        def run(sums: list[float]) -> float:
            return (sums[own.stop] - sums[own.first]) / speed

        entry = sizes.entry_seconds[own.first] / speed
        forward = run(sizes.forward) + entry
        first = run(sizes.forward_only) + entry if own.recompute else forward
        backward = run(sizes.backward)
        inputs, weights = (run(sizes.inputs), run(sizes.weights)) if stage else (backward, 0.0)
        return first, forward, backward, inputs, weights

    def _all_ranks_seconds(self, num_bytes: int) -> float:
        several = len({machine for machines in self._machines_of for machine in machines}) > 1
        return self.costs.reduce_seconds(len(self.plan.ranks), num_bytes, between=several)

    def _messages(self, cut: int, *, gradients: bool) -> CutSides:
        """Return the messages over the cut after stage number `cut`."""
        crossing = len({*self._machines_of[cut], *self._machines_of[cut + 1]}) > 1
        widths = self._widths[cut : cut + 2]
        sides = []
        for stage, own, other in ((cut, *widths), (cut + 1, *reversed(widths))):
            peers = 1 + ceil((other - 1) / own) if own != other else 1
            sizes = self.costs.sizes(self._largest_microbatch(stage))
            crossed = sizes.returned_bytes if gradients else sizes.sent_bytes
            num_bytes = ceil(crossed[self.plan.stages[cut].stop] / peers)
            message = self.costs.message(num_bytes, between=crossing)
            replicas = Counter(self._machines_of[stage]).items()
            users = max(ceil(number / self._machines[machine].cards) for machine, number in replicas)
            sides.append(CutSide(message, peers, users if crossing else 1))
        return sides[0], sides[1]

    def _ties(self) -> tuple[TiedStages, ...]:
        """Return the reductions of tied weights.

        Stages with equal numbers of replicas reduce a tied tensor pair by pair; otherwise all their ranks
        reduce it together.
        """
        found = []
        for tie in self.costs.profile.ties:
            stages = [
                number
                for number, stage in enumerate(self.plan.stages)
                if any(stage.first <= segment < stage.stop for segment in tie.segments)
            ]
            if len(stages) > 1:
                widths = [self._widths[stage] for stage in stages]
                group = len(stages) if len(set(widths)) == 1 else sum(widths)
                several = len({machine for stage in stages for machine in self._machines_of[stage]}) > 1
                seconds = self.costs.reduce_seconds(group, tie.num_bytes, between=several)
                found.append(TiedStages(tuple(stages), seconds))
        return tuple(found)


def _link_direction(sender: CutSide, receiver: CutSide) -> LinkTimes:
    """Return a link that is as slow as the side with more to carry."""
    sending = max(sender.sending, receiver.sending)
    latency = max(sender.message.latency, receiver.message.latency)
    return LinkTimes(sending, sending, latency, 0.0, sender.message.sender_seconds)
