"""The fastest layout whose stages differ in their number of replicas.

Where there are few, each is looked at, smallest bound first. Else every depth has its starts, and from the
best of them the way goes up: a segment over a cut, a device to another stage, more micro-batches or fewer,
while the simulated step becomes shorter by it. Starts are

    what dynamic programming finds (`varuna.plan.search.stages`), over whole machines and over single devices
    all devices spread about equally, each stage with work to match

What is found for a depth does not depend on which others are asked for, so that the best of all is never
slower than the best of one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from math import ceil, comb, inf
from typing import NamedTuple

from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs
from varuna.plan.cost.simulate import Simulation
from varuna.plan.cut.partition import Spans, all_cuts, balance_over, neighbours
from varuna.plan.cut.place import Ground
from varuna.plan.search.stages import Table, Terms
from varuna.plan.search.uneven import Uneven, fitting, forecast_uneven
from varuna.types import Plan, ScheduleName, StageMap, StagePlan
from varuna.units import count

FEW_LAYOUTS = 3_000
"""Where there are up to so many ways to cut a model and to share out devices, every one is looked at."""
FEW_CUTS = 600
"""Where a model can be cut for a map in up to so many ways, every one is looked at."""
MOST_DEVICES = 512
"""On more, stages have equally many replicas: there is much to choose from, and no time to look for more."""
MOST_STAGES = 8
"""Where not every layout is looked at, those of up to so many stages."""
MOST_SHARES = 40_000
"""Spans of segments with devices that dynamic programming looks at, over all numbers of micro-batches."""
MOST_STARTS = 3
"""Of dynamic programming's answers for a depth and a number of micro-batches, so many are simulated."""
MOST_CLIMBS = 2
"""Of starts for a depth, so many are followed."""
MOST_LOOKS = 400
"""Layouts that one climb looks at."""


class Spot(NamedTuple):
    """A layout on the last devices, stage after stage."""

    spans: Spans
    widths: tuple[int, ...]
    microbatches: int
    schedule: ScheduleName


class Seen(NamedTuple):
    """A layout that fits, and what it takes."""

    seconds: float
    spot: Spot
    plan: Plan
    simulation: Simulation


def best_uneven(
    costs: Costs,
    ground: Ground,
    *,
    batch_size: int,
    depths: Sequence[int],
    schedules: Sequence[ScheduleName],
    shard_optimizer: bool,
    terms: Terms,
    microbatches: Sequence[int] | None = None,  # numbers of them; None: any
    than: float = inf,  # seconds that it must not take
) -> Uneven | None:
    """The fastest that fits; None where there is none."""
    hill = Hill(costs, ground, batch_size, microbatches, schedules, shard_optimizer, terms)
    if not 3 <= ground.num_devices <= MOST_DEVICES:
        return None
    found = hill.best_of_all(depths, than) if hill.has_few else hill.climb_all(depths)
    if found is None or found.seconds >= than:
        return None
    devices = hill.devices(found.spot)
    forecast, _ = forecast_uneven(costs, ground, found.plan, devices, shard_optimizer=shard_optimizer)
    return Uneven(found.plan, forecast, tuple(devices))


