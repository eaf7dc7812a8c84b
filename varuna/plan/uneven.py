"""Layouts whose stages differ in their number of replicas: what they cost, and whether one is the fastest.

Every stage runs the same micro-batches, each of its replicas an equal part of them (`varuna.execute.division`
says which). So one pipeline stands for all: a stage in it is any one of its replicas.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from math import ceil, comb, inf
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.costs import Costs, Message
from varuna.plan.memory import Room, keeps, stage_memory
from varuna.plan.partition import Spans, all_cuts, balance_over, neighbours
from varuna.plan.place import Ground
from varuna.plan.simulate import Pipeline, Simulation, StageTimes, Tie, Way, name_orders, simulate
from varuna.plan.stages import Share, Table, Terms
from varuna.types import (
    Forecast,
    MemoryForecast,
    Plan,
    ScheduleName,
    StageForecast,
    StageMap,
    StagePlan,
)
from varuna.units import count

MOST_STAGES_LOOKED_AT = 300_000
"""Spans of segments with devices, over all numbers of micro-batches: some two seconds' worth."""
FEW_CUTS = 600
"""Where a model can be cut for a map in up to so many ways, every one is looked at."""
MOST_FOLLOWED_UP = 600
"""So many layouts are costed in full at most, those with the smallest bound first."""
MOST_SPREAD = 8
"""Layouts of up to so many stages with about equally many replicas are moved to where they are fastest."""
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
    terms: Terms,
    microbatches: Sequence[int] | None = None,  # numbers of them; None: powers of two
    than: float = inf,  # seconds that it must not take
    starts: Sequence[Plan] | None = None,  # where cuts are too many, some are looked at; these are moved too
) -> Uneven | None:
    """The fastest that fits; None where there is none, or too many to look at."""
    asked = microbatches or [2**i for i in range(7) if 2**i <= batch_size]
    # Four of 5 samples are three: of 2, 2 and 1.
    numbers = sorted({ceil(batch_size / ceil(batch_size / number)) for number in asked})
    cuts = _all_cuts(costs, terms)
    if ground.num_devices < 3 or max(depths, default=0) < 2 or not cuts:
        return None
    most = _most_cuts(ground.num_devices, depths, len(numbers))
    looks = [terms._replace(cuts=cuts)]
    if len(cuts) > most:
        looks = []
        for unit in sorted({1, _machine_size(ground)}) if starts is not None and most else ():
            several = _most_cuts(ground.num_devices // unit, depths, len(numbers))
            looks.append(terms._replace(cuts=_some_cuts(costs, cuts, several), unit=unit))
    best: Uneven | None = None
    for look in looks:
        candidates = []
        for number in numbers:
            table = Table(costs, ground, batch_size, number, look)
            bounds = _Bounds(costs, ground, batch_size, number)
            candidates += [
                (bounds.least(shares), number, shares, table) for shares in _uneven_layouts(table, depths)
            ]
        candidates.sort(key=lambda candidate: candidate[:3])
        for least, _, shares, table in candidates[:MOST_FOLLOWED_UP]:
            if least >= than:
                break
            for found in _costed(costs, ground, table.plan(shares), schedules, shard_optimizer, terms):
                if found.forecast.seconds < than:
                    best, than = found, found.forecast.seconds
    if len(cuts) <= most or not looks:
        return best
    allowed = numbers if microbatches else range(1, batch_size + 1)
    climber = _Climber(costs, ground, batch_size, allowed, schedules, shard_optimizer, terms)
    plans = (*(starts or ()), *([best.plan] if best is not None else ()))
    for spot in (*map(climber.spot_of, plans), *climber.spread(depths)):
        moved = climber.climb(spot)
        if moved is not None and moved.plan.uneven and moved.forecast.seconds < than:
            best, than = moved, moved.forecast.seconds
    return best


class Spot(NamedTuple):
    """Where a climb is: a plan on the last devices, stage after stage."""

    spans: Spans
    widths: tuple[int, ...]
    microbatches: int
    schedule: ScheduleName


class _Climber:
    """Moves a segment over a cut, devices to a stage, the number of micro-batches, while that helps."""

    def __init__(
        self,
        costs: Costs,
        ground: Ground,
        batch_size: int,
        numbers: Sequence[int],  # of micro-batches
        schedules: Sequence[ScheduleName],
        shard_optimizer: bool,
        terms: Terms,
    ) -> None:
        self.costs, self.ground, self.batch_size = costs, ground, batch_size
        self.numbers, self.schedules = numbers, schedules
        self.shard, self.terms = shard_optimizer, terms
        self._bounds = [0, *_all_cuts(costs, terms), costs.num_segments]
        self._work = _work(costs, 1, self._bounds)

    def spot_of(self, plan: Plan) -> Spot:
        spans = tuple((stage.first, stage.stop) for stage in plan.stages)
        microbatches = ceil(ceil(self.batch_size / plan.width) / plan.microbatch_size)
        return Spot(spans, plan.widths, microbatches, plan.schedule)

    def spread(self, depths: Sequence[int]) -> Iterator[Spot]:
        """All devices over few stages, about equally many for each, with as much work as they can do."""
        for depth in depths:
            if 2 <= depth <= min(MOST_SPREAD, self.ground.num_devices, len(self._work)):
                few, more = divmod(self.ground.num_devices, depth)
                widths = tuple(few + (stage < more) for stage in range(depth))
                number = min(self.numbers, key=lambda number: abs(number - 4 * depth))
                yield Spot(self._balanced(widths), widths, number, self.schedules[0])

    def climb(self, start: Spot) -> Uneven | None:
        best = self._cost(start)
        looks = 0
        while best is not None:
            for spot in self._near(best):
                looks += 1
                found = self._cost(spot)
                if found is not None and found.forecast.seconds < best.forecast.seconds:
                    best = found
                    break
            else:
                return best
            if looks > MOST_FOLLOWED_UP:
                return best
        return None

    def _near(self, found: Uneven) -> Iterator[Spot]:
        plan, spot = found.plan, self.spot_of(found.plan)
        busy = [stage.compute_seconds + stage.reduce_seconds for stage in found.forecast.stages]
        by_work = sorted(range(plan.depth), key=busy.__getitem__)
        spare: list[int | None] = [None] if sum(plan.widths) < self.ground.num_devices else []
        takers, givers = by_work[-3:], [*spare, *by_work[:3]]
        # Where a device is much of a stage, cuts have to move with it; and machines are better kept whole.
        few = plan.depth <= 3
        for taker, giver, number in product(reversed(takers), givers, (1, 2) if few else (1,)):
            if widths := self._moved(plan.widths, giver, taker, number):
                yield spot._replace(widths=widths)
                if few:
                    yield spot._replace(widths=widths, spans=self._balanced(widths))
        for step in (4, 2, 1):
            for moved in neighbours(spot.spans, step):
                yield spot._replace(spans=moved)
        now = spot.microbatches
        for other in (2 * now, now // 2, now + 1, now - 1):
            if other in self.numbers:
                yield spot._replace(microbatches=other)
        for schedule in self.schedules:
            if schedule != spot.schedule:
                yield spot._replace(schedule=schedule)

    def _moved(
        self, widths: Sequence[int], giver: int | None, taker: int, number: int
    ) -> tuple[int, ...] | None:
        """None as the giver: devices that are idle."""
        if giver == taker:
            return None
        moved = list(widths)
        moved[taker] += number
        if giver is not None:
            moved[giver] -= number
        return tuple(moved) if min(moved) >= 1 and sum(moved) <= self.ground.num_devices else None

    def _balanced(self, widths: Sequence[int]) -> Spans:
        return tuple((self._bounds[a], self._bounds[b]) for a, b in balance_over(self._work, widths))

    def _cost(self, spot: Spot) -> Uneven | None:
        first = self.ground.num_devices - sum(spot.widths)
        if not all(start in self._bounds for start, _ in spot.spans) or (
            first and self.terms.leaves_none_idle
        ):
            return None
        stages, rank = [], 0
        for (start, stop), width in zip(spot.spans, spot.widths, strict=True):
            stages.append(
                StagePlan(start, stop, tuple(range(rank, rank + width)), bool(self.terms.recompute))
            )
            rank += width
        plan = Plan(
            tuple(stages),
            self.batch_size,
            ceil(ceil(self.batch_size / min(spot.widths)) / spot.microbatches),
            spot.schedule,
            self.costs.profile.precision,
            self.costs.profile.fingerprint,
        )
        devices = range(first, first + rank)
        try:
            return _fitting(self.costs, self.ground, plan, devices, self.shard, self.terms)
        except PlanError:  # a size that was not measured
            return None


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
    cuts: Sequence[int] | None = None,  # the segments with which a stage may begin; None: any
) -> Uneven:
    """The fastest way to cut a model for a map that is given."""
    profile = costs.profile
    stages = tuple(StagePlan(0, costs.num_segments, ranks) for ranks in stage_map)
    plan = Plan(stages, batch_size, microbatch_size, schedule, profile.precision, profile.fingerprint)
    terms = Terms(schedule, recompute, headroom, cuts)
    costed = _costing(costs, ground, plan, range(ground.num_devices), shard_optimizer, terms)
    number, depth = costs.num_segments, len(stage_map)
    bounds = [0, *_all_cuts(costs, terms), number]
    if len(bounds) <= depth <= number:
        raise PlanError(
            f"{depth} stages that differ in their replicas need {count(depth - 1, 'cut')}, but only "
            f"{len(bounds) - 2} of the model's can be parted by sample (give all stages as many replicas, or "
            "ask for fewer stages)"
        )
    if depth <= number and comb(number - 1, depth - 1) <= FEW_CUTS:
        found = [way for spans in all_cuts(number, depth) if (way := costed(spans)) is not None]
    else:
        spans = balance_over(_work(costs, microbatch_size, bounds), [len(ranks) for ranks in stage_map])
        start = costed(tuple((bounds[first], bounds[stop]) for first, stop in spans))
        found = [] if start is None else [_improved(start, costed)]
    if not found:
        raise PlanError(
            f"no cut of the model into {depth} stages fits with {microbatch_size} samples at once "
            "(a smaller micro-batch, more replicas, or more stages)"
        )
    return min(found, key=lambda way: way.forecast.seconds)


def _work(costs: Costs, size: int, bounds: Sequence[int]) -> list[float]:
    """Seconds of forward and backward from each bound to the next."""
    sizes = costs.sizes(size)
    return [
        sizes.forward[stop] - sizes.forward[first] + sizes.backward[stop] - sizes.backward[first]
        for first, stop in pairwise(bounds)
    ]


def _improved(best: Uneven, costed: Callable[[Spans], Uneven | None]) -> Uneven:
    """Moves one segment over one cut for as long as that helps."""
    while True:
        spans = tuple((stage.first, stage.stop) for stage in best.plan.stages)
        ways = [way for moved in neighbours(spans) if (way := costed(moved)) is not None]
        better = min(ways, key=lambda way: way.forecast.seconds, default=best)
        if better.forecast.seconds >= best.forecast.seconds:
            return best
        best = better


def _all_cuts(costs: Costs, terms: Terms) -> Sequence[int]:
    return range(1, costs.num_segments) if terms.cuts is None else terms.cuts


def _most_cuts(devices: int, depths: Sequence[int], num_tables: int) -> int:
    """So many there is time to look at: each stage may begin and end at any, with any number of devices."""
    most = 0
    while (
        min(devices, max(depths, default=0), most + 2) * (most + 2) ** 2 * devices**2 // 4 * num_tables
        <= MOST_STAGES_LOOKED_AT
    ):
        most += 1
    return most


def _some_cuts(costs: Costs, cuts: Sequence[int], most: int) -> Sequence[int]:
    """Of each of so many equal parts of the work the cut over which least travels."""
    if len(cuts) <= most:
        return cuts
    sizes = costs.sizes(1)
    done = [forward + backward for forward, backward in zip(sizes.forward, sizes.backward, strict=True)]
    crossing = [sent + back for sent, back in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)]
    parts: dict[int, list[int]] = {}
    for cut in cuts:
        parts.setdefault(min(most - 1, int(done[cut] / done[-1] * most)), []).append(cut)
    return sorted(min(part, key=crossing.__getitem__) for part in parts.values())


