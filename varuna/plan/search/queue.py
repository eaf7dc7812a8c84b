"""Best-first search over layouts with equal numbers of replicas.

One queue holds everything that is still open, smallest lower bound first. An item that comes out is refined
and put back with a better bound, until a candidate comes out: a layout that is complete in every detail.
Candidates are simulated.

    Node: depth, micro-batch, replicas       bound for any cut
             |  placements
    PlacedNode                               bound with messages and reductions
             |  schedules, recompute, cuts that fit in memory
    CandidateLayout                          bound for this cut
             |
    simulated step

The search ends when the smallest bound exceeds the best simulated step. All bounds are sound. If a model has
few cuts, all of them become candidates, and the result equals that of simulating every layout. Otherwise only
the cut with the smallest bound becomes a candidate. Afterwards the search simulates uniform cuts, so that
none of them is faster than the result, and moves single cuts of the best depths as long as that helps.
"""

import heapq
from collections.abc import Iterable
from itertools import product
from math import inf
from typing import NamedTuple

from varuna.plan.cost.forecast import CandidateLayout, memories, orders_of, pipelines
from varuna.plan.cost.simulate import PipelineTimes, Simulation, simulate
from varuna.plan.cut.cuts import Cut
from varuna.plan.cut.partition import Spans, adjacent_cuts, uniform_cuts
from varuna.plan.cut.place import Placement
from varuna.plan.search.bounds import LayoutBounds, least_of_replicas
from varuna.plan.search.request import PREFERENCE
from varuna.plan.search.space import FEW_DEVICES, LayoutSpace, Node, PlacedNode, node_of
from varuna.schedule import splits

EQUAL = 1e-9
"""Steps that differ by less than this share count as equally long."""
MOST_UNIFORM = 6
"""Uniform cuts to simulate, on more than `FEW_DEVICES` devices."""
NEAR = 1.15
"""Search a depth separately if its best step takes at most this many times the best of all."""
MOST_MOVED = 2_000
"""Stages to simulate while the cuts of a depth are moved."""
PROBES = 6
"""Nodes of a depth to probe until one fits."""


class SimulatedLayout(NamedTuple):
    """A candidate and its simulation; the first four fields order layouts, best first."""

    seconds: float  # rounded, so that equal steps compare equal
    num_devices: int
    preference: int
    memory_bytes: int
    candidate: CandidateLayout
    simulation: Simulation