class Hill:
    """All layouts with their costs, and the ways between them."""

    def __init__(
        self,
        costs: Costs,
        ground: Ground,
        batch_size: int,
        microbatches: Sequence[int] | None,
        schedules: Sequence[ScheduleName],
        shard_optimizer: bool,
        terms: Terms,
    ) -> None:
        self.costs, self.ground, self.batch_size = costs, ground, batch_size
        asked = microbatches or [2**i for i in range(7) if 2**i <= batch_size]
        # Four of 5 samples are three: of 2, 2 and 1.
        self.numbers = sorted({ceil(batch_size / ceil(batch_size / number)) for number in asked})
        self._allowed = range(1, batch_size + 1) if microbatches is None else self.numbers
        self.schedules, self.shard, self.terms = schedules, shard_optimizer, terms
        self.cuts = all_places(costs, terms)
        self._bounds = [0, *self.cuts, costs.num_segments]
        self._done = [0.0, *accumulate(costs.work_between(1, self._bounds))]

    def devices(self, spot: Spot) -> range:
        return range(self.ground.num_devices - sum(spot.widths), self.ground.num_devices)

    # ------------------------------------------------------------ one layout

    def cost(self, spot: Spot, than: float = inf) -> Seen | None:
        """None where it is not allowed, does not fit, or takes so long."""
        devices = self.devices(spot)
        if self.terms.leaves_none_idle and devices.start:
            return None
        stages, rank = [], 0
        for (first, stop), width in zip(spot.spans, spot.widths, strict=True):
            stages.append(StagePlan(first, stop, tuple(range(rank, rank + width))))
            rank += width
        profile = self.costs.profile
        size = ceil(ceil(self.batch_size / min(spot.widths)) / spot.microbatches)
        plan = Plan(
            tuple(stages), self.batch_size, size, spot.schedule, profile.precision, profile.fingerprint
        )
        try:
            found = fitting(
                self.costs,
                self.ground,
                plan,
                devices,
                shard_optimizer=self.shard,
                recompute=self.terms.recompute,
                headroom=self.terms.headroom,
                than=than,
            )
        except PlanError:  # a size that was not measured
            return None
        return None if found is None else Seen(found[1].seconds, spot, *found)

    # ------------------------------------------------------------ all of them

    @property
    def has_few(self) -> bool:
        devices = self.ground.num_devices
        return comb(len(self.cuts) + devices, devices - 1) <= FEW_LAYOUTS

    def best_of_all(self, depths: Sequence[int], than: float) -> Seen | None:
        least = _Least(self.costs, self.ground, self.batch_size, bool(self.terms.recompute))
        spots = sorted((least.seconds(spot), spot) for spot in self._every_spot(depths))
        best: Seen | None = None
        for seconds, spot in spots:
            if seconds >= than:
                break
            for schedule in self.schedules:
                found = self.cost(spot._replace(schedule=schedule), than)
                if found is not None:
                    best, than = found, found.seconds
        return best

    def _every_spot(self, depths: Sequence[int]) -> Iterator[Spot]:
        for depth in depths:
            if 2 <= depth <= min(len(self.cuts) + 1, self.ground.num_devices):
                widths = [some for some in self._every_widths(depth) if len(set(some)) > 1]
                cuts = combinations(self.cuts, depth - 1)
                spans = [tuple(pairwise([0, *inner, self.costs.num_segments])) for inner in cuts]
                for each in product(spans, widths, self.numbers):
                    yield Spot(*each, self.schedules[0])

    def _every_widths(self, depth: int) -> Iterator[tuple[int, ...]]:
        most = self.ground.num_devices
        for total in range(most if self.terms.leaves_none_idle else depth, most + 1):
            for inner in combinations(range(1, total), depth - 1):
                yield tuple(stop - first for first, stop in pairwise([0, *inner, total]))

    # ------------------------------------------------------------ where there are many

    def climb_all(self, depths: Sequence[int]) -> Seen | None:
        most = min(MOST_STAGES, self.ground.num_devices, len(self.cuts) + 1)
        wanted = [depth for depth in depths if 2 <= depth <= most]
        starts: dict[int, list[Spot]] = {depth: [self._spread(depth)] for depth in wanted}
        for spot in self._by_programming(max(wanted, default=0)):
            if len(spot.widths) in starts:
                starts[len(spot.widths)].append(spot)
        found = [top for spots in starts.values() for top in self._tops(spots)]
        return min(found, key=lambda top: top.seconds, default=None)

    def _tops(self, starts: Sequence[Spot]) -> Iterator[Seen]:
        seen = [found for spot in dict.fromkeys(starts) if (found := self.cost(spot)) is not None]
        seen.sort(key=lambda found: (found.seconds, found.spot))
        for start in seen[:MOST_CLIMBS]:
            top = self._climb(start)
            if top.plan.uneven:
                yield top

    def _by_programming(self, most: int) -> Iterator[Spot]:
        for unit in sorted({1, machine_size(self.ground)}):
            cuts = some_places(
                self.costs, self.cuts, _most_cuts(self.ground.num_devices // unit, len(self.numbers))
            )
            for number in self.numbers:
                table = Table(
                    self.costs, self.ground, self.batch_size, number, self.terms._replace(cuts=cuts)
                )
                for layouts in table.best_layouts(most=most, unit=unit):
                    for shares in layouts[:MOST_STARTS]:
                        spans = tuple((share.first, share.stop) for share in shares)
                        widths = tuple(share.devices for share in shares)
                        yield Spot(spans, widths, number, self.schedules[0])

    def _spread(self, depth: int) -> Spot:
        """All devices, about equally many for each stage, and as much work as they can do."""
        few, more = divmod(self.ground.num_devices, depth)
        widths = tuple(few + (stage < more) for stage in range(depth))
        number = min(self.numbers, key=lambda number: abs(number - 4 * depth))
        return Spot(self._balanced(widths), widths, number, self.schedules[0])

    def _balanced(self, widths: Sequence[int]) -> Spans:
        """To each stage about the share of the work that it has of the devices."""
        places, total = [0], len(self._bounds) - 1
        for stage, devices in enumerate(accumulate(widths[:-1]), 1):
            moment = self._done[-1] * devices / sum(widths)
            place = bisect_left(self._done, moment)
            if self._done[place] - moment > moment - self._done[place - 1]:
                place -= 1
            places.append(max(places[-1] + 1, min(place, total - (len(widths) - stage))))
        return tuple(pairwise(self._bounds[place] for place in (*places, total)))

    def _climb(self, best: Seen) -> Seen:
        looked_at = {best.spot}
        while len(looked_at) < MOST_LOOKS:
            for spot in self._near(best):
                if spot not in looked_at:
                    looked_at.add(spot)
                    found = self.cost(spot, best.seconds)
                    if found is not None:
                        best = found
                        break
            else:
                break
        return best

    def _near(self, seen: Seen) -> Iterator[Spot]:
        spot, depth = seen.spot, len(seen.spot.widths)
        busy = [
            seen.simulation.compute_seconds(stage) + seen.simulation.finishing_seconds(stage)
            for stage in range(depth)
        ]
        by_work = sorted(range(depth), key=busy.__getitem__)
        idle: list[int | None] = [None] if sum(spot.widths) < self.ground.num_devices else []
        for taker, giver, number in product(
            reversed(by_work[-3:]), [*idle, *by_work[:3]], sorted({1, 2, machine_size(self.ground)})
        ):
            if widths := self._moved(spot.widths, giver, taker, number):
                yield spot._replace(widths=widths)
                yield spot._replace(widths=widths, spans=self._balanced(widths))
        for step in (4, 2, 1):
            for moved in neighbours(spot.spans, self._bounds, step):
                yield spot._replace(spans=moved)
        now = spot.microbatches
        for other in (2 * now, now // 2, now + 1, now - 1):
            if other in self._allowed:
                yield spot._replace(microbatches=other)
        for schedule in self.schedules:
            yield spot._replace(schedule=schedule)

    def _moved(
        self, widths: Sequence[int], giver: int | None, taker: int, number: int
    ) -> tuple[int, ...] | None:
        """None as the giver: devices that are idle."""
        moved = list(widths)
        moved[taker] += number
        if giver is not None:
            moved[giver] -= number
        return tuple(moved) if min(moved) >= 1 and sum(moved) <= self.ground.num_devices else None


class _Least:
    """What no layout takes less than: what goes before each stage, and all its work, without a message."""

    def __init__(self, costs: Costs, ground: Ground, batch_size: int, recompute: bool) -> None:
        self.costs, self.batch_size, self.recompute = costs, batch_size, recompute
        self._fastest = ground.fastest
        self._times: dict[tuple[int, int, int, int], tuple[float, float]] = {}

    def seconds(self, spot: Spot) -> float:
        narrow = ceil(self.batch_size / min(spot.widths))
        microbatches = ceil(narrow / ceil(narrow / spot.microbatches))
        longest = before = 0.0
        for (first, stop), width in zip(spot.spans, spot.widths, strict=True):
            key = microbatches, first, stop, width
            if key not in self._times:
                self._times[key] = self._one(*key)
            forward, whole = self._times[key]
            longest = max(longest, before + microbatches * whole)
            before += forward
        return longest * (1 - 1e-9)

    def _one(self, microbatches: int, first: int, stop: int, width: int) -> tuple[float, float]:
        """Of a micro-batch: its forward, and all that is done for it."""
        smaller, larger = divmod(ceil(self.batch_size / width), microbatches)
        few = self._of(first, stop, smaller) if smaller and larger < microbatches else (0.0, 0.0)
        many = self._of(first, stop, smaller + 1) if larger else (0.0, 0.0)
        part = larger / microbatches
        forward, whole = (part * m + (1 - part) * f for m, f in zip(many, few, strict=True))
        return forward / self._fastest, whole / self._fastest

    def _of(self, first: int, stop: int, size: int) -> tuple[float, float]:
        """Zero where the size was not measured: what a layout takes then is not asked for."""
        try:
            sizes = self.costs.sizes(size)
        except PlanError:
            return 0.0, 0.0
        forward, alone, backward = (
            sums[stop] - sums[first] for sums in (sizes.forward, sizes.forward_only, sizes.backward)
        )
        return min(forward, alone), forward + backward + (alone if self.recompute else 0.0)


# ---------------------------------------------------------------- a map that is given


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
    """The fastest way to cut a model for it."""
    profile = costs.profile
    number, depth = costs.num_segments, len(stage_map)
    bounds = [0, *(range(1, number) if cuts is None else cuts), number]
    if len(bounds) <= depth <= number:
        raise PlanError(
            f"{depth} stages that differ in their replicas need {count(depth - 1, 'cut')}, but only "
            f"{len(bounds) - 2} of the model's can be parted by sample (give all stages as many replicas, or "
            "ask for fewer stages)"
        )
    devices = range(ground.num_devices)

    def costed(spans: Spans) -> tuple[float, Plan] | None:
        stages = tuple(StagePlan(*span, ranks) for span, ranks in zip(spans, stage_map, strict=True))
        plan = Plan(stages, batch_size, microbatch_size, schedule, profile.precision, profile.fingerprint)
        found = fitting(
            costs,
            ground,
            plan,
            devices,
            shard_optimizer=shard_optimizer,
            recompute=recompute,
            headroom=headroom,
        )
        return None if found is None else (found[1].seconds, found[0])

    if depth <= number and comb(len(bounds) - 2, depth - 1) <= FEW_CUTS:
        parts = all_cuts(len(bounds) - 1, depth)
        found = [way for spans in parts if (way := costed(_at(bounds, spans))) is not None]
    else:
        work = costs.work_between(microbatch_size, bounds)
        start = costed(_at(bounds, balance_over(work, [len(ranks) for ranks in stage_map])))
        found = [] if start is None else [_improved(start, bounds, costed)]
    if not found:
        raise PlanError(
            f"no cut of the model into {depth} stages fits with {microbatch_size} samples at once "
            "(a smaller micro-batch, more replicas, or more stages)"
        )
    plan = min(found, key=lambda way: way[0])[1]
    forecast, _ = forecast_uneven(costs, ground, plan, devices, shard_optimizer=shard_optimizer)
    return Uneven(plan, forecast, tuple(devices))


def _at(bounds: Sequence[int], spans: Spans) -> Spans:
    return tuple((bounds[first], bounds[stop]) for first, stop in spans)


def _improved(
    best: tuple[float, Plan], bounds: Sequence[int], costed: Callable[[Spans], tuple[float, Plan] | None]
) -> tuple[float, Plan]:
    """Moves one cut by one place for as long as that helps."""
    while True:
        spans = tuple((stage.first, stage.stop) for stage in best[1].stages)
        ways = [way for moved in neighbours(spans, bounds) if (way := costed(moved)) is not None]
        better = min(ways, key=lambda way: way[0], default=best)
        if better[0] >= best[0]:
            return best
        best = better


# ---------------------------------------------------------------- places for cuts


def all_places(costs: Costs, terms: Terms) -> Sequence[int]:
    return range(1, costs.num_segments) if terms.cuts is None else terms.cuts


def some_places(costs: Costs, cuts: Sequence[int], most: int) -> Sequence[int]:
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


def machine_size(ground: Ground) -> int:
    """The devices of each machine, which are better kept together; 1 where machines differ."""
    sizes = {machine.devices for machine in ground.cluster.machines}
    return sizes.pop() if len(sizes) == 1 and len(ground.cluster.machines) > 2 else 1


def _most_cuts(devices: int, num_tables: int) -> int:
    """So many there is time to look at: each stage may begin and end at any, with any number of devices."""
    most = 1
    while min(devices, MOST_STAGES, most + 2) * (most + 2) ** 2 * devices // 2 * num_tables <= MOST_SHARES:
        most += 1
    return most
