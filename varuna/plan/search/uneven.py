"""Search for the fastest layout whose stages have different numbers of replicas.

Small cases are searched completely, smallest lower bound first. In larger ones every depth gets some
starting layouts, and hill climbing improves the best of them: it moves a cut, moves devices to another
stage, or changes the number of micro-batches, as long as the simulated step becomes shorter. The starting
layouts are

    the results of dynamic programming (`StageTable`), over whole machines and over single devices
    all devices divided about equally, with stages cut to match

The result for a depth does not depend on the other depths in the request. So the best of all depths is never
slower than the best of one depth.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, combinations, pairwise, product
from math import ceil, comb, inf
from typing import NamedTuple

from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable, SegmentSums
from varuna.plan.cost.memory import MemoryTerms, held_counts, stage_memory
from varuna.plan.cost.simulate import Simulation
from varuna.plan.cost.uneven import forecast_uneven, simulate_if_it_fits
from varuna.plan.cut.partition import Spans, adjacent_cuts, all_cuts, balance_over
from varuna.plan.cut.place import ClusterMap
from varuna.plan.search.space import FEW_CUTS
from varuna.types import Forecast, Plan, ScheduleName, StageMap, StagePlan, spread_evenly
from varuna.units import count

FEW_LAYOUTS = 3_000
"""Try every layout if there are at most this many combinations of cuts and devices."""
MOST_DEVICES = 512
"""On more devices, search only layouts with equal numbers of replicas."""
MOST_STAGES = 8
"""Largest depth of the hill climbing."""
MOST_OPTIONS = 40_000
"""Stage options that dynamic programming evaluates, over all numbers of micro-batches."""
MOST_STARTS = 3
"""Results of dynamic programming to simulate, for each depth and number of micro-batches."""
MOST_CLIMBS = 2
"""Starting layouts to improve, for each depth."""
MOST_STEPS = 400
"""Layouts that one climb evaluates."""
MOST_TAILS = 16
"""Tails that dynamic programming keeps for each state, if none is better in every respect."""


class UnevenRequest(NamedTuple):
    """Requirements for a layout whose stages may have different numbers of replicas."""

    batch_size: int
    depths: Sequence[int]
    schedules: Sequence[ScheduleName]
    shard_optimizer: bool = False
    recompute: bool | None = None  # None: only where memory requires it
    headroom: float = 0.0  # share of each device's memory to leave free
    cuts: Sequence[int] | None = None  # segments that may start a stage; None: all
    uses_all_devices: bool = False
    microbatch_counts: Sequence[int] | None = None  # None: any
    start_schedule: ScheduleName = "1f1b"  # dynamic programming limits memory as for this schedule


class UnevenLayout(NamedTuple):
    plan: Plan
    forecast: Forecast
    devices: tuple[int, ...]  # device of each rank, counted over the cluster


class UnevenCandidate(NamedTuple):
    """A layout on the last devices of the cluster, stage after stage."""

    spans: Spans
    widths: tuple[int, ...]
    microbatches: int
    schedule: ScheduleName


class SimulatedCandidate(NamedTuple):
    """A candidate that fits, and its simulated step."""

    seconds: float
    candidate: UnevenCandidate
    plan: Plan
    simulation: Simulation


def best_uneven(
    costs: CostTable, cluster_map: ClusterMap, request: UnevenRequest, *, limit: float = inf
) -> UnevenLayout | None:
    """Return the fastest layout that fits and takes less than `limit` seconds, or None."""
    if not 3 <= cluster_map.num_devices <= MOST_DEVICES:
        return None
    search = UnevenSearch(costs, cluster_map, request)
    found = search.try_all(limit) if search.has_few_layouts else search.climb_all()
    if found is None or found.seconds >= limit:
        return None
    return search.forecast(found.plan, search.devices(found.candidate))


class UnevenSearch:
    """Complete search and hill climbing over layouts with unequal replicas."""

    def __init__(self, costs: CostTable, cluster_map: ClusterMap, request: UnevenRequest) -> None:
        self.costs, self.cluster_map, self.request = costs, cluster_map, request
        batch_size, counts = request.batch_size, request.microbatch_counts
        wanted = counts or [2**i for i in range(7) if 2**i <= batch_size]
        # 5 samples in micro-batches of ceil(5 / 4) = 2 are three micro-batches, not four.
        self.counts = sorted({ceil(batch_size / ceil(batch_size / number)) for number in wanted})
        self._allowed_counts = range(1, batch_size + 1) if counts is None else self.counts
        self.cuts = range(1, costs.num_segments) if request.cuts is None else request.cuts
        self.bounds = [0, *self.cuts, costs.num_segments]
        self._times: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        sizes = {machine.devices for machine in cluster_map.cluster.machines}
        # Replicas of a stage should fill whole machines, if these are equal and there are several.
        self._machine_size = sizes.pop() if len(sizes) == 1 and len(cluster_map.cluster.machines) > 2 else 1

    @property
    def has_few_layouts(self) -> bool:
        devices = self.cluster_map.num_devices
        return comb(len(self.cuts) + devices, devices - 1) <= FEW_LAYOUTS

    def devices(self, candidate: UnevenCandidate) -> range:
        return range(self.cluster_map.num_devices - sum(candidate.widths), self.cluster_map.num_devices)

    def simulate(self, candidate: UnevenCandidate, limit: float = inf) -> SimulatedCandidate | None:
        """Return None if the candidate is not allowed, does not fit, or takes `limit` seconds or more."""
        widths, devices = candidate.widths, self.devices(candidate)
        if self.request.uses_all_devices and devices.start:
            return None
        ranks = zip(accumulate(widths), widths, strict=True)
        stage_map = tuple(tuple(range(stop - width, stop)) for stop, width in ranks)
        size = ceil(ceil(self.request.batch_size / min(widths)) / candidate.microbatches)
        try:
            found = self.simulate_stages(candidate.spans, stage_map, size, candidate.schedule, devices, limit)
        except PlanError:  # the profile does not cover this micro-batch size
            return None
        return None if found is None else SimulatedCandidate(found[1].seconds, candidate, *found)

    def simulate_stages(
        self,
        spans: Spans,
        stage_map: StageMap,
        microbatch_size: int,
        schedule: ScheduleName,
        devices: range,  # of the ranks
        limit: float = inf,
    ) -> tuple[Plan, Simulation] | None:
        """Choose where to recompute; return None if it does not fit, or takes `limit` seconds or more."""
        profile, request = self.costs.profile, self.request
        stages = tuple(StagePlan(*span, ranks) for span, ranks in zip(spans, stage_map, strict=True))
        model = profile.precision, profile.fingerprint
        return simulate_if_it_fits(
            self.costs,
            self.cluster_map,
            Plan(stages, request.batch_size, microbatch_size, schedule, *model),
            devices,
            shard_optimizer=request.shard_optimizer,
            recompute=request.recompute,
            headroom=request.headroom,
            limit=limit,
        )

    def forecast(self, plan: Plan, devices: range) -> UnevenLayout:
        shard = self.request.shard_optimizer
        forecast, _ = forecast_uneven(self.costs, self.cluster_map, plan, devices, shard_optimizer=shard)
        return UnevenLayout(plan, forecast, tuple(devices))

    def try_all(self, limit: float) -> SimulatedCandidate | None:
        ordered = sorted((self._bound(candidate), candidate) for candidate in self._all_candidates())
        best: SimulatedCandidate | None = None
        for seconds, candidate in ordered:
            if seconds >= limit:
                break
            for schedule in self.request.schedules:
                found = self.simulate(candidate._replace(schedule=schedule), limit)
                if found is not None:
                    best, limit = found, found.seconds
        return best

    def _bound(self, candidate: UnevenCandidate) -> float:
        """Bound a candidate: forwards down to a stage, then all work of the stage, without messages."""
        narrowest = ceil(self.request.batch_size / min(candidate.widths))
        microbatches = ceil(narrowest / ceil(narrowest / candidate.microbatches))
        longest = before = 0.0
        for (first, stop), width in zip(candidate.spans, candidate.widths, strict=True):
            key = microbatches, first, stop, width
            if key not in self._times:
                self._times[key] = self._mean_times(*key)
            forward, whole = self._times[key]
            longest = max(longest, before + microbatches * whole)
            before += forward
        return longest * (1 - 1e-9)

    def _mean_times(self, microbatches: int, first: int, stop: int, width: int) -> tuple[float, float]:
        """Return seconds of the forward and of all work, as means over micro-batches."""
        smaller, num_larger = divmod(ceil(self.request.batch_size / width), microbatches)
        few = self._times_at(first, stop, smaller) if smaller and num_larger < microbatches else (0.0, 0.0)
        many = self._times_at(first, stop, smaller + 1) if num_larger else (0.0, 0.0)
        share = num_larger / microbatches
        forward, whole = (share * m + (1 - share) * f for m, f in zip(many, few, strict=True))
        return forward / self.cluster_map.fastest, whole / self.cluster_map.fastest

    def _times_at(self, first: int, stop: int, size: int) -> tuple[float, float]:
        """Return zeros if the profile does not cover the size: simulating the candidate then rejects it."""
        try:
            sizes = self.costs.sizes(size)
        except PlanError:
            return 0.0, 0.0
        forward, alone, backward = (
            sums[stop] - sums[first] for sums in (sizes.forward, sizes.forward_only, sizes.backward)
        )
        return min(forward, alone), forward + backward + (alone if self.request.recompute else 0.0)

    def _all_candidates(self) -> Iterator[UnevenCandidate]:
        for depth in self.request.depths:
            if 2 <= depth <= min(len(self.cuts) + 1, self.cluster_map.num_devices):
                widths = [each for each in self._all_widths(depth) if len(set(each)) > 1]
                cuts = combinations(self.cuts, depth - 1)
                spans = [tuple(pairwise([0, *inner, self.costs.num_segments])) for inner in cuts]
                for each in product(spans, widths, self.counts):
                    yield UnevenCandidate(*each, self.request.schedules[0])

    def _all_widths(self, depth: int) -> Iterator[tuple[int, ...]]:
        most = self.cluster_map.num_devices
        for total in range(most if self.request.uses_all_devices else depth, most + 1):
            for inner in combinations(range(1, total), depth - 1):
                yield tuple(stop - first for first, stop in pairwise([0, *inner, total]))

    def climb_all(self) -> SimulatedCandidate | None:
        deepest = min(MOST_STAGES, self.cluster_map.num_devices, len(self.cuts) + 1)
        depths = [depth for depth in self.request.depths if 2 <= depth <= deepest]
        starts: dict[int, list[UnevenCandidate]] = {}
        for depth in depths:  # all devices, about equally many for each stage, and cut to match
            widths = spread_evenly(self.cluster_map.num_devices, parts=depth)
            number = min(self.counts, key=lambda number: abs(number - 4 * depth))
            start = UnevenCandidate(self._balanced(widths), widths, number, self.request.schedules[0])
            starts[depth] = [start]
        for candidate in self._programmed_starts(max(depths, default=0)):
            if len(candidate.widths) in starts:
                starts[len(candidate.widths)].append(candidate)
        found = [top for candidates in starts.values() for top in self._climb_from(candidates)]
        return min(found, key=lambda top: top.seconds, default=None)

    def _climb_from(self, starts: Sequence[UnevenCandidate]) -> Iterator[SimulatedCandidate]:
        simulated = [found for start in dict.fromkeys(starts) if (found := self.simulate(start)) is not None]
        simulated.sort(key=lambda found: (found.seconds, found.candidate))
        for start in simulated[:MOST_CLIMBS]:
            top = self._climb(start)
            if top.plan.uneven:
                yield top

    def _programmed_starts(self, deepest: int) -> Iterator[UnevenCandidate]:
        for unit in sorted({1, self._machine_size}):
            cuts = self._cuts_to_program(self.cluster_map.num_devices // unit)
            for number in self.counts:
                table = StageTable(self.costs, self.cluster_map, self.request, number, cuts)
                for layouts in table.best_layouts(deepest, unit=unit):
                    for options in layouts[:MOST_STARTS]:
                        spans = tuple((option.first, option.stop) for option in options)
                        widths = tuple(option.devices for option in options)
                        yield UnevenCandidate(spans, widths, number, self.request.schedules[0])

    def _cuts_to_program(self, units: int) -> Sequence[int]:
        """Divide the work into as many parts as `MOST_OPTIONS` allows; cut each where fewest bytes cross."""
        most = 1
        while (
            min(units, MOST_STAGES, most + 2) * (most + 2) ** 2 * units // 2 * len(self.counts)
            <= MOST_OPTIONS
        ):
            most += 1
        if len(self.cuts) <= most:
            return self.cuts
        sizes = self.costs.sizes(1)
        work = [forward + backward for forward, backward in zip(sizes.forward, sizes.backward, strict=True)]
        crossing = [sent + back for sent, back in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)]
        parts: dict[int, list[int]] = {}
        for cut in self.cuts:
            parts.setdefault(min(most - 1, int(work[cut] / work[-1] * most)), []).append(cut)
        return sorted(min(part, key=crossing.__getitem__) for part in parts.values())

    @cached_property
    def _work_before(self) -> list[float]:
        return [0.0, *accumulate(self.costs.work_between(1, self.bounds))]

    def _balanced(self, widths: Sequence[int]) -> Spans:
        """Cut so that each stage's share of the work is about its share of the devices."""
        work, places, total = self._work_before, [0], len(self.bounds) - 1
        for stage, devices in enumerate(accumulate(widths[:-1]), 1):
            target = work[-1] * devices / sum(widths)
            place = bisect_left(work, target)
            if work[place] - target > target - work[place - 1]:
                place -= 1
            places.append(max(places[-1] + 1, min(place, total - (len(widths) - stage))))
        return tuple(pairwise(self.bounds[place] for place in (*places, total)))

    def _climb(self, best: SimulatedCandidate) -> SimulatedCandidate:
        tried = {best.candidate}
        while len(tried) < MOST_STEPS:
            for candidate in self._variations(best):
                if candidate not in tried:
                    tried.add(candidate)
                    found = self.simulate(candidate, best.seconds)
                    if found is not None:
                        best = found
                        break
            else:
                break
        return best

    def _variations(self, current: SimulatedCandidate) -> Iterator[UnevenCandidate]:
        candidate, simulation = current.candidate, current.simulation
        depth = len(candidate.widths)
        busy = [
            simulation.compute_seconds(stage) + simulation.finishing_seconds(stage) for stage in range(depth)
        ]
        by_work = sorted(range(depth), key=busy.__getitem__)
        # A giver of None stands for idle devices.
        idle: list[int | None] = [None] if sum(candidate.widths) < self.cluster_map.num_devices else []
        for taker, giver, number in product(
            reversed(by_work[-3:]), [*idle, *by_work[:3]], sorted({1, 2, self._machine_size})
        ):
            moved = list(candidate.widths)
            moved[taker] += number
            if giver is not None:
                moved[giver] -= number
            if min(moved) >= 1 and sum(moved) <= self.cluster_map.num_devices:
                yield candidate._replace(widths=tuple(moved))
                yield candidate._replace(widths=tuple(moved), spans=self._balanced(moved))
        for step in (4, 2, 1):
            for spans in adjacent_cuts(candidate.spans, self.bounds, step):
                yield candidate._replace(spans=spans)
        now = candidate.microbatches
        for other in (2 * now, now // 2, now + 1, now - 1):
            if other in self._allowed_counts:
                yield candidate._replace(microbatches=other)
        for schedule in self.request.schedules:
            yield candidate._replace(schedule=schedule)


# ---------------------------------------------------------------- dynamic programming


class StageSite(NamedTuple):
    """Properties of a stage's devices that determine its cost."""

    speed: float
    memory_bytes: float
    spans_machines: bool
    leaves_before: bool  # messages over the cut before the stage leave a machine
    leaves_behind: bool  # likewise over the cut behind it
    card_users: int  # replicas that share a network card


class StageOption(NamedTuple):
    """Segments `first` to `stop - 1` on some devices, with their cost."""

    first: int
    stop: int
    devices: int
    seconds: float  # one micro-batch: through the stage, over the cut before it, and back
    tick: float  # one micro-batch: time for which the stage or its busiest link is occupied
    ending: float  # reductions and optimizer


class Tail(NamedTuple):
    """Stages from some segment to the end of the model."""

    seconds: float
    longest: float
    ending: float
    options: tuple[StageOption, ...]

    def prepend(self, option: StageOption) -> "Tail":
        return Tail(
            self.seconds + option.seconds,
            max(self.longest, option.tick),
            max(self.ending, option.ending),
            (option, *self.options),
        )


EMPTY_TAIL = Tail(0.0, 0.0, 0.0, ())


class StageTable:
    """Dynamic programming over stages, segments and devices, for one number of micro-batches.

    A stage with n replicas gives each of them an n-th of every micro-batch. Stages are added from the last
    to the first, because a stage's memory depends on the number of stages behind it:

        best(stages, first, devices) = min over stop and n of
            option(first..stop-1 on n devices) in front of best(stages - 1, stop, devices - n)

    The objective is `ticks`: the stages' times, plus the longest stage once for each further micro-batch,
    plus the longest reduction (Tanaka et al., IPDPS 2021, section 4.3). These three numbers are kept
    separately: a tail is dropped only if another one is no worse in any of them.
    """

    def __init__(
        self,
        costs: CostTable,
        cluster_map: ClusterMap,
        request: UnevenRequest,
        microbatches: int,
        cuts: Sequence[int],
    ) -> None:
        self.costs, self.cluster_map, self.request = costs, cluster_map, request
        self.microbatches, self.cuts = microbatches, cuts
        self.size = ceil(request.batch_size / microbatches)
        self.last_size = request.batch_size - (microbatches - 1) * self.size
        self.num_devices, self.num_segments = cluster_map.num_devices, costs.num_segments
        self._options: dict[tuple[int, int, int, int, StageSite], StageOption | None] = {}
        self._sites: dict[tuple[int, int], StageSite] = {}

    def best_layouts(self, deepest: int, *, unit: int = 1) -> Iterator[list[tuple[StageOption, ...]]]:
        """Yield good layouts of one stage, of two, ..., best first. Replicas are multiples of `unit`."""
        tails: dict[tuple[int, int], list[Tail]] = {(self.num_segments, 0): [EMPTY_TAIL]}
        starts = [0, *self.cuts]
        for behind in range(min(len(starts), self.num_devices // unit, deepest)):
            longer: dict[tuple[int, int], list[Tail]] = {}
            for (stop, after), known in tails.items():
                for first in starts[: bisect_left(starts, stop)]:
                    left = self.num_devices - after - (unit if first else 0)  # a unit for the stages before
                    for devices in range(unit, left + 1, unit):
                        option = self.option(first, stop, after, behind, devices)
                        if option is not None:
                            place = longer.setdefault((first, after + devices), [])
                            place += [tail.prepend(option) for tail in known]
            tails = {place: self._undominated(found) for place, found in longer.items()}
            whole = [
                tail
                for (first, used), found in tails.items()
                if first == 0 and (used == self.num_devices or not self.request.uses_all_devices)
                for tail in found
            ]
            yield [tail.options for tail in sorted(whole, key=self._sort_key)]

    def ticks(self, tail: Tail) -> float:
        """Return the step time if every tick of the pipeline took as long as its longest stage."""
        return tail.seconds + (self.microbatches - 1) * tail.longest + tail.ending

    def option(self, first: int, stop: int, after: int, behind: int, devices: int) -> StageOption | None:
        """Return a stage with `after` devices and `behind` stages behind it; None if it does not fit."""
        if (after, devices) not in self._sites:
            self._sites[after, devices] = self._site(after, devices)
        site = self._sites[after, devices]
        key = first, stop, behind, devices, site
        if key not in self._options:
            self._options[key] = self._evaluate(first, stop, behind, devices, site)
        return self._options[key]

    def _site(self, after: int, devices: int) -> StageSite:
        machine_of, stop = self.cluster_map.machine_of, self.num_devices - after
        own = machine_of[stop - devices : stop]
        machines = [self.cluster_map.cluster.machines[machine] for machine in set(own)]
        spans = len(machines) > 1
        return StageSite(
            min(machine.speed for machine in machines),
            min(machine.memory_bytes for machine in machines) * (1 - self.request.headroom),
            spans,
            spans or machine_of[stop - devices - 1] != own[0],
            spans or machine_of[stop % self.num_devices] != own[-1],
            max(
                ceil(number / self.cluster_map.cluster.machines[machine].cards)
                for machine, number in Counter(own).items()
            ),
        )

    def _evaluate(
        self, first: int, stop: int, behind: int, devices: int, site: StageSite
    ) -> StageOption | None:
        try:
            sizes = self.costs.sizes(ceil(self.size / devices))
        except PlanError:  # larger than any measured size
            return None
        request, costs = self.request, self.costs
        terms = MemoryTerms(sizes, devices, ceil(request.batch_size / devices), shard=False)
        # Recompute only if the stage does not fit otherwise.
        for recompute in (False, True) if request.recompute is None else (request.recompute,):
            kept = held_counts(
                request.start_schedule,
                stage=0,
                stages=behind + 1,
                microbatches=self.microbatches,
                recompute=recompute,
            )
            if stage_memory(costs, terms, first, stop, kept).total <= site.memory_bytes:
                break
        else:
            return None
        run = self._compute_seconds(sizes, first, stop, site.speed, recompute)
        sendings, latencies = self._crossing(first, sizes, site.leaves_before, site.card_users)
        behind_it, _ = self._crossing(stop, sizes, site.leaves_behind, site.card_users)
        between = site.spans_machines
        last = costs.sizes(ceil(self.last_size / devices))
        buckets = costs.buckets(last, first, stop, group_size=devices, between=between, split=False)
        return StageOption(
            first,
            stop,
            devices,
            run + sum(sendings) + latencies,
            max(run, *sendings, *behind_it),
            costs.ending_seconds(first, stop, width=devices, between=between, shard=False)
            + sum(seconds for _, seconds in buckets),
        )

    def _compute_seconds(
        self, sizes: SegmentSums, first: int, stop: int, speed: float, recompute: bool
    ) -> float:
        overhead = self.costs.profile.overheads.instruction_seconds
        entry = sizes.entry_seconds[first] / speed + overhead
        whole = (sizes.forward[stop] - sizes.forward[first]) / speed + entry
        alone = (sizes.forward_only[stop] - sizes.forward_only[first]) / speed + entry
        backward = (sizes.backward[stop] - sizes.backward[first]) / speed + overhead
        return (alone + whole if recompute else whole) + backward

    def _crossing(
        self, cut: int, sizes: SegmentSums, between: bool, card_users: int
    ) -> tuple[tuple[float, float], float]:
        """Return how long a micro-batch occupies both directions of a cut, and the sum of both latencies."""
        if cut in (0, self.num_segments):
            return (0.0, 0.0), 0.0
        there = self.costs.message(sizes.sent_bytes[cut], between=between)
        back = self.costs.message(sizes.returned_bytes[cut], between=between)
        users = card_users if between else 1
        return (users * there.sending, users * back.sending), there.latency + back.latency

    def _undominated(self, tails: list[Tail]) -> list[Tail]:
        kept: list[Tail] = []
        for tail in sorted(tails, key=self._sort_key):
            if not any(
                other.longest <= tail.longest
                and other.seconds <= tail.seconds
                and other.ending <= tail.ending
                for other in kept
            ):
                kept.append(tail)
        return kept[:MOST_TAILS]

    def _sort_key(self, tail: Tail) -> tuple[float, tuple[StageOption, ...]]:
        return self.ticks(tail), tail.options


# ---------------------------------------------------------------- cuts for a given stage map


def cut_uneven(
    costs: CostTable,
    cluster_map: ClusterMap,
    stage_map: StageMap,
    request: UnevenRequest,
    *,
    microbatch_size: int,
) -> UnevenLayout:
    """Return the fastest cut of a model for a given stage map; raise PlanError if none fits."""
    number, depth, devices = costs.num_segments, len(stage_map), range(cluster_map.num_devices)
    search = UnevenSearch(costs, cluster_map, request)
    bounds = search.bounds
    if len(bounds) <= depth <= number:
        raise PlanError(
            f"{depth} stages with different numbers of replicas need {count(depth - 1, 'cut')}, but only "
            f"{len(bounds) - 2} of the model's cuts can be divided by sample (give all stages the same "
            "number of replicas, or use fewer stages)"
        )

    def simulated(spans: Spans) -> tuple[float, Plan] | None:
        schedule = request.schedules[0]
        found = search.simulate_stages(spans, stage_map, microbatch_size, schedule, devices)
        return None if found is None else (found[1].seconds, found[0])

    def at_bounds(spans: Spans) -> Spans:
        return tuple((bounds[first], bounds[stop]) for first, stop in spans)

    if depth <= number and comb(len(bounds) - 2, depth - 1) <= FEW_CUTS:
        cuts = all_cuts(len(bounds) - 1, depth)
        found = [cut for spans in cuts if (cut := simulated(at_bounds(spans))) is not None]
    else:
        work = costs.work_between(microbatch_size, bounds)
        start = simulated(at_bounds(balance_over(work, [len(ranks) for ranks in stage_map])))
        found = [] if start is None else [_move_cuts(start, bounds, simulated)]
    if not found:
        raise PlanError(
            f"no cut of the model into {depth} stages fits with micro-batches of {microbatch_size} "
            "(use a smaller micro-batch, more replicas, or more stages)"
        )
    return search.forecast(min(found, key=lambda cut: cut[0])[1], devices)


def _move_cuts(
    best: tuple[float, Plan], bounds: Sequence[int], simulated: Callable[[Spans], tuple[float, Plan] | None]
) -> tuple[float, Plan]:
    """Move one cut by one place as long as the step becomes shorter."""
    while True:
        spans = tuple((stage.first, stage.stop) for stage in best[1].stages)
        moved = [found for way in adjacent_cuts(spans, bounds) if (found := simulated(way)) is not None]
        better = min(moved, key=lambda found: found[0], default=best)
        if better[0] >= best[0]:
            return best
        best = better
