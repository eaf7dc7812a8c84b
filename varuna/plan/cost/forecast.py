"""What a layout will cost: its times for the simulator, its memory, and both as a Forecast."""

from collections.abc import Sequence
from math import ceil, sqrt
from typing import NamedTuple

from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs, Message, Sizes
from varuna.plan.cost.memory import Room, keeps, stage_memory
from varuna.plan.cost.simulate import (
    Orders,
    PipelineTimes,
    Simulation,
    StageTimes,
    TiedStages,
    LinkTimes,
    name_orders,
    simulate,
)
from varuna.plan.cost.uneven import TOTALS_BYTES, forecast_uneven
from varuna.plan.cut.place import Ground, Placement, ReplicaKind
from varuna.types import (
    Cluster,
    Forecast,
    MemoryForecast,
    Plan,
    Profile,
    ScheduleName,
    StageForecast,
    StagePlan,
)

Spans = tuple[tuple[int, int], ...]


class Draft(NamedTuple):
    """A layout with all that its cost depends on."""

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
        """Of the replica that gets most."""
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
    """What a plan that somebody has made will cost.

    Its ranks are the cluster's devices in order, without the `idle` ones; what is left over is idle too.
    """
    if plan.fingerprint and plan.fingerprint != profile.fingerprint:
        raise PlanError(
            f"the plan is for the model {plan.fingerprint}, the profile of {profile.fingerprint} "
            "(profile this model, or plan anew)"
        )
    if plan.precision != profile.precision:
        raise PlanError(
            f"the plan runs in {plan.precision}, the profile was measured in {profile.precision} "
            "(profile in that precision, or plan anew)"
        )
    if plan.stages[-1].stop != len(profile.segments):
        raise PlanError(
            f"the plan's stages hold {plan.stages[-1].stop} segments, the profile {len(profile.segments)}"
        )
    ground = Ground(cluster)
    left_out = set(idle)
    devices = [device for device in range(ground.num_devices) if device not in left_out]
    if len(plan.ranks) > len(devices):
        raise PlanError(
            f"the plan has {len(plan.ranks)} ranks, the cluster {len(devices)} devices for them "
            f"({cluster}, {len(left_out)} of them to be idle)"
        )
    costs = Costs(profile)
    if plan.uneven:
        return forecast_uneven(costs, ground, plan, devices, shard_optimizer=shard_optimizer)
    draft = Draft(
        tuple((stage.first, stage.stop) for stage in plan.stages),
        tuple(stage.recompute for stage in plan.stages),
        plan.schedule,
        plan.microbatch_size,
        plan.batch_size,
        ground.look_at([[devices[rank] for rank in stage.ranks] for stage in plan.stages]),
        shard_optimizer,
    )
    costs.start_notes()
    orders = orders_of(draft)
    replicas = pipelines(costs, draft, orders, jitter=bool(seed))
    if seed:  # then no two are alike
        replicas = [replicas[index % len(replicas)] for index in range(draft.width)]
    simulation = simulate(orders, replicas, seed=seed)
    return describe(costs, draft, simulation), simulation


def plan_of(draft: Draft, profile: Profile) -> Plan:
    ranks = draft.placement.ranks()
    return Plan(
        stages=tuple(
            StagePlan(first, stop, ranks[stage], draft.recompute[stage])
            for stage, (first, stop) in enumerate(draft.spans)
        ),
        batch_size=draft.batch_size,
        microbatch_size=draft.microbatch_size,
        schedule=draft.schedule,
        precision=profile.precision,
        fingerprint=profile.fingerprint,
    )


def describe(costs: Costs, draft: Draft, simulation: Simulation) -> Forecast:
    """Where the time of a step goes, stage by stage, and its memory."""
    seconds = simulation.seconds
    stages = []
    for stage, memory in enumerate(memories(costs, draft)):
        compute = simulation.compute_seconds(stage)
        reduce = simulation.finishing_seconds(stage)
        ending = simulation.replicas[0].stages[stage].ending_seconds
        waiting = max(0.0, seconds - compute - reduce - ending)
        stages.append(StageForecast(compute, waiting, reduce, ending, memory))
    return Forecast(seconds, tuple(stages), costs.profile.notes + costs.take_notes())


def memories(costs: Costs, draft: Draft) -> list[MemoryForecast]:
    room = Room(
        costs.sizes(min(draft.microbatch_size, draft.replica_batch)),
        draft.width,
        draft.replica_batch,
        draft.shard_optimizer,
    )
    found = []
    for stage, (first, stop) in enumerate(draft.spans):
        kept = keeps(
            draft.schedule,
            stage=stage,
            stages=draft.depth,
            microbatches=draft.microbatches,
            recompute=draft.recompute[stage],
        )
        found.append(stage_memory(costs, room, first, stop, kept))
    return found


def orders_of(draft: Draft) -> Orders:
    return name_orders(
        draft.schedule, stages=draft.depth, microbatches=draft.microbatches, recompute=draft.recompute
    )


