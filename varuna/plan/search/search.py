"""Chooses depth, width, micro-batch, schedule, recompute, cuts and places for the shortest step.

One queue, smallest bound first. What comes out of it is looked at more closely and put back with a
better bound, until a layout comes out that is settled in every detail; that one is simulated.

    (depth, micro-batch, width)        a bound for any cut
             │  places × schedules × recompute
             ▼
    cut so that it fits its memory     a bound for this cut
             │
             ▼
    simulated                          what it takes

The search ends when the smallest bound is above what was found. Every bound is sound, so the answer is
that of simulating them all, where models of few segments are cut in every way. Of others, the cut that
the bound likes best stands for all at first. Then uniform cuts are simulated, so that none of them is
faster; and the cuts of the depths that came near are moved while that helps.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, comb, inf
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.cost.bounds import Open, least_of_any_cut, least_seconds
from varuna.plan.cost.costs import Costs, Sizes
from varuna.plan.cost.forecast import Draft, describe, memories, orders_of, pipelines, plan_of
from varuna.plan.cost.least import Least, least_of
from varuna.plan.cost.memory import Needs, Room
from varuna.plan.cost.simulate import Orders, Pipeline, Simulation, simulate
from varuna.plan.cut.cuts import Cut, Cutter, Mode, Tempo, Work
from varuna.plan.cut.partition import Spans, neighbours, uniform_cuts
from varuna.plan.cut.place import Ground, Placement
from varuna.plan.search.climb import best_uneven, cut_uneven
from varuna.plan.search.messages import (
    EQUAL,
    Need,
    fits_otherwise,
    fits_with_more,
    needs_larger_devices,
    nothing_fits,
    shortage,
    too_few_devices,
    why_slower,
)
from varuna.plan.search.request import PREFERENCE, Asked, depths_of, microbatch_sizes_of, schedules_of
from varuna.plan.search.stages import Terms
from varuna.schedule import splits
from varuna.types import Cluster, Profile, Proposal, ScheduleName, StageMap

FEW_CUTS = 600
"""Where a model can be cut in up to so many ways, counted over all depths, every one is looked at."""
HEADROOM = 0.05
"""The share of each device's memory that jobs leave free, for what fragments."""
FEW_DEVICES = 64
"""On up to so many devices, all numbers of replicas are looked at, and each depth by itself."""
MOST_UNIFORM = 6
"""So many layouts with equal cuts are looked at, on more devices."""
NEAR = 1.15
"""Depths that take up to so much longer than the best are looked at more closely, on few devices."""
MOST_MOVED = 2_000
"""So many stages are simulated at most while the cuts of a depth are moved."""
PROBES = 6
"""Layouts of a depth that are tried in turn, until one fits, where only a notion of it is wanted."""
UNEVEN_GAIN = 1.02
"""An even layout needs no redistribution, and its forecast is the surer one: it must be beaten by so much."""


class Ranking(msgspec.Struct, frozen=True):
    """What a search found, best first; and why other depths were refused.

    There is one proposal for each depth; where stages of the best differ in their replicas, also the
    best of its depth in which they do not.
    """

    proposals: tuple[Proposal, ...]
    refused: tuple[str, ...]
    num_simulated: int

    @property
    def best(self) -> Proposal:
        return self.proposals[0]


def search(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    depths: Sequence[int] | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[ScheduleName] | None = None,
    recompute: bool | None = None,  # None: where memory asks for it, or it pays
    shard_optimizer: bool = False,
    headroom: float = 0.0,  # the share of each device's memory to leave free
    fill_in: bool = False,  # see `Costs`
    every_depth: bool = False,  # something of each, rather than the best of all and some that lost to it
) -> Ranking:
    """The fastest layouts; a PlanError where none fits."""
    if batch_size < 1:
        raise PlanError(f"the batch must hold at least one sample, not {batch_size}")
    if not cluster.machines:
        raise PlanError("the cluster has no machine (name at least one)")
    if not 0.0 <= headroom < 1.0:
        raise PlanError(f"headroom is the share of a device's memory to leave free, 0 to 1, not {headroom}")
    costs = Costs(profile, fill_in=fill_in)
    asked = Asked(
        batch_size,
        depths_of(costs, depths),
        microbatch_sizes_of(costs, microbatch_sizes),
        schedules_of(schedules),
        ("where needed", "everywhere") if recompute is None else ("everywhere",) if recompute else ("never",),
        shard_optimizer,
        headroom,
    )
    ground = Ground(cluster)
    ranking = Search(costs, ground, asked, every_depth=every_depth).run()
    if microbatch_sizes is not None or recompute is not None:  # which an uneven layout chooses by itself
        return ranking
    return _with_uneven(ranking, costs, ground, asked)


