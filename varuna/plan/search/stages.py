"""Stages with as many replicas each as serve best: where to cut, and how many devices every stage gets.

A micro-batch here is the whole job's: a stage with n replicas gives each an n-th of its samples. The
number of stages, the cuts, the replicas of each stage and the micro-batches are all open. Where there
are few layouts, all are looked at, those with the smallest bound first; else dynamic programming
over (stages from the end, segments from the end, devices from the end) finds one for each depth:

    V(stages, first, devices) = best of   stage(first..stop-1, on n devices)  before
                                          V(stages - 1, stop, devices - n)

From the end, since what a stage must hold follows from how many come after it. What is minimised
is the sum of the stages' times, the longest again for every further micro-batch, and the longest
reduction (Tanaka et al., IPDPS 2021, section 4.3, with these three kept apart: of two ways to the
same place, one is dropped only where the other is no worse in any). What is left is simulated.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import ceil, comb, inf
from typing import NamedTuple

from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs, Message, Sizes
from varuna.plan.cost.memory import Room, keeps, stage_memory
from varuna.plan.cost.simulate import Pipeline, StageTimes, Way, name_orders, simulate
from varuna.plan.cut.place import Ground
from varuna.types import Cluster, Plan, Profile, ScheduleName, StagePlan

FEW_LAYOUTS = 20_000
SCHEDULE: ScheduleName = "1f1b"
MOST_MICROBATCHES = 64
MOST_WAYS = 16
"""Of ways to one place, none of which is better in everything, so many are followed up."""


class Terms(NamedTuple):
    """What all layouts that are looked at must keep to."""

    schedule: ScheduleName = SCHEDULE
    recompute: bool | None = None  # None: where memory asks for it
    headroom: float = 0.0  # the share of each device's memory to leave free
    cuts: Sequence[int] | None = None  # the segments with which a stage may begin; None: any
    leaves_none_idle: bool = False


ANY_LAYOUT = Terms()


class Site(NamedTuple):
    """All of its devices that the cost of a stage depends on."""

    speed: float
    memory_bytes: float
    spans_machines: bool
    leaves_before: bool  # whether what crosses the cut before it leaves a machine; likewise the next
    leaves_behind: bool
    crowd: int  # replicas that share a card


class Share(NamedTuple):
    """A stage on so many devices, before it is known where in the pipeline it is: all that a search asks."""

    first: int
    stop: int
    devices: int
    recompute: bool
    seconds: float  # for a micro-batch to go through it and over the cut before it, and back
    tick: float  # for which a micro-batch keeps it busy, or one of its links
    ending: float  # its reductions, and its optimizer


class Staging(NamedTuple):
    """The best layout: its ranks by stage may differ in number."""

    plan: Plan
    microbatches: int
    seconds: float  # of a step, simulated
    num_simulated: int


def stage(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    microbatches: Sequence[int] | None = None,
    fill_in: bool = False,
) -> Staging:
    """The layout with the shortest simulated step that fits; a PlanError where none does."""
    costs, ground = Costs(profile, fill_in=fill_in), Ground(cluster)
    numbers = microbatches or [2**i for i in range(7) if 2**i <= min(batch_size, MOST_MICROBATCHES)]
    tables = [Table(costs, ground, batch_size, number) for number in sorted(set(numbers))]
    candidates = [
        (table.least(shares), table, shares)
        for table in tables
        if table.sensible
        for shares in (
            table.all_layouts() if table.has_few else (found[0] for found in table.best_layouts() if found)
        )
    ]
    if not candidates:
        raise PlanError(_why_nothing_fits(tables))
    candidates.sort(key=lambda candidate: (candidate[0], candidate[1].microbatches, candidate[2]))
    best: tuple[float, int, int] = (inf, 0, 0)
    chosen: tuple[Table, tuple[Share, ...]] | None = None
    num_simulated = 0
    for least, table, shares in candidates:
        if least > best[0]:
            break
        num_simulated += 1
        found = (table.simulated(shares), len(shares), table.microbatches)
        if found < best:
            best, chosen = found, (table, shares)
    assert chosen is not None
    table, shares = chosen
    return Staging(table.plan(shares), table.microbatches, best[0], num_simulated)


class Table:
    """All stages that fit, for one number of micro-batches."""

    def __init__(
        self, costs: Costs, ground: Ground, batch_size: int, microbatches: int, terms: Terms = ANY_LAYOUT
    ) -> None:
        self.terms = terms
        self.costs = costs
        self.ground = ground
        self.batch_size = batch_size
        self.microbatches = microbatches
        self.size = ceil(batch_size / microbatches)
        self.last_size = batch_size - (microbatches - 1) * self.size
        self.devices = ground.num_devices
        self.segments = costs.num_segments
        self.cuts = range(1, self.segments) if terms.cuts is None else terms.cuts
        self.least_need = inf
        self._shares: dict[tuple[int, int, int, int, Site], Share | None] = {}
        self._sites: dict[tuple[int, int], Site] = {}

    @property
    def sensible(self) -> bool:
        """Whether so many micro-batches are needed at all."""
        return self.last_size > 0

    @property
    def has_few(self) -> bool:
        return comb(len(self.cuts) + self.devices, self.devices - 1) <= FEW_LAYOUTS

    # ------------------------------------------------------------ one stage

    def share(self, first: int, stop: int, after: int, behind: int, devices: int) -> Share | None:
        """Segments `first..stop-1` on devices that have so many devices and stages behind them.

        None where that does not fit. Without recompute, where that fits.
        """
        if (after, devices) not in self._sites:
            self._sites[after, devices] = self._site(after, devices)
        key = first, stop, behind, devices, self._sites[after, devices]
        if key not in self._shares:
            self._shares[key] = self._look_at(first, stop, after, behind, devices)
        return self._shares[key]

    def _site(self, after: int, devices: int) -> "Site":
        homes = self._homes(after, devices)
        machines = [self.ground.cluster.machines[home] for home in set(homes)]
        stop, spans = self.devices - after, len(machines) > 1
        machine_of = self.ground.machine_of
        return Site(
            min(machine.speed for machine in machines),
            min(machine.memory_bytes for machine in machines) * (1 - self.terms.headroom),
            spans,
            spans or machine_of[stop - devices - 1] != homes[0],
            spans or machine_of[stop % self.devices] != homes[-1],
            max(
                ceil(number / self.ground.cluster.machines[home].cards)
                for home, number in Counter(homes).items()
            ),
        )

    def _look_at(self, first: int, stop: int, after: int, behind: int, devices: int) -> Share | None:
        try:
            sizes = self.costs.sizes(ceil(self.size / devices))
        except PlanError:  # larger than any that was measured
            return None
        room = Room(sizes, devices, ceil(self.batch_size / devices), shard=False)
        site = self._sites[after, devices]
        asked, schedule = self.terms.recompute, self.terms.schedule
        for recompute in (False, True) if asked is None else (asked,):
            kept = keeps(
                schedule, stage=0, stages=behind + 1, microbatches=self.microbatches, recompute=recompute
            )
            need = stage_memory(self.costs, room, first, stop, kept).total
            self.least_need = min(self.least_need, need)
            if need <= site.memory_bytes:
                run = sum(self._times(first, stop, after, devices, recompute, ceil(self.size / devices)))
                sendings, latencies = self._crossing(first, sizes, site.leaves_before, site.crowd)
                behind_it, _ = self._crossing(stop, sizes, site.leaves_behind, site.crowd)
                reductions = sum(seconds for _, seconds in self._buckets(first, stop, after, devices))
                return Share(
                    first,
                    stop,
                    devices,
                    recompute,
                    run + sum(sendings) + latencies,
                    max(run, *sendings, *behind_it),
                    self._ending(first, stop, after, devices) + reductions,
                )
        return None

    def _crossing(
        self, cut: int, sizes: Sizes, between: bool, crowd: int
    ) -> tuple[tuple[float, float], float]:
        """For how long a micro-batch keeps both ways over a cut busy, and the latencies together."""
        if cut in (0, self.segments):
            return (0.0, 0.0), 0.0
        there = self.costs.message(sizes.sent_bytes[cut], between=between)
        here = self.costs.message(sizes.returned_bytes[cut], between=between)
        crowd = crowd if between else 1
        return (crowd * there.sending, crowd * here.sending), there.latency + here.latency

    def _homes(self, after: int, devices: int) -> list[int]:
        """The machines of devices that have so many behind them."""
        stop = self.devices - after
        return self.ground.machine_of[stop - devices : stop]

    def _between(self, after: int, devices: int) -> bool:
        return len(set(self._homes(after, devices))) > 1

    def _times(
        self, first: int, stop: int, after: int, devices: int, recompute: bool, size: int
    ) -> tuple[float, float, float]:
        """F, R and B."""
        sizes = self.costs.sizes(size)
        speed = min(self.ground.cluster.machines[home].speed for home in self._homes(after, devices))
        overhead = self.costs.profile.overheads.instruction_seconds
        entry = sizes.entry_seconds[first] / speed + overhead
        whole = (sizes.forward[stop] - sizes.forward[first]) / speed + entry
        bare = (sizes.forward_only[stop] - sizes.forward_only[first]) / speed + entry
        backward = (sizes.backward[stop] - sizes.backward[first]) / speed + overhead
        return (bare, whole, backward) if recompute else (whole, 0.0, backward)

    def _messages(self, cut: int, after: int, devices: int) -> tuple[Message, Message]:
        """Over a cut that has so many devices behind it, to or from one of a stage's replicas."""
        sizes = self.costs.sizes(ceil(self.size / devices))
        place = self.devices - after
        crossing = self.ground.machine_of[place - 1] != self.ground.machine_of[place]
        return (
            self.costs.message(sizes.sent_bytes[cut], between=crossing),
            self.costs.message(sizes.returned_bytes[cut], between=crossing),
        )

    def _buckets(self, first: int, stop: int, after: int, devices: int) -> tuple[tuple[float, float], ...]:
        return tuple(
            self.costs.buckets(
                self.costs.sizes(ceil(self.last_size / devices)),
                first,
                stop,
                group_size=devices,
                between=self._between(after, devices),
                split=False,
            )
        )

    def _ending(self, first: int, stop: int, after: int, devices: int) -> float:
        between = self._between(after, devices)
        return self.costs.ending_seconds(first, stop, width=devices, between=between, shard=False)

    # ------------------------------------------------------------ all of them

    def all_layouts(self) -> Iterator[tuple[Share, ...]]:
        for depth in range(1, min(len(self.cuts) + 1, self.devices) + 1):
            for cuts in combinations(self.cuts, depth - 1):
                for used in self._all_used(depth):
                    shares = self.shares([0, *cuts, self.segments], [0, *used])
                    if shares is not None:
                        yield shares

    def _all_used(self, depth: int) -> Iterator[tuple[int, ...]]:
        """Devices in use by the last stage, the last two, and so on."""
        if not self.terms.leaves_none_idle:
            yield from combinations(range(1, self.devices + 1), depth)
            return
        for used in combinations(range(1, self.devices), depth - 1):
            yield *used, self.devices

    def shares(self, bounds: Sequence[int], used: Sequence[int]) -> tuple[Share, ...] | None:
        """`used` counts devices from the end; None where a stage does not fit."""
        found = []
        spans = list(pairwise(bounds))
        for behind, (first, stop) in enumerate(reversed(spans)):
            share = self.share(first, stop, used[behind], behind, used[behind + 1] - used[behind])
            if share is None:
                return None
            found.append(share)
        return tuple(reversed(found))

    # ------------------------------------------------------------ the best of each depth

    def best_layouts(self, *, most: int | None = None, unit: int = 1) -> Iterator[list[tuple[Share, ...]]]:
        """For one stage, two, and so on up to `most`: some, the best first by what `ticks` says.

        The replicas of each stage are a multiple of `unit`.
        """
        ways: dict[tuple[int, int], list[Behind]] = {(self.segments, 0): [NOTHING]}
        places = [0, *self.cuts]
        for behind in range(min(len(places), self.devices // unit, most or self.devices)):
            following: dict[tuple[int, int], list[Behind]] = {}
            for (stop, after), fronts in ways.items():
                for first in places[: bisect_left(places, stop)]:
                    left = self.devices - after - (unit if first else 0)  # one for the stages before
                    for devices in range(unit, left + 1, unit):
                        share = self.share(first, stop, after, behind, devices)
                        if share is not None:
                            place = following.setdefault((first, after + devices), [])
                            place += [front.before(share) for front in fronts]
            ways = {place: self._undominated(fronts) for place, fronts in following.items()}
            whole = [
                front
                for (first, used), fronts in ways.items()
                if first == 0 and (used == self.devices or not self.terms.leaves_none_idle)
                for front in fronts
            ]
            yield [front.shares for front in sorted(whole, key=self._rank)]

    def _rank(self, front: "Behind") -> tuple[float, tuple[Share, ...]]:
        return self.ticks(front), front.shares

    def ticks(self, front: "Behind") -> float:
        """What a step takes, were every tick of the pipeline as long as its longest stage."""
        return front.seconds + (self.microbatches - 1) * front.longest + front.ending

    def _undominated(self, fronts: "list[Behind]") -> "list[Behind]":
        kept: list[Behind] = []
        for front in sorted(fronts, key=self._rank):
            if not any(
                other.longest <= front.longest
                and other.seconds <= front.seconds
                and other.ending <= front.ending
                for other in kept
            ):
                kept.append(front)
        return kept[:MOST_WAYS]

    # ------------------------------------------------------------ what a layout takes

    def least(self, shares: Sequence[Share]) -> float:
        """No simulation takes less: down to each stage, all its work, and up again."""
        down = longest = 0.0
        again = self.microbatches - 1
        for share, after in zip(shares, _afters(shares), strict=True):
            each = self._times(
                share.first, share.stop, after, share.devices, share.recompute, self._each(share)
            )
            once = self._times(
                share.first, share.stop, after, share.devices, share.recompute, self._once(share)
            )
            ending = self._ending(share.first, share.stop, after, share.devices)
            longest = max(longest, down + again * sum(each) + sum(once) + ending)
            first = each if again else once
            down += min(first[0], once[0])
        return longest * (1 - 1e-9)

    def _each(self, share: Share) -> int:
        return ceil(self.size / share.devices)

    def _once(self, share: Share) -> int:
        return ceil(self.last_size / share.devices)

    def simulated(self, shares: Sequence[Share]) -> float:
        orders = name_orders(
            self.terms.schedule,
            stages=len(shares),
            microbatches=self.microbatches,
            recompute=tuple(share.recompute for share in shares),
        )
        stages, there, here = [], [], []
        for share, after in zip(shares, _afters(shares), strict=True):
            span = share.first, share.stop, after, share.devices
            each = self._times(*span, share.recompute, self._each(share))
            once = self._times(*span, share.recompute, self._once(share))
            stages.append(
                StageTimes(
                    (*each, 0.0, 0.0),
                    (*once, 0.0, 0.0),
                    buckets=self._buckets(*span),
                    ending_seconds=self._ending(*span),
                )
            )
            if after:  # the cut is as wide as the stage with fewer replicas
                narrow = min(share.devices, shares[len(stages)].devices)
                forward, backward = self._messages(share.stop, after, narrow)
                there.append(Way(forward.sending, forward.sending, forward.latency))
                here.append(Way(backward.sending, backward.sending, backward.latency))
        return simulate(orders, [Pipeline(tuple(stages), tuple(there), tuple(here))]).seconds

    def plan(self, shares: Sequence[Share]) -> Plan:
        fewest = min(share.devices for share in shares)
        return Plan(
            stages=tuple(
                StagePlan(
                    share.first,
                    share.stop,
                    tuple(range(self.devices - after - share.devices, self.devices - after)),
                    share.recompute,
                )
                for share, after in zip(shares, _afters(shares), strict=True)
            ),
            batch_size=self.batch_size,
            microbatch_size=ceil(ceil(self.batch_size / fewest) / self.microbatches),
            schedule=self.terms.schedule,
            precision=self.costs.profile.precision,
            fingerprint=self.costs.profile.fingerprint,
        )


class Behind(NamedTuple):
    """The stages from some place to the end."""

    seconds: float
    longest: float
    ending: float
    shares: tuple[Share, ...]

    def before(self, share: Share) -> "Behind":
        return Behind(
            self.seconds + share.seconds,
            max(self.longest, share.tick),
            max(self.ending, share.ending),
            (share, *self.shares),
        )


NOTHING = Behind(0.0, 0.0, 0.0, ())


def _afters(shares: Sequence[Share]) -> list[int]:
    """For each stage, the devices of those behind it."""
    left = sum(share.devices for share in shares)
    found = []
    for share in shares:
        left -= share.devices
        found.append(left)
    return found


def _why_nothing_fits(tables: Sequence[Table]) -> str:
    need = min((table.least_need for table in tables), default=inf)
    have = max(machine.memory_bytes for machine in tables[0].ground.cluster.machines)
    if need == inf:
        return (
            "no plan: all micro-batches are larger than any that was measured "
            "(profile larger ones, or ask for more micro-batches)"
        )
    return (
        f"no plan fits: even one segment needs {int(need)} bytes, a device has {have} "
        "(more devices or micro-batches, smaller segments, or devices with more memory)"
    )
