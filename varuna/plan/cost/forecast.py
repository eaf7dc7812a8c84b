"""Predicts step time and memory of a layout: builds its times, simulates it, and describes the result."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from math import ceil, sqrt
from typing import NamedTuple

from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable, MessageTimes, SegmentSums
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
from varuna.plan.cost.uneven import TOTALS_BYTES, forecast_uneven, to_forecast
from varuna.plan.cut.partition import Spans
from varuna.plan.cut.place import ClusterMap, Placement, ReplicaKind
from varuna.types import Cluster, Forecast, MemoryForecast, Plan, Profile, ScheduleName, StagePlan


class CandidateLayout(NamedTuple):
    """A layout with everything that its cost depends on."""

    spans: Spans
    recompute: tuple[bool, ...]
    schedule: ScheduleName
    microbatch_size: int
    batch_size: int
    placement: Placement
    shard_optimizer: bool = False

    @property
    def depth(self) -> int:
        return self.placement.depth

    @property
    def width(self) -> int:
        return self.placement.width

    @property
    def replica_batch(self) -> int:
        """Samples of the replica with the most."""
        return ceil(self.batch_size / self.width)

    @property
    def microbatches(self) -> int:
        return ceil(self.replica_batch / self.microbatch_size)

    @property
    def last_size(self) -> int:
        return self.replica_batch - (self.microbatches - 1) * self.microbatch_size


def forecast_plan(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    *,
    idle: Sequence[int] = (),
    shard_optimizer: bool = False,
    seed: int = 0,
) -> tuple[Forecast, Simulation]:
    """Predict the step of an existing plan.

    Its ranks are the cluster's devices in order, without the `idle` ones. Devices left over are idle too.
    """
    if plan.fingerprint and plan.fingerprint != profile.fingerprint:
        raise PlanError(
            f"the plan is for model {plan.fingerprint}, but the profile is of {profile.fingerprint} "
            "(profile this model, or make a new plan)"
        )
    if plan.precision != profile.precision:
        raise PlanError(
            f"the plan runs in {plan.precision}, but the profile was measured in {profile.precision} "
            "(profile in that precision, or make a new plan)"
        )
    if plan.stages[-1].stop != len(profile.segments):
        raise PlanError(
            f"the plan has {plan.stages[-1].stop} segments, but the profile has {len(profile.segments)} "
            "(profile this model, or make a new plan)"
        )
    cluster_map = ClusterMap(cluster)
    devices = sorted({*range(cluster_map.num_devices)} - {*idle})
    if len(plan.ranks) > len(devices):
        raise PlanError(
            f"the plan has {len(plan.ranks)} ranks, but only {len(devices)} devices are available "
            f"({cluster}, {len(set(idle))} of them idle)"
        )
    costs = CostTable(profile)
    if plan.uneven:
        return forecast_uneven(costs, cluster_map, plan, devices, shard_optimizer=shard_optimizer)
    layout = CandidateLayout(
        tuple((stage.first, stage.stop) for stage in plan.stages),
        tuple(stage.recompute for stage in plan.stages),
        plan.schedule,
        plan.microbatch_size,
        plan.batch_size,
        cluster_map.placement_of([[devices[rank] for rank in stage.ranks] for stage in plan.stages]),
        shard_optimizer,
    )
    costs.start_notes()
    orders = orders_of(layout)
    replicas = pipelines(costs, layout, orders, jitter=bool(seed))
    if seed:  # every replica varies on its own
        replicas = [replicas[index % len(replicas)] for index in range(layout.width)]
    simulation = simulate(orders, replicas, seed=seed)
    return describe(costs, layout, simulation), simulation


def plan_of(layout: CandidateLayout, profile: Profile) -> Plan:
    ranks = layout.placement.ranks()
    return Plan(
        stages=tuple(
            StagePlan(first, stop, ranks[stage], layout.recompute[stage])
            for stage, (first, stop) in enumerate(layout.spans)
        ),
        batch_size=layout.batch_size,
        microbatch_size=layout.microbatch_size,
        schedule=layout.schedule,
        precision=profile.precision,
        fingerprint=profile.fingerprint,
    )


def describe(costs: CostTable, layout: CandidateLayout, simulation: Simulation) -> Forecast:
    """Return the time of a step and, for each stage, its parts and its memory."""
    return to_forecast(costs, simulation, memories(costs, layout))


def memories(costs: CostTable, layout: CandidateLayout) -> list[MemoryForecast]:
    terms = MemoryTerms(
        costs.sizes(min(layout.microbatch_size, layout.replica_batch)),
        layout.width,
        layout.replica_batch,
        layout.shard_optimizer,
    )
    counts = partial(held_counts, layout.schedule, stages=layout.depth, microbatches=layout.microbatches)
    return [
        stage_memory(costs, terms, *span, counts(stage=stage, recompute=recompute))
        for stage, (span, recompute) in enumerate(zip(layout.spans, layout.recompute, strict=True))
    ]


def orders_of(layout: CandidateLayout) -> Orders:
    return name_orders(
        layout.schedule, stages=layout.depth, microbatches=layout.microbatches, recompute=layout.recompute
    )


def pipelines(
    costs: CostTable, layout: CandidateLayout, orders: Orders, *, jitter: bool = False
) -> list[PipelineTimes]:
    """Return the times of each kind of replica."""
    last = costs.sizes(layout.last_size)
    sizes = costs.sizes(layout.microbatch_size) if layout.microbatches > 1 else last
    placement = layout.placement
    several = any(placement.between) or any(any(kind.crossing) for kind in placement.kinds)
    totals = costs.reduce_seconds(layout.depth * layout.width, TOTALS_BYTES, between=several)
    split = "I" in orders.letters[0]
    width, shard = layout.width, layout.shard_optimizer
    endings = []
    for (first, stop), between in zip(layout.spans, placement.between, strict=True):
        buckets = costs.buckets(last, first, stop, group_size=width, between=between, split=split)
        ending = costs.ending_seconds(first, stop, width=width, between=between, shard=shard)
        endings.append((buckets, ending))
    found = []
    for kind in placement.kinds:
        sent, returned = _messages(costs, layout, kind, sizes, last)
        links = list(zip(sent, returned, strict=True))
        each = _instructions(costs, layout, kind, orders, sizes, [(go[0], come[0]) for go, come in links])
        once = each
        if last is not sizes:
            once = _instructions(costs, layout, kind, orders, last, [(go[1], come[1]) for go, come in links])
        spreads = [_spreads(sizes, *span) if jitter else (0.0,) * 5 for span in layout.spans]
        found.append(
            PipelineTimes(
                tuple(
                    map(StageTimes._make, zip(each, once, spreads, *zip(*endings, strict=True), strict=True))
                ),
                tuple([messages[2] for messages in sent]),
                tuple([messages[2] for messages in returned]),
                tuple([max(go[0].sharing, come[0].sharing) for go, come in links]),
                placement.lanes if any(placement.between) else (),
                _ties(costs, layout, kind),
                totals,
                costs.profile.precision == "fp16",  # all ranks check for overflow before any optimizer steps
            )
        )
    return found


CutMessages = tuple[MessageTimes, MessageTimes, LinkTimes]
"""Over one cut in one direction: of every micro-batch but the last, of the last, and both as LinkTimes."""


def _messages(
    costs: CostTable, layout: CandidateLayout, kind: ReplicaKind, sizes: SegmentSums, last: SegmentSums
) -> tuple[list[CutMessages], list[CutMessages]]:
    """Return the messages over each cut, forward and backward. Equal cuts are computed once."""
    seen: dict[tuple[int, int, bool, int], CutMessages] = {}

    def look_up(num_bytes: list[int], last_bytes: list[int]) -> list[CutMessages]:
        found = []
        for (_, cut), crossing, per_card in zip(
            layout.spans, kind.crossing, layout.placement.messages_per_card, strict=False
        ):
            key = (num_bytes[cut], last_bytes[cut], crossing, per_card)
            if key not in seen:
                message = costs.message(num_bytes[cut], between=crossing)
                final = costs.message(last_bytes[cut], between=crossing)
                sending, last_sending = message.sending * per_card, final.sending * per_card
                sender = min(message.sender_seconds, final.sender_seconds)
                times = LinkTimes(sending, last_sending, message.latency, message.spread, sender)
                seen[key] = message, final, times
            found.append(seen[key])
        return found

    return look_up(sizes.sent_bytes, last.sent_bytes), look_up(sizes.returned_bytes, last.returned_bytes)


def _instructions(
    costs: CostTable,
    layout: CandidateLayout,
    kind: ReplicaKind,
    orders: Orders,
    sizes: SegmentSums,
    links: list[tuple[MessageTimes, MessageTimes]],  # forward and backward, after each stage but the last
) -> list[Seconds]:
    """Return the seconds of F, R, B, I, W of each stage, with the time spent on messages."""
    overhead = costs.profile.overheads.instruction_seconds
    found = []
    for stage, ((first, stop), speed, letters) in enumerate(
        zip(layout.spans, kind.speeds, orders.letters, strict=True)
    ):
        forward = (sizes.forward[stop] - sizes.forward[first]) / speed
        backward = (sizes.backward[stop] - sizes.backward[first]) / speed
        inputs = (sizes.inputs[stop] - sizes.inputs[first]) / speed
        weights = (sizes.weights[stop] - sizes.weights[first]) / speed
        if not stage:  # no stage waits for input gradients: part I does the whole backward
            inputs, weights = backward, 0.0
        run = (sizes.forward_only[stop] - sizes.forward_only[first]) / speed if "R" in letters else forward
        entry = sizes.entry_seconds[first] / speed
        with_forward = overhead + entry
        with_backward = overhead
        if stage:
            sent, returned = links[stage - 1]
            with_forward += sent.receiver_seconds
            with_backward += returned.sender_seconds
        if stage < len(links):
            sent, returned = links[stage]
            with_forward += sent.sender_seconds
            with_backward += returned.receiver_seconds
        again = forward + overhead + entry
        both = backward + with_backward
        found.append((run + with_forward, again, both, inputs + with_backward, weights + overhead))
    return found


def _spreads(sizes: SegmentSums, first: int, stop: int) -> Seconds:
    forward, _, backward, inputs, weights = (sqrt(max(0.0, v[stop] - v[first])) for v in sizes.variances)
    return forward, forward, backward, inputs, weights


def _ties(costs: CostTable, layout: CandidateLayout, kind: ReplicaKind) -> tuple[TiedStages, ...]:
    stops = [stop for _, stop in layout.spans]
    found = []
    for tie in costs.profile.ties:
        stages = sorted({bisect_right(stops, segment) for segment in tie.segments})
        if len(stages) > 1:
            between = any(kind.crossing[stages[0] : stages[-1]])
            seconds = costs.reduce_seconds(len(stages), tie.num_bytes, between=between)
            found.append(TiedStages(tuple(stages), seconds))
    return tuple(found)