def _machine_size(ground: Ground) -> int:
    """The devices of each machine, which are better kept together; 1 where machines differ."""
    sizes = {machine.devices for machine in ground.cluster.machines}
    return sizes.pop() if len(sizes) == 1 and len(ground.cluster.machines) > 2 else 1


def _uneven_layouts(table: Table, depths: Sequence[int]) -> Iterator[tuple[Share, ...]]:
    if table.sensible:
        for shares in table.all_layouts() if table.has_few else table.best_layouts():
            if len(shares) in depths and len({share.devices for share in shares}) > 1:
                yield shares


class _Bounds:
    """What no layout takes less than: what goes before each stage, and all its work, without a message."""

    def __init__(self, costs: Costs, ground: Ground, batch_size: int, microbatches: int) -> None:
        self.costs, self.batch_size, self.microbatches = costs, batch_size, microbatches
        self._fastest = ground.fastest
        self._times: dict[tuple[int, Share], tuple[float, float]] = {}

    def least(self, shares: Sequence[Share]) -> float:
        narrow = ceil(self.batch_size / min(share.devices for share in shares))
        microbatches = ceil(narrow / ceil(narrow / self.microbatches))
        longest = before = 0.0
        for share in shares:
            forward, whole = self._one(microbatches, share)
            longest = max(longest, before + microbatches * whole)
            before += forward
        return longest * (1 - 1e-9)

    def _one(self, microbatches: int, share: Share) -> tuple[float, float]:
        """Of a micro-batch: its forward, and all that is done for it."""
        key = microbatches, share
        if key not in self._times:
            smaller, larger = divmod(ceil(self.batch_size / share.devices), microbatches)
            few = self._of(share, smaller) if smaller and larger < microbatches else (0.0, 0.0)
            many = self._of(share, smaller + 1) if larger else (0.0, 0.0)
            part = larger / microbatches
            forward, whole = (part * m + (1 - part) * f for m, f in zip(many, few, strict=True))
            self._times[key] = forward / self._fastest, whole / self._fastest
        return self._times[key]

    def _of(self, share: Share, size: int) -> tuple[float, float]:
        sizes = self.costs.sizes(size)
        forward, alone, backward = (
            sums[share.stop] - sums[share.first]
            for sums in (sizes.forward, sizes.forward_only, sizes.backward)
        )
        first = alone if share.recompute else forward
        return first, first + backward + (forward if share.recompute else 0.0)