def cut_layout(
    profile: Profile,
    cluster: Cluster,
    stage_map: StageMap,  # of the cluster's devices, in order
    *,
    batch_size: int,
    microbatch_size: int,
    schedule: ScheduleName,
    recompute: bool | None = None,  # None: where memory asks for it
    shard_optimizer: bool = False,
    headroom: float = 0.0,
    cuts: Sequence[int] | None = None,  # with which segments stages may begin that differ in their replicas
    one_of_many: bool = False,  # whether others are asked about too
) -> Proposal:
    """The fastest way to cut a model for a layout that is given but for that; a PlanError where none fits.

    It tells of another layout that does, unless this is `one_of_many`: looking for it takes a search.
    """
    costs = Costs(profile)
    mode: Mode = "where needed" if recompute is None else "everywhere" if recompute else "never"
    asked = Asked(
        batch_size,
        depths_of(costs, [len(stage_map)]),
        microbatch_sizes_of(costs, [microbatch_size]),
        schedules_of([schedule]),
        (mode,),
        shard_optimizer,
        headroom,
    )
    ground = Ground(cluster)
    if len({len(ranks) for ranks in stage_map}) > 1:
        found = cut_uneven(
            costs,
            ground,
            stage_map,
            batch_size=batch_size,
            microbatch_size=microbatch_size,
            schedule=schedule,
            recompute=recompute,
            shard_optimizer=shard_optimizer,
            headroom=headroom,
            cuts=cuts,
        )
        return Proposal(found.plan, found.forecast, (), "the shortest step of all cuts")
    return Search(costs, ground, asked).cut(ground.look_at(stage_map), one_of_many=one_of_many)


def _with_uneven(ranking: Ranking, costs: Costs, ground: Ground, asked: Asked) -> Ranking:
    """With the best layout whose stages differ in their replicas, where it is faster than all others."""
    before = ranking.best
    found = best_uneven(
        costs,
        ground,
        batch_size=asked.batch_size,
        depths=asked.depths,
        schedules=asked.schedules,
        shard_optimizer=asked.shard_optimizer,
        terms=Terms(headroom=asked.headroom),
        than=before.forecast.seconds / UNEVEN_GAIN,
    )
    if found is None:
        return ranking
    used = set(found.devices)
    idle = tuple(ground.name(device) for device in range(ground.num_devices) if device not in used)
    widths = "+".join(map(str, found.plan.widths))
    gain = 1 - found.forecast.seconds / before.forecast.seconds
    reason = f"the shortest step of all layouts: {widths} replicas, {gain:.1%} less than the best even one"
    others = [
        msgspec.structs.replace(other, reason=why_slower(other.forecast, found.forecast))
        for other in ranking.proposals
    ]
    return msgspec.structs.replace(
        ranking, proposals=(Proposal(found.plan, found.forecast, idle, reason), *others)
    )


class Node(NamedTuple):
    """Layouts that share a bound."""

    depth: int
    microbatch_size: int
    split: bool  # of the schedules, those with the backward in two parts
    width: int


class Site(NamedTuple):
    """A node with its places."""

    node: Node
    placement: Placement
    tempo: Tempo


class Found(NamedTuple):
    """Of two, the better is the smaller."""

    seconds: float  # rounded, so that equal ones are equal
    num_devices: int
    preference: int
    memory_bytes: int
    draft: Draft
    simulation: Simulation