class LayoutSearch:
    def __init__(
        self, space: LayoutSpace, bounds: LayoutBounds | None = None, *, every_depth: bool = False
    ) -> None:
        self.space = space
        self.bounds = bounds or LayoutBounds(space)
        self.found: dict[int, SimulatedLayout] = {}  # best of each depth
        self.num_simulated = 0
        self.fitting_depths: set[int] = set()  # depths with a layout that fits
        self.misfit_depths: set[int] = set()  # depths with a layout that does not fit
        self._every_depth = every_depth
        self._separate_depths = every_depth and space.has_few_cuts  # compare a layout only with its own depth
        self._shortest = inf  # seconds, over all depths
        self._queue: list[tuple[float, int, Node | PlacedNode | CandidateLayout]] = []
        self._num_queued = 0
        self._expanded: set[Node] = set()
        self._never_fit: set[object] = set()
        self._memory_binds = False  # memory has moved some cut away from its fastest place

    def run(self) -> None:
        self._search_all()
        if self.space.has_few_cuts or not self.found:
            return
        if self.space.num_devices <= FEW_DEVICES and len(self.space.request.depths) > 1:
            self._search_near_depths()
        if self._every_depth:
            self._separate_depths = True
            for depth in self.space.request.depths:
                self._probe_depth(depth)

    def cut(self, placement: Placement) -> None:
        """Search only the cuts for one placement; the request has one micro-batch size and one schedule."""
        (size,), (schedule,) = self.space.request.microbatch_sizes, self.space.request.schedules
        node = Node(placement.depth, size, splits(schedule), placement.width)
        self._put_candidates(self.space.place(node, placement))
        self._simulate_queued(node.depth)
        if self.found and not self.space.has_few_cuts:
            self._move_cuts(node.depth)

    def ranked(self) -> list[SimulatedLayout]:
        return sorted(self.found.values(), key=lambda found: found[:4])

    def _search_all(self) -> None:
        self._put_nodes()
        while self._queue:
            bound, _, item = heapq.heappop(self._queue)
            node = node_of(item)
            limit = self._limit(node.depth)
            if bound > limit:
                if not self._separate_depths:
                    break
            elif not self.space.has_few_cuts and self.bounds.from_more_replicas(node) > limit:
                continue
            elif isinstance(item, Node):
                if item not in self._expanded:
                    self._expanded.add(item)
                    self._put_placements(item, bound)
            elif isinstance(item, PlacedNode):
                narrower = self._put_candidates(item)
                if self.space.fewer_replicas_need_more_memory:
                    self._put_fewer_replicas(node, narrower)
            else:
                self._simulate(item)
        if not self.space.has_few_cuts:
            self._try_uniform_cuts()
            for found in self.ranked()[:3]:
                self._move_cuts(found.candidate.depth)

    def _put(self, bound: float, item: Node | PlacedNode | CandidateLayout) -> None:
        self._num_queued += 1  # of equal bounds, the first item comes out first
        heapq.heappush(self._queue, (bound, self._num_queued, item))

    def _limit(self, depth: int) -> float:
        """Return the seconds above which a layout of this depth is of no interest."""
        if self._separate_depths:
            return self.found[depth].seconds * (1 + EQUAL) if depth in self.found else inf
        return self._shortest * (1 + EQUAL)

    def _put_nodes(self) -> None:
        """Put all depths and micro-batches, each with the most replicas.

        Depths that are powers of two are probed first: once something is found, much can be skipped.
        """
        depths = self.space.request.depths
        for depth in depths:
            nodes = self.space.nodes(depth)
            if not nodes and depth <= self.space.num_devices:
                self.misfit_depths.add(depth)
            for node in nodes:
                self._put(self.bounds.of_node(node), node)
        if not self.space.has_few_cuts:
            for depth in depths:
                if depth & (depth - 1) == 0 or depth == depths[-1]:
                    self._probe_depth(depth)

    def _put_placements(self, node: Node, bound: float) -> None:
        """Put a node with each placement, and the next smaller number of replicas."""
        space, few_cuts = self.space, self.space.has_few_cuts
        least_steady = space.memory_totals(node).least_steady
        must_check_memory = self._memory_binds and space.fewer_replicas_need_more_memory
        narrower = 0.0 if few_cuts else inf  # bound for fewer replicas
        fits = False
        for way in space.cluster_map.arrangements(node.depth, node.width):
            limit = self._limit(node.depth)
            time_limits = space.time_limits(node, space.cluster_map.speeds(node.depth, node.width, way))
            if not few_cuts and not time_limits.possible(limit, recompute=space.recomputes_everywhere):
                fits = True
                continue
            placement = space.cluster_map.place(node.depth, node.width, way)
            if least_steady > sum(space.memory_bytes(placement)):
                self.misfit_depths.add(node.depth)
                narrower = 0.0
                continue
            placed = space.place(node, placement)
            least = max(bound, self.bounds.of_placement(node, placement))
            if least <= limit and must_check_memory and not self._has_cut(placed, limit):
                if self._has_cut(placed, inf):
                    fits = True
                else:
                    self.misfit_depths.add(node.depth)
                    narrower = 0.0
                continue
            fits = True
            if few_cuts:
                narrower = 0.0
            elif least > limit:
                bare = self.bounds.of_node(node)
                narrower = min(narrower, self.bounds.of_fewer_replicas(placed, least, bare))
            else:
                seconds, bare = self.bounds.of_fastest_cut(placed)
                least = max(least, seconds)
                # Otherwise its candidates come first: they give a better bound for fewer replicas.
                if least > limit or not space.fewer_replicas_need_more_memory:
                    narrower = min(narrower, self.bounds.of_fewer_replicas(placed, seconds, bare))
            if least <= limit:
                self._put(least, placed)
        self._put_fewer_replicas(node, narrower, fits=fits)

    def _put_fewer_replicas(self, node: Node, narrower: float, *, fits: bool = True) -> None:
        """Put the next smaller number of replicas, unless it cannot be better (a bound of infinity)."""
        if node.width == 1 or narrower == inf:
            return
        following = node._replace(width=self.space.fewer_replicas(node.width))
        if not fits and self.space.fewer_replicas_need_more_memory:  # but a single replica has no buckets
            following = node._replace(width=1)
        least = self.bounds.of_node(following)
        self._put(max(least, narrower + least - self.bounds.of_node(node)), following)

    def _has_cut(self, placed: PlacedNode, seconds: float) -> bool:
        """Return True if some cut fits in memory and may take at most so many seconds."""
        space, node = self.space, placed.node
        needs = space.memory_totals(node)
        memory_bytes = space.memory_bytes(placed.placement)
        mode = space.request.modes[0]  # the least restrictive one
        for schedule in space.schedules(node.split):
            key = (node[:3], memory_bytes, schedule, mode, node.width == 1)
            if key not in self._never_fit and space.cutter(placed, needs, schedule, mode).possible(seconds):
                self.fitting_depths.add(node.depth)
                return True
        return False

    def _put_candidates(self, placed: PlacedNode) -> float:
        """Put all schedules, recompute modes and cuts that fit; return a bound for fewer replicas."""
        space, (node, placement, time_limits) = self.space, placed
        needs = space.memory_totals(node)
        memory_bytes = space.memory_bytes(placement)
        made: dict[object, list[PipelineTimes]] = {}  # schedules with the same instructions share times
        narrower = inf
        for schedule in space.schedules(node.split):
            cuts: dict[Cut, None] = {}
            for mode in space.request.modes:
                key = (node[:3], memory_bytes, schedule, mode, node.width == 1)
                if key in self._never_fit:
                    continue
                cutter = space.cutter(placed, needs, schedule, mode)
                fitting = dict.fromkeys(cutter.cuts(self._limit(node.depth)))
                cuts |= fitting
                if fitting:
                    self.fitting_depths.add(node.depth)
                    if not space.has_few_cuts:
                        fastest = time_limits.fastest(space.recomputes_everywhere)
                        self._memory_binds |= fastest not in {cut.spans for cut in fitting}
                elif not cutter.possible(inf):
                    self.misfit_depths.add(node.depth)
                    if node.width > 1:  # a single replica has no buckets
                        narrower = min(narrower, self.bounds.of_node(node))
                    if space.fewer_replicas_need_more_memory:
                        self._never_fit.add(key)
            for cut in cuts:
                least, bare = self._put_candidate(space.candidate(node, placement, schedule, cut), made)
                narrower = min(narrower, self.bounds.of_fewer_replicas(placed, least, bare))
        return narrower

    def _put_candidate(
        self, candidate: CandidateLayout, made: dict[object, list[PipelineTimes]]
    ) -> tuple[float, float]:
        """Put a candidate if its bound is small enough; return its bounds with and without reductions."""
        orders = orders_of(candidate)
        key = (candidate.spans, tuple(["R" in letters for letters in orders.letters]))
        if key not in made:
            made[key] = pipelines(self.space.costs, candidate, orders)
        least, bare = least_of_replicas(orders, made[key])
        if least <= self._limit(candidate.depth):
            self._put(least, candidate)
        return least, bare

    def _simulate(self, candidate: CandidateLayout) -> None:
        orders = orders_of(candidate)
        simulation = simulate(orders, pipelines(self.space.costs, candidate, orders))
        self.num_simulated += 1
        self._keep(
            SimulatedLayout(
                float(f"{simulation.seconds:.9e}"),
                candidate.depth * candidate.width,
                PREFERENCE.index(candidate.schedule),
                max(memory.total for memory in memories(self.space.costs, candidate)),
                candidate,
                simulation,
            )
        )
        self.bounds.record_simulated(node_of(candidate), simulation.bare_seconds)

    def _keep(self, found: SimulatedLayout) -> None:
        before = self.found.get(found.candidate.depth)
        if before is None or found[:4] < before[:4]:
            self.found[found.candidate.depth] = found
            self._shortest = min(self._shortest, found.seconds)

    def _simulate_queued(self, depth: int, stop: float = inf) -> None:
        """Simulate queued candidates of one depth while their bounds are small enough."""
        while self._queue and self._queue[0][0] <= self._limit(depth) and self.num_simulated < stop:
            candidate = heapq.heappop(self._queue)[2]
            assert isinstance(candidate, CandidateLayout)
            self._simulate(candidate)

    def _probe_depth(self, depth: int) -> None:
        """Simulate the best candidate of the most promising node that fits, unless the depth has one."""
        queue = self._queue
        for node in sorted(self.space.nodes(depth), key=self.bounds.of_node)[:PROBES]:
            if depth in self.found:
                break
            self._queue = []
            self._put_placements(node, 0.0)
            placed = [item for _, _, item in self._queue if isinstance(item, PlacedNode)]
            self._queue = []
            for item in placed:
                self._put_candidates(item)
            self._simulate_queued(depth, self.num_simulated + 1)
        self._queue = queue

    def _search_near_depths(self) -> None:
        """Search each near-best depth separately: cuts other than the one with the best bound may gain."""
        near = [found.candidate.depth for found in self.ranked() if found.seconds <= NEAR * self._shortest]
        for depth in near:
            space = self.space.of_depth(depth)
            one = LayoutSearch(space, self.bounds.of_space(space))
            one._search_all()
            self.num_simulated += one.num_simulated
            self._keep(one.found[depth])

    def _try_uniform_cuts(self) -> None:
        """Simulate equal cuts with the most replicas: a layout made by hand must not be faster."""
        space, found = self.space, []
        for depth in space.request.depths:
            if not space.can_hold_model(depth):
                continue
            kinds = product(space.request.microbatch_sizes, space.splits)
            nodes = [Node(depth, *kind, space.most_replicas(depth)) for kind in kinds]
            nodes = [node for node in nodes if self.bounds.of_node(node) <= self._limit(depth)]
            cuts = uniform_cuts(space.segment_work, depth) if nodes else ()
            found += [(space.ticks(node, spans), node, spans) for node, spans in product(nodes, cuts)]
        # On many devices, simulate only the most promising ones.
        left = inf if space.num_devices <= FEW_DEVICES else MOST_UNIFORM
        for _, node, spans in sorted(found):
            self._queue = []
            self._put_cut(node, spans)
            left -= bool(self._queue)
            self._simulate_queued(node.depth)
            if not left:
                break

    def _put_cut(self, node: Node, spans: Spans) -> None:
        """Put one cut with all placements and schedules."""
        cluster_map = self.space.cluster_map
        for way in cluster_map.arrangements(node.depth, node.width):
            placement = cluster_map.place(node.depth, node.width, way)
            limit = self._limit(node.depth)
            if self.bounds.of_node(node) <= limit >= self.bounds.of_placement(node, placement):
                made: dict[object, list[PipelineTimes]] = {}
                for schedule in self.space.schedules(node.split):
                    candidate = self.space.candidate(node, placement, schedule, Cut((), ()))
                    self._put_other_cuts(candidate, [spans], made)

    def _put_other_cuts(
        self, candidate: CandidateLayout, cuts: Iterable[Spans], made: dict[object, list[PipelineTimes]]
    ) -> None:
        """Put copies of a candidate with other cuts, in all recompute modes that fit."""
        space, node, limit = self.space, node_of(candidate), self._limit(candidate.depth)
        placed, needs = space.place(node, candidate.placement), space.memory_totals(node)
        modes = space.request.modes
        cutters = [space.cutter(placed, needs, candidate.schedule, mode) for mode in modes]
        for spans in cuts:
            if not all(
                placed.time_limits.done_within(limit, stage, *span, space.recomputes_everywhere)
                for stage, span in enumerate(spans)
                if candidate.spans[stage : stage + 1] != (span,)
            ):
                continue
            for recompute in {cutter.recompute(spans) for cutter in cutters}:
                if recompute is not None:
                    self._put_candidate(candidate._replace(spans=spans, recompute=recompute), made)

    def _move_cuts(self, depth: int) -> None:
        """Move one cut by one segment as long as the step becomes shorter."""
        before = None
        stop = self.num_simulated + MOST_MOVED // depth
        while before is not self.found[depth] and self.num_simulated < stop:
            before = self.found[depth]
            self._queue = []
            cuts = adjacent_cuts(before.candidate.spans, range(self.space.costs.num_segments + 1))
            self._put_other_cuts(before.candidate, cuts, {})
            self._simulate_queued(depth, stop)