def _costed(
    costs: Costs,
    ground: Ground,
    plan: Plan,  # its ranks are devices of the ground
    schedules: Sequence[ScheduleName],
    shard_optimizer: bool,
    terms: Terms,
) -> Iterator[Uneven]:
    devices = plan.ranks
    stages = tuple(
        msgspec.structs.replace(stage, ranks=tuple(rank - devices[0] for rank in stage.ranks))
        for stage in plan.stages
    )
    for schedule in schedules:
        changed = msgspec.structs.replace(plan, stages=stages, schedule=schedule)
        try:
            found = _fitting(costs, ground, changed, devices, shard_optimizer, terms)
        except PlanError:  # a size that was not measured
            continue
        if found is not None:
            yield found


def _costing(
    costs: Costs, ground: Ground, plan: Plan, devices: Sequence[int], shard_optimizer: bool, terms: Terms
) -> Callable[[Spans], Uneven | None]:
    """What a plan costs with other cuts; None where these are not allowed, or it does not fit."""
    allowed = {0, *_all_cuts(costs, terms)}

    def costed(spans: Spans) -> Uneven | None:
        if not all(first in allowed for first, _ in spans):
            return None
        stages = tuple(
            StagePlan(first, stop, stage.ranks, bool(terms.recompute))
            for (first, stop), stage in zip(spans, plan.stages, strict=True)
        )
        changed = msgspec.structs.replace(plan, stages=stages)
        return _fitting(costs, ground, changed, devices, shard_optimizer, terms)

    return costed


def _fitting(
    costs: Costs, ground: Ground, plan: Plan, devices: Sequence[int], shard_optimizer: bool, terms: Terms
) -> Uneven | None:
    """With recompute where memory asks for it; None where that does not help."""
    while True:
        forecast, _ = forecast_uneven(costs, ground, plan, devices, shard_optimizer=shard_optimizer)
        found = Uneven(plan, forecast, tuple(devices))
        short = _too_full(found, ground, terms.headroom, devices)
        if not short:
            return found
        if terms.recompute is not None or all(plan.stages[stage].recompute for stage in short):
            return None
        stages = tuple(
            msgspec.structs.replace(stage, recompute=stage.recompute or number in short)
            for number, stage in enumerate(plan.stages)
        )
        plan = msgspec.structs.replace(plan, stages=stages)


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