def pipelines(costs: Costs, draft: Draft, orders: Orders, *, jitter: bool = False) -> list[PipelineTimes]:
    """The times of each kind of replica."""
    last = costs.sizes(draft.last_size)
    sizes = costs.sizes(draft.microbatch_size) if draft.microbatches > 1 else last
    placement = draft.placement
    several = any(placement.between) or any(any(kind.crossing) for kind in placement.kinds)
    totals = costs.reduce_seconds(draft.depth * draft.width, TOTALS_BYTES, between=several)
    split = "I" in orders.letters[0]
    width, shard = draft.width, draft.shard_optimizer
    endings = []
    for (first, stop), between in zip(draft.spans, placement.between, strict=True):
        buckets = costs.buckets(last, first, stop, group_size=width, between=between, split=split)
        ending = costs.ending_seconds(first, stop, width=width, between=between, shard=shard)
        endings.append((buckets, ending))
    found = []
    for kind in placement.kinds:
        there, here = _messages(costs, draft, kind, sizes, last)
        each = _instructions(costs, draft, kind, orders, sizes, [m[0] for m in there], [m[0] for m in here])
        once = each
        if last is not sizes:
            once = _instructions(
                costs, draft, kind, orders, last, [m[1] for m in there], [m[1] for m in here]
            )
        spreads = [_spreads(sizes, *span) if jitter else (0.0,) * 5 for span in draft.spans]
        found.append(
            PipelineTimes(
                tuple(
                    map(StageTimes._make, zip(each, once, spreads, *zip(*endings, strict=True), strict=True))
                ),
                tuple([messages[2] for messages in there]),
                tuple([messages[2] for messages in here]),
                tuple([max(go[0].sharing, come[0].sharing) for go, come in zip(there, here, strict=True)]),
                placement.lanes if any(placement.between) else (),
                _ties(costs, draft, kind),
                totals,
                costs.profile.precision == "fp16",  # an overflow is looked for before any optimizer steps
            )
        )
    return found


Messages = tuple[Message, Message, LinkTimes]
"""Over one cut in one direction: of every micro-batch but the last, of the last, and both on their way."""


def _messages(
    costs: Costs, draft: Draft, kind: ReplicaKind, sizes: Sizes, last: Sizes
) -> tuple[list[Messages], list[Messages]]:
    """Over each cut, with forwards and with backwards. Most cuts are alike, and looked at once."""
    seen: dict[tuple[int, int, bool, int], Messages] = {}

    def look(num_bytes: list[int], last_bytes: list[int]) -> list[Messages]:
        found = []
        for (_, cut), crossing, crowd in zip(
            draft.spans, kind.crossing, draft.placement.crowding, strict=False
        ):
            key = (num_bytes[cut], last_bytes[cut], crossing, crowd)
            if key not in seen:
                seen[key] = _over_a_cut(costs, *key)
            found.append(seen[key])
        return found

    return look(sizes.sent_bytes, last.sent_bytes), look(sizes.returned_bytes, last.returned_bytes)


def _over_a_cut(costs: Costs, num_bytes: int, last_bytes: int, crossing: bool, crowd: int) -> Messages:
    message = costs.message(num_bytes, between=crossing)
    once = costs.message(last_bytes, between=crossing)
    way = LinkTimes(
        message.sending * crowd,
        once.sending * crowd,
        message.latency,
        message.spread,
        min(message.leaving, once.leaving),
    )
    return message, once, way


Seconds = tuple[float, float, float, float, float]


def _instructions(
    costs: Costs,
    draft: Draft,
    kind: ReplicaKind,
    orders: Orders,
    sizes: Sizes,
    there: list[Message],
    here: list[Message],
) -> list[Seconds]:
    """Of each stage the seconds of F, R, B, I, W, what is spent on messages included."""
    overhead = costs.profile.overheads.instruction_seconds
    found = []
    for stage, ((first, stop), speed, letters) in enumerate(
        zip(draft.spans, kind.speeds, orders.letters, strict=True)
    ):
        forward = (sizes.forward[stop] - sizes.forward[first]) / speed
        backward = (sizes.backward[stop] - sizes.backward[first]) / speed
        inputs = (sizes.inputs[stop] - sizes.inputs[first]) / speed
        weights = (sizes.weights[stop] - sizes.weights[first]) / speed
        if not stage:  # nobody waits for the gradients of the model's own inputs: part I does all
            inputs, weights = backward, 0.0
        run = forward
        if "R" in letters:
            run = (sizes.forward_only[stop] - sizes.forward_only[first]) / speed
        entry = sizes.entry_seconds[first] / speed
        with_forward = overhead + entry
        with_backward = overhead
        if stage:
            with_forward += there[stage - 1].taking
            with_backward += here[stage - 1].leaving
        if stage < len(there):
            with_forward += there[stage].leaving
            with_backward += here[stage].taking
        found.append(
            (
                run + with_forward,
                forward + overhead + entry,
                backward + with_backward,
                inputs + with_backward,
                weights + overhead,
            )
        )
    return found


def _spreads(sizes: Sizes, first: int, stop: int) -> Seconds:
    forward, _, backward, inputs, weights = (sqrt(max(0.0, v[stop] - v[first])) for v in sizes.variances)
    return forward, forward, backward, inputs, weights


def _ties(costs: Costs, draft: Draft, kind: ReplicaKind) -> tuple[TiedStages, ...]:
    found = []
    for tie in costs.profile.ties:
        stages = sorted({_stage_of(segment, draft.spans) for segment in tie.segments})
        if len(stages) > 1:
            between = any(kind.crossing[stages[0] : stages[-1]])
            found.append(
                TiedStages(tuple(stages), costs.reduce_seconds(len(stages), tie.num_bytes, between=between))
            )
    return tuple(found)


def _stage_of(segment: int, spans: Spans) -> int:
    return next(stage for stage, (_, stop) in enumerate(spans) if segment < stop)