class Search:
    def __init__(self, costs: Costs, ground: Ground, asked: Asked, *, every_depth: bool = False) -> None:
        self.costs = costs
        self.ground = ground
        self.asked = asked
        self.every_depth = every_depth
        self.found: dict[int, Found] = {}  # by depth
        self._shortest = inf  # of these, in seconds
        self.num_simulated = 0
        self.few_cuts = _num_cuts(costs, ground, asked) <= FEW_CUTS
        self._depths_apart = every_depth and self.few_cuts  # each judged by its own best alone
        self._queue: list[tuple[float, int, Node | Site | Draft]] = []
        self._num_queued = 0
        self._placed: set[Node] = set()
        self._misfits: set[int] = set()  # depths of which some layout did not fit
        self._fit: set[int] = set()  # depths of which some layout does
        self._cramped = False  # whether memory has moved any cut from where it would be best
        self._never_fit: set[object] = set()
        self._bare: dict[tuple[object, ...], tuple[Node, float]] = {}  # simulated, without reductions
        self._bounds: dict[Node, float] = {}
        self._leasts: dict[tuple[int, bool], Least] = {}
        self._rates: dict[tuple[int, bool], float] = {}
        self._sendings: dict[object, tuple[float, ...]] = {}
        self._works: dict[object, Work] = {}
        self._tempos: dict[object, Tempo] = {}
        self._segment_work = costs.work_between(asked.microbatch_sizes[0], range(costs.num_segments + 1))

    def run(self) -> Ranking:
        self._look_at_all()
        if not self.found:
            raise PlanError(self._why_nothing_fits())
        if not self.few_cuts and self.ground.num_devices <= FEW_DEVICES:
            self._look_closer()
        if not self.few_cuts and self.every_depth:
            self._look_at_every_depth()
        return self._rank()

    def _look_closer(self) -> None:
        """At depths that came near, each by itself: what is not cut as bounds like it may gain by that."""
        near = [found.draft.depth for found in self._ranked() if found.seconds <= NEAR * self._shortest]
        for depth in near if len(self.asked.depths) > 1 else ():
            one = Search(self.costs, self.ground, self.asked._replace(depths=(depth,)))
            one.few_cuts = False  # of one depth there may be few, but each with all numbers of replicas
            one._leasts, one._rates, one._sendings = self._leasts, self._rates, self._sendings
            one._works, one._tempos = self._works, self._tempos
            one._look_at_all()
            self.num_simulated += one.num_simulated
            self._keep(one.found[depth])

    def _look_at_all(self) -> None:
        self._put_nodes()
        while self._queue:
            bound, _, item = heapq.heappop(self._queue)
            node = _node_of(item)
            if bound > self._worth(node.depth):
                if not self._depths_apart:
                    break
            elif not self.few_cuts and self._scaled(node) > self._worth(node.depth):
                continue
            elif isinstance(item, Node):
                if item not in self._placed:
                    self._placed.add(item)
                    self._place(item, bound)
            elif isinstance(item, Site):
                following = self._settle(item)
                if self._wider_is_roomier:
                    self._put_narrower(node, following)
            else:
                self._simulate(item)
        if not self.few_cuts:
            self._look_at_uniform_cuts()
            for found in self._ranked()[:3]:
                self._move_cuts(found.draft.depth)

    def cut(self, placement: Placement, *, one_of_many: bool) -> Proposal:
        """The best cut for places that are given, where one micro-batch size and schedule are asked for."""
        (size,), (schedule,) = self.asked.microbatch_sizes, self.asked.schedules
        node = Node(placement.depth, size, splits(schedule), placement.width)
        tempo = self._tempo(node, placement.speeds, self._room(node).sizes, placement)
        self._settle(Site(node, placement, tempo))
        self._simulate_queued(node.depth)
        if not self.found:
            if one_of_many:
                raise PlanError(shortage(node.depth, self._need_at(placement)))
            raise PlanError(self._why_nothing_fits())
        if not self.few_cuts:
            self._move_cuts(node.depth)
        return self._rank().best

    def _look_at_every_depth(self) -> None:
        """Of depths that could not win: the most promising layout of each."""
        self._depths_apart = True
        for depth in self.asked.depths:
            self._look_at_depth(depth)

    def _look_at_depth(self, depth: int) -> None:
        """Its most promising layout that fits."""
        for node in sorted(self._nodes(depth), key=self._bound)[:PROBES]:
            if depth not in self.found:
                self._probe(node)

    def _look_at_uniform_cuts(self) -> None:
        """What somebody would place by hand must not be faster: equal cuts, over as many devices as go in.

        On many devices, of these only the most promising.
        """
        found = []
        for depth in self.asked.depths:
            width = min(self.ground.num_devices // depth, self.asked.batch_size)
            if not width or not self._can_hold(depth):
                continue
            halves = {splits(name) for name in self.asked.schedules}
            nodes = [Node(depth, *each, width) for each in product(self.asked.microbatch_sizes, halves)]
            nodes = [node for node in nodes if self._bound(node) <= self._worth(depth)]
            ways = uniform_cuts(self._segment_work, depth) if nodes else ()
            found += [(self._ticks(node, spans), node, spans) for node, spans in product(nodes, ways)]
        left = inf if self.ground.num_devices <= FEW_DEVICES else MOST_UNIFORM
        for _, node, spans in sorted(found):
            self._queue = []
            self._put_cut(node, spans)
            left -= bool(self._queue)
            self._simulate_queued(node.depth)
            if not left:
                break

    def _ticks(self, node: Node, spans: Spans) -> float:
        """What a step takes about, were every tick of the pipeline as long as its longest stage."""
        microbatches, _ = _spread(self.asked.batch_size, node.width, node.microbatch_size)
        bounds = [0, *(stop for _, stop in spans)]
        work = self.costs.work_between(node.microbatch_size, bounds)
        return sum(work) + (microbatches - 1) * max(work)

    def _put_cut(self, node: Node, spans: Spans) -> None:
        """At all places, with all schedules."""
        for way in self.ground.ways(node.depth, node.width):
            placement = self.ground.place(node.depth, node.width, way)
            if self._bound(node) <= self._worth(node.depth) >= self._bound_at(node, placement):
                site = Site(
                    node, placement, self._tempo(node, placement.speeds, self._room(node).sizes, placement)
                )
                made: dict[object, list[Pipeline]] = {}
                for schedule in self._schedules(node.split):
                    self._put_recut(self._draft(site, schedule, Cut((), ())), [spans], made)

    def _put(self, bound: float, item: Node | Site | Draft) -> None:
        self._num_queued += 1  # of equal bounds, what came first goes first
        heapq.heappush(self._queue, (bound, self._num_queued, item))

    def _ranked(self) -> list[Found]:
        return sorted(self.found.values(), key=lambda found: found[:4])

    def _worth(self, depth: int) -> float:
        """What a layout of this depth must not take longer than, to be of interest."""
        if self._depths_apart:
            return self.found[depth].seconds * (1 + EQUAL) if depth in self.found else inf
        return self._shortest * (1 + EQUAL)

    # ------------------------------------------------------------ which layouts there are

    def _first_widths(self, depth: int, microbatch_size: int) -> list[int]:
        """The most replicas, of micro-batches that none of the smaller sizes could hold.

        From there, fewer are looked at as long as that may pay. What reduces within one machine, or not at
        all, starts afresh.
        """
        batch, sizes = self.asked.batch_size, self.asked.microbatch_sizes
        smaller = sizes[sizes.index(microbatch_size) - 1] if microbatch_size != sizes[0] else 0
        most = min(self.ground.num_devices // depth, batch)
        if smaller:
            most = min(most, (batch - 1) // smaller)
        if most < 1:
            return []
        largest = max(machine.devices for machine in self.ground.cluster.machines)
        afresh = [] if self.few_cuts else [min(largest, most), 1]
        return list(dict.fromkeys([self._step_down(most + 1), *afresh]))

    def _step_down(self, width: int) -> int:
        """The next smaller number of replicas that could be better than this one.

        Of those that leave the largest share of the batch the same, in large clusters: the most that fill
        whole machines, and the fewest.
        """
        batch, below = self.asked.batch_size, width - 1
        if self.ground.num_devices <= FEW_DEVICES:
            return below
        share = ceil(batch / below)
        fewest = ceil(batch / share)
        if self.asked.shard_optimizer and width > self.ground.num_devices:
            return below
        if share == ceil(batch / width):
            return fewest
        devices = self.ground.cluster.machines[0].devices
        return max(fewest, below // devices * devices)

    def _can_hold(self, depth: int) -> bool:
        """Whether what is kept from step to step could fit at all: one look spares many."""
        if depth > self.ground.num_devices:
            return False
        width = self.ground.num_devices // depth if self.asked.shard_optimizer else 1
        needs = Needs(self.costs, Room(self.costs.sizes(self.asked.microbatch_sizes[0]), width, 1, width > 1))
        fits = needs.least_steady <= depth * self.ground.largest_bytes * (1 - self.asked.headroom)
        if not fits:
            self._misfits.add(depth)
        return fits

    def _nodes(self, depth: int) -> list[Node]:
        if not self._can_hold(depth):
            return []
        return [
            Node(depth, size, split, width)
            for size in self.asked.microbatch_sizes
            for width in self._first_widths(depth, size)
            for split in sorted({splits(name) for name in self.asked.schedules})
        ]

    def _put_nodes(self) -> None:
        """All depths and micro-batches, each with the most replicas.

        Of a few depths the most promising one is gone through to the end first: with something found,
        much else need not be looked at.
        """
        for depth in self.asked.depths:
            for node in self._nodes(depth):
                self._put(self._bound(node), node)
        if not self.few_cuts:
            for depth in self.asked.depths:
                if depth & (depth - 1) == 0 or depth == self.asked.depths[-1]:
                    self._look_at_depth(depth)

    # ------------------------------------------------------------ what they take at least

    def _bound(self, node: Node) -> float:
        """For any cut and any places."""
        if node not in self._bounds:
            self._bounds[node] = self._bound_at(node, None)
        return self._bounds[node]

    def _bound_at(self, node: Node, placement: Placement | None) -> float:
        """For any cut; where the places are known, with messages and reductions."""
        profile, depth = self.costs.profile, node.depth
        microbatches, last_size = _spread(self.asked.batch_size, node.width, node.microbatch_size)
        last = self._least(last_size, node.split)
        each = self._least(node.microbatch_size, node.split) if microbatches > 1 else last
        overhead = depth * profile.overheads.instruction_seconds
        twice, twice_elements = self.costs.tied_twice(0, self.costs.num_segments)
        elements = self.costs.num_trained[-1] - twice_elements
        layout = Open(
            depth,
            microbatches,
            each.forward + overhead,
            each.backward + overhead,
            each.weights + overhead if node.split else 0.0,
            last.forward + overhead,
            last.backward + overhead,
            last.weights + overhead if node.split else 0.0,
            (microbatches - 1) * each.heaviest(depth) + last.heaviest(depth),
            each.forward_share,
            depth * profile.overheads.step_seconds
            + elements
            * profile.optimizer.seconds_per_element
            / (node.width if self.asked.shard_optimizer else 1),
        )
        if placement is None:
            return least_of_any_cut(layout)
        if node.width > 1:
            rate = self._rate(node.width, any(placement.between))
            hidden = (last.weights if node.split else last.backward) + overhead
            reduction = (self.costs.gradient_bytes[-1] - twice) * rate
            layout = layout._replace(
                at_the_end=layout.at_the_end + max(0.0, reduction - hidden),
                lanes=len(set(placement.lanes)) if all(placement.between) else 0,
                longest_lane=max(Counter(placement.lanes).values()),
                reduction=rate * each.gradient_bytes,
            )
        return least_of_any_cut(layout._replace(messages=self._messages(node, placement, last_size)))

    def _messages(self, node: Node, placement: Placement, last_size: int) -> tuple[float, float]:
        """Down the pipeline, at least and at most, wherever it is cut."""
        if node.depth == 1:
            return 0.0, 0.0
        size = min(node.microbatch_size, ceil(self.asked.batch_size / node.width))
        fewest, most_bytes = self.costs.extremes(last_size)[0], self.costs.extremes(size)[1]
        least = most = 0.0
        hops = Counter(zip(placement.kinds[0].crossing, placement.crowding, strict=True))
        for (crossing, crowd), number in hops.items():
            low = self.costs.message(fewest, between=crossing)
            high = self.costs.message(most_bytes, between=crossing)
            least += number * max(0.0, low.sending * crowd + low.latency - low.leaving)
            most += number * (high.sending * crowd + high.latency)
        return least, most

    def _least(self, size: int, split: bool) -> Least:
        key = (size, split)
        if key not in self._leasts:
            self._leasts[key] = least_of(self.costs, size, split, self.ground.fastest)
        return self._leasts[key]

    def _rate(self, width: int, between: bool) -> float:
        """Seconds for each byte that an all-reduce over so many ranks takes at least, whatever its size."""
        key = (width, between)
        if key not in self._rates:
            costs = self.costs
            measured = costs.reduction_sizes(width, between=between)
            taken = [costs.reduce_seconds(width, size, between=between) for size in measured]
            beyond = costs.reduce_seconds(width, 2 * measured[-1], between=between) - taken[-1]
            rates = [seconds / size for seconds, size in zip(taken, measured, strict=True)]
            self._rates[key] = min(*rates, beyond / measured[-1])
        return self._rates[key]

    # ------------------------------------------------------------ a closer look

    def _probe(self, node: Node) -> None:
        """Looks at one node to the end."""
        queue, self._queue = self._queue, []
        self._place(node, 0.0)
        sites = [item for _, _, item in self._queue if isinstance(item, Site)]
        self._queue = []
        for site in sites:
            self._settle(site)
        drafts = [item for item in sorted(self._queue) if isinstance(item[2], Draft)]
        self._queue = queue
        for bound, _, draft in drafts[:1]:
            if bound <= self._worth(node.depth) and isinstance(draft, Draft):
                self._simulate(draft)

    def _place(self, node: Node, bound: float) -> None:
        """Finds places, and a bound that knows of messages and reductions."""
        room = self._room(node)
        needs = Needs(self.costs, room)
        following = inf if not self.few_cuts else 0.0  # for fewer replicas, as far as this number tells
        fits = False
        for way in self.ground.ways(node.depth, node.width):
            worth = self._worth(node.depth)
            tempo = self._tempo(node, self.ground.speeds(node.depth, node.width, way), room.sizes)
            if not self.few_cuts and not tempo.possible(worth, recompute=self._only_recompute):
                fits = True
                continue
            placement = self.ground.place(node.depth, node.width, way)
            if needs.least_steady > sum(self._memory_bytes(placement)):
                self._misfits.add(node.depth)
                following = 0.0
                continue
            site = Site(node, placement, self._tempo(node, placement.speeds, room.sizes, placement))
            least = max(bound, self._bound_at(node, placement))
            if self._cramped and self._wider_is_roomier and least <= worth and not self._has_cut(site, worth):
                if self._has_cut(site, inf):
                    fits = True
                else:
                    self._misfits.add(node.depth)
                    following = 0.0
                continue
            fits = True
            if self.few_cuts:
                following = 0.0
            elif least > worth:
                following = min(following, self._following(site, least, self._bound(node)))
            else:
                promised, bare = self._promise(site)
                least = max(least, promised)
                if least > worth or not self._wider_is_roomier:  # else it is settled first, and tells more
                    following = min(following, self._following(site, promised, bare))
            if least <= worth:
                self._put(least, site)
        self._put_narrower(node, following, fits=fits)

    def _has_cut(self, site: Site, seconds: float) -> bool:
        """Whether some cut fits its memory, and is not known to take longer than so long."""
        needs = Needs(self.costs, self._room(site.node))
        memory_bytes = self._memory_bytes(site.placement)
        mode = self.asked.modes[0]  # of several, the one that leaves most open
        for schedule in self._schedules(site.node.split):
            if (site.node[:3], memory_bytes, schedule, mode, site.node.width == 1) not in self._never_fit:
                cutter = self._cutter(site, needs, schedule, mode)
                if cutter.possible(seconds):
                    self._fit.add(site.node.depth)
                    return True
        return False

    def _following(self, site: Site, seconds: float, bare: float) -> float:
        """What this site's time tells of fewer replicas: their reductions may be quicker, nothing else is."""
        if self.ground.unequal:  # fewer may do without the slower machines
            return 0.0
        narrower = self._step_down(max(2, site.node.width))
        rate = self._rate_of(site.placement)  # zero, where larger reductions took no longer when measured
        quicker = min(1.0, self._least_rate(narrower) / rate) if rate else 0.0
        return bare + quicker * (seconds - bare)

    def _put_narrower(self, node: Node, following: float, *, fits: bool = True) -> None:
        """Fewer replicas, of which each gets more; unless they cannot do better than these."""
        if node.width == 1 or following == inf:
            return
        narrower = node._replace(width=self._step_down(node.width))
        if not fits and self._wider_is_roomier:  # but a single replica has no buckets
            narrower = node._replace(width=1)
        least = self._bound(narrower)
        self._put(max(least, following + least - self._bound(node)), narrower)

    def _rate_of(self, placement: Placement) -> float:
        """Of all-reduces; a single replica has none, and nothing is quicker."""
        return self._rate(placement.width, any(placement.between)) if placement.width > 1 else inf

    def _least_rate(self, width: int) -> float:
        """Wherever so many replicas are placed."""
        if width == 1:
            return 0.0
        largest = max(machine.devices for machine in self.ground.cluster.machines)
        places = {len(self.ground.cluster.machines) > 1, width > largest}
        return min(self._rate(width, between) for between in places)

    @property
    def _wider_is_roomier(self) -> bool:
        """Whether fewer replicas never hold less: each gets more samples, and none a larger device.

        What was measured may say that more samples hold less; where cuts are few, it is taken at its word.
        """
        return not (self.few_cuts or self.asked.shard_optimizer or self.ground.unequal)

    @property
    def _only_recompute(self) -> bool:
        return self.asked.modes == ("everywhere",)

    def _promise(self, site: Site) -> tuple[float, float]:
        """The bounds of the cut that they like best, with memory enough."""
        recompute = self._only_recompute
        cut = Cut(site.tempo.fastest(recompute), (recompute,) * site.node.depth)
        placement = site.placement._replace(kinds=site.placement.kinds[:1])  # the slowest, or near it
        draft = self._draft(site._replace(placement=placement), self._schedules(site.node.split)[0], cut)
        orders = orders_of(draft)
        orders = orders._replace(limits=(orders.microbatches,) * site.node.depth)
        return _least_seconds(orders, pipelines(self.costs, draft, orders))

    def _scaled(self, node: Node) -> float:
        """What a simulation with more replicas tells: the same without reductions, grown as the bounds do."""
        wider, seconds = self._bare.get(node[:3], (node, 0.0))
        if wider.width <= node.width or self.ground.unequal:  # fewer may do without the slower machines
            return 0.0
        return seconds + self._bound(node) - self._bound(wider)

    def _schedules(self, split: bool) -> list[ScheduleName]:
        return [name for name in self.asked.schedules if splits(name) == split]

    def _settle(self, site: Site) -> float:
        """Chooses schedule, recompute and cut, in all ways that fit; what follows for fewer replicas."""
        node, placement, tempo = site
        needs = Needs(self.costs, self._room(node))
        memory_bytes = self._memory_bytes(placement)
        made: dict[object, list[Pipeline]] = {}  # schedules that run the same instructions share times
        following = inf
        for schedule in self._schedules(node.split):
            cuts: dict[Cut, None] = {}
            for mode in self.asked.modes:
                key = (node[:3], memory_bytes, schedule, mode, node.width == 1)
                if key in self._never_fit:
                    continue
                cutter = self._cutter(site, needs, schedule, mode)
                fitting = dict.fromkeys(cutter.cuts(self._worth(node.depth)))
                cuts |= fitting
                if fitting:
                    self._fit.add(node.depth)
                    self._cramped |= not self.few_cuts and tempo.fastest(self._only_recompute) not in {
                        cut.spans for cut in fitting
                    }
                elif not cutter.possible(inf):
                    self._misfits.add(node.depth)
                    if node.width > 1:  # a single replica has no buckets
                        following = min(following, self._bound(node))
                    if self._wider_is_roomier:
                        self._never_fit.add(key)
            for cut in cuts:
                least, bare = self._put_draft(self._draft(site, schedule, cut), made)
                following = min(following, self._following(site, least, bare))
        return following

    def _put_draft(self, draft: Draft, made: dict[object, list[Pipeline]]) -> tuple[float, float]:
        orders = orders_of(draft)
        key = (draft.spans, tuple(["R" in letters for letters in orders.letters]))
        if key not in made:
            made[key] = pipelines(self.costs, draft, orders)
        least, bare = _least_seconds(orders, made[key])
        if least <= self._worth(draft.depth):
            self._put(least, draft)
        return least, bare

    def _simulate(self, draft: Draft) -> None:
        orders = orders_of(draft)
        simulation = simulate(orders, pipelines(self.costs, draft, orders))
        self.num_simulated += 1
        found = Found(
            float(f"{simulation.seconds:.9e}"),
            draft.depth * draft.width,
            PREFERENCE.index(draft.schedule),
            max(memory.total for memory in memories(self.costs, draft)),
            draft,
            simulation,
        )
        self._keep(found)
        node = _node_of(draft)
        other, bare = self._bare.get(node[:3], (node, inf))
        if other.width <= node.width:
            self._bare[node[:3]] = (node, min(simulation.bare_seconds, bare if other == node else inf))

    def _keep(self, found: Found) -> None:
        before = self.found.get(found.draft.depth)
        if before is None or found[:4] < before[:4]:
            self.found[found.draft.depth] = found
            self._shortest = min(self._shortest, found.seconds)

    def _move_cuts(self, depth: int) -> None:
        """Moves single segments over single cuts while the step becomes shorter by it."""
        before = None
        stop = self.num_simulated + MOST_MOVED // depth
        while before is not self.found[depth] and self.num_simulated < stop:
            before = self.found[depth]
            self._queue = []
            ways = neighbours(before.draft.spans, range(self.costs.num_segments + 1))
            self._put_recut(before.draft, ways, {})
            self._simulate_queued(depth, stop)

    def _put_recut(self, draft: Draft, ways: Iterable[Spans], made: dict[object, list[Pipeline]]) -> None:
        """Drafts that are cut otherwise, in all ways that may be of interest and fit."""
        cutters = [self._cutter_of(draft, mode) for mode in self.asked.modes]
        tempo, worth = cutters[0].tempo, self._worth(draft.depth)
        for spans in ways:
            if not all(
                tempo.done_within(worth, stage, *span, self._only_recompute)
                for stage, span in enumerate(spans)
                if draft.spans[stage : stage + 1] != (span,)
            ):
                continue
            for recompute in {cutter.recompute(spans) for cutter in cutters}:
                if recompute is not None:
                    self._put_draft(draft._replace(spans=spans, recompute=recompute), made)

    def _simulate_queued(self, depth: int, stop: float = inf) -> None:
        """Drafts of a depth alone, as long as they may be of interest."""
        while self._queue and self._queue[0][0] <= self._worth(depth) and self.num_simulated < stop:
            draft = heapq.heappop(self._queue)[2]
            assert isinstance(draft, Draft)
            self._simulate(draft)

    def _room(self, node: Node) -> Room:
        microbatches, last_size = _spread(self.asked.batch_size, node.width, node.microbatch_size)
        return Room(
            self.costs.sizes(node.microbatch_size if microbatches > 1 else last_size),
            node.width,
            ceil(self.asked.batch_size / node.width),
            self.asked.shard_optimizer,
        )

    def _memory_bytes(self, placement: Placement) -> tuple[int, ...]:
        return tuple(int(memory * (1 - self.asked.headroom)) for memory in placement.memory_bytes)

    def _tempo(
        self, node: Node, speeds: tuple[float, ...], sizes: Sizes, placement: Placement | None = None
    ) -> Tempo:
        # A smaller last micro-batch counts for as much of one as it holds.
        microbatches, last_size = _spread(self.asked.batch_size, node.width, node.microbatch_size)
        whole = microbatches - 1 + (last_size / sizes.microbatch_size)
        kind = (sizes.microbatch_size, node.split)
        if kind not in self._works:
            self._works[kind] = Work(self.costs, sizes, split=node.split)
        sending: tuple[tuple[float, ...], ...] = ()
        if placement is not None and self.costs.cuts_differ and not self.few_cuts:
            hops = zip(placement.kinds[0].crossing, placement.crowding, strict=True)
            sending = tuple(self._sending(sizes, *hop) for hop in hops)
        key = (*kind, whole, speeds, sending)
        if key not in self._tempos:
            self._tempos[key] = Tempo(self._works[kind], microbatches=whole, speeds=speeds, sending=sending)
        return self._tempos[key]

    def _sending(self, sizes: Sizes, crossing: bool, crowd: int) -> tuple[float, ...]:
        """For each cut the time for which a micro-batch keeps it busy, in the busier direction."""
        key = (sizes.microbatch_size, crossing, crowd)
        if key not in self._sendings:
            self._sendings[key] = tuple(
                crowd * max(self.costs.message(b, between=crossing).sending for b in both)
                for both in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)
            )
        return self._sendings[key]

    def _draft(self, site: Site, schedule: ScheduleName, cut: Cut) -> Draft:
        return Draft(
            cut.spans,
            cut.recompute,
            schedule,
            site.node.microbatch_size,
            self.asked.batch_size,
            site.placement,
            self.asked.shard_optimizer,
        )

    def _cutter(self, site: Site, needs: Needs, schedule: ScheduleName, mode: Mode) -> Cutter:
        return Cutter(
            site.tempo,
            needs,
            schedule=schedule,
            mode=mode,
            memory_bytes=self._memory_bytes(site.placement),
            every=self.few_cuts,
        )

    def _cutter_of(self, draft: Draft, mode: Mode) -> Cutter:
        node = _node_of(draft)
        room = self._room(node)
        tempo = self._tempo(node, draft.placement.speeds, room.sizes, draft.placement)
        site = Site(node, draft.placement, tempo)
        return self._cutter(site, Needs(self.costs, room), draft.schedule, mode)

    # ------------------------------------------------------------ saying so

    def _rank(self) -> Ranking:
        ranked = self._ranked()
        forecasts = []
        for found in ranked:
            self.costs.start_notes()
            pipelines(self.costs, found.draft, orders_of(found.draft))
            forecasts.append(describe(self.costs, found.draft, found.simulation))
        proposals = tuple(
            Proposal(
                plan_of(found.draft, self.costs.profile),
                forecast,
                self._idle(found.draft),
                why_slower(forecast, forecasts[0]) if index else "the shortest step of all layouts",
            )
            for index, (found, forecast) in enumerate(zip(ranked, forecasts, strict=True))
        )
        needs = {depth: self._least_need(depth) for depth in sorted(self._misfits - self._fit)}
        # Where the least is there, something fits that could not have won, and so was not looked at.
        refused = tuple(shortage(depth, need) for depth, need in needs.items() if need.missing > 0)
        return Ranking(proposals, refused, self.num_simulated)

    def _idle(self, draft: Draft) -> tuple[str, ...]:
        used = {device for replica in draft.placement.replicas for device in replica}
        return tuple(
            self.ground.name(device) for device in range(self.ground.num_devices) if device not in used
        )

    def _least_need(self, depth: int) -> Need:
        """Of the layout of a depth that needs least."""
        width = 1
        if self.asked.shard_optimizer:
            width = min(max(1, self.ground.num_devices // depth), self.asked.batch_size)
        return self._need_at(self.ground.place(depth, width, "stages together"))

    def _need_at(self, placement: Placement) -> Need:
        """Of the stage that lacks most, however the model is cut for these places."""
        schedules = self.asked.schedules
        draft = Draft(
            (),
            (),
            "1f1b" if "1f1b" in schedules else schedules[0],
            self.asked.microbatch_sizes[0],
            self.asked.batch_size,
            placement,
            self.asked.shard_optimizer,
        )
        cutter = self._cutter_of(draft, self.asked.modes[-1])
        need, stage = cutter.least_need()
        return Need(stage, need, cutter.memory_bytes[stage])

    def _why_nothing_fits(self) -> str:
        possible = [depth for depth in self.asked.depths if depth <= self.ground.num_devices]
        if not possible:
            return too_few_devices(min(self.asked.depths), self.ground.num_devices)
        needs = {depth: self._least_need(depth) for depth in possible}
        depth = min(possible, key=lambda depth: needs[depth].num_bytes / needs[depth].device_bytes)
        return nothing_fits(
            depth,
            needs[depth],
            microbatch_size=self.asked.microbatch_sizes[0],
            recompute=self.asked.modes[-1] == "everywhere",
            way_out=self._way_out(needs[depth]),
        )

    def _way_out(self, need: Need) -> str:
        """The nearest layout that fits: by asking for less, or by having more."""
        everything = Asked(
            self.asked.batch_size,
            depths_of(self.costs, None),
            self.costs.microbatch_sizes(),
            PREFERENCE,
            ("where needed", "everywhere"),
            self.asked.shard_optimizer,
            self.asked.headroom,
        )
        if everything != self.asked:
            try:
                return fits_otherwise(Search(self.costs, self.ground, everything).run().best.plan)
            except PlanError:
                pass
        machine = max(self.ground.cluster.machines, key=lambda machine: machine.memory_bytes)
        for depth in range(self.ground.num_devices + 1, self.costs.num_segments + 1):
            wider = Ground(Cluster((msgspec.structs.replace(machine, devices=depth),)))
            if Search(self.costs, wider, everything)._least_need(depth).missing <= 0:
                return fits_with_more(depth, self.ground.num_devices)
        return needs_larger_devices(need, spreads_already=self.asked.shard_optimizer)


def _node_of(item: Node | Site | Draft) -> Node:
    if isinstance(item, Draft):
        return Node(item.depth, item.microbatch_size, splits(item.schedule), item.width)
    return item.node if isinstance(item, Site) else item


def _least_seconds(orders: Orders, replicas: Sequence[Pipeline]) -> tuple[float, float]:
    bounds = [least_seconds(orders, pipeline) for pipeline in replicas]
    return max(least for least, _ in bounds), max(bare for _, bare in bounds)


def _spread(batch_size: int, width: int, microbatch_size: int) -> tuple[int, int]:
    """(number of micro-batches, size of the last) of the replica that gets most."""
    share = ceil(batch_size / width)
    microbatches = ceil(share / microbatch_size)
    return microbatches, share - (microbatches - 1) * microbatch_size


def _num_cuts(costs: Costs, ground: Ground, asked: Asked) -> int:
    return sum(
        comb(costs.num_segments - 1, depth - 1) for depth in asked.depths if depth <= ground.num_devices
    )
