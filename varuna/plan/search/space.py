"""Layouts that a search may choose from, and the tools that cut a model for one of them."""

from copy import copy
from math import ceil, comb
from typing import NamedTuple

from varuna.plan.cost.costs import CostTable, SegmentSums
from varuna.plan.cost.forecast import CandidateLayout
from varuna.plan.cost.memory import MemoryTerms, MemoryTotals
from varuna.plan.cut.cuts import Cut, Cutter, RecomputeMode, StageWork, TimeLimits
from varuna.plan.cut.partition import Spans
from varuna.plan.cut.place import ClusterMap, Placement
from varuna.plan.search.request import SearchRequest
from varuna.schedule import splits
from varuna.types import ScheduleName

FEW_CUTS = 600
"""Try every cut if there are at most this many, counted over all depths."""
FEW_DEVICES = 64
"""On at most this many devices, try every number of replicas, and search each near-best depth separately."""


class Node(NamedTuple):
    """All layouts of one depth, micro-batch size, kind of backward, and number of replicas."""

    depth: int
    microbatch_size: int
    split: bool  # schedules whose backward is in two parts
    width: int


class PlacedNode(NamedTuple):
    """A node on given devices."""

    node: Node
    placement: Placement
    time_limits: TimeLimits


class LayoutSpace:
    """Every node that may be worth a look, with the times and memory of its stages."""

    def __init__(self, costs: CostTable, cluster_map: ClusterMap, request: SearchRequest) -> None:
        self.costs, self.cluster_map, self.request = costs, cluster_map, request
        self.num_devices = cluster_map.num_devices
        self.recomputes_everywhere = request.modes == ("everywhere",)
        # Kinds of backward of the requested schedules: in one part, in two parts, or both.
        self.splits = sorted({splits(name) for name in request.schedules})
        depths = [depth for depth in request.depths if depth <= self.num_devices]
        self.has_few_cuts = sum(comb(costs.num_segments - 1, depth - 1) for depth in depths) <= FEW_CUTS
        self.segment_work = costs.work_between(request.microbatch_sizes[0], range(costs.num_segments + 1))
        self.largest_machine = max(machine.devices for machine in cluster_map.cluster.machines)
        self._works: dict[object, StageWork] = {}
        self._time_limits: dict[object, TimeLimits] = {}
        self._sendings: dict[object, tuple[float, ...]] = {}

    def of_depth(self, depth: int) -> "LayoutSpace":
        """Return the same space with one depth; it shares the caches."""
        one = copy(self)
        one.request = self.request._replace(depths=(depth,))
        return one

    @property
    def fewer_replicas_need_more_memory(self) -> bool:
        """True if a layout that does not fit cannot fit with fewer replicas either.

        Each replica then gets more samples, and none of them a larger device. Measured memory may shrink
        with more samples; if there are few cuts, the search does not rely on this rule.
        """
        return not (self.has_few_cuts or self.request.shard_optimizer or self.cluster_map.unequal)

    def schedules(self, split: bool) -> list[ScheduleName]:
        return [name for name in self.request.schedules if splits(name) == split]

    def nodes(self, depth: int) -> list[Node]:
        """Return the first nodes of a depth: each micro-batch size with the most replicas."""
        if not self.can_hold_model(depth):
            return []
        return [
            Node(depth, size, split, width)
            for size in self.request.microbatch_sizes
            for width in self._first_widths(depth, size)
            for split in self.splits
        ]

    def can_hold_model(self, depth: int) -> bool:
        """Return False if not even weights, gradients and optimizer state fit on `depth` devices."""
        if depth > self.num_devices:
            return False
        width = self.num_devices // depth if self.request.shard_optimizer else 1
        sizes = self.costs.sizes(self.request.microbatch_sizes[0])
        needs = MemoryTotals(self.costs, MemoryTerms(sizes, width, 1, width > 1))
        return needs.least_steady <= depth * self.cluster_map.largest_bytes * (1 - self.request.headroom)

    def most_replicas(self, depth: int) -> int:
        return min(self.num_devices // depth, self.request.batch_size)

    def _first_widths(self, depth: int, microbatch_size: int) -> list[int]:
        """Return the numbers of replicas from which the search goes down.

        The first is the largest whose share of the batch exceeds all smaller micro-batch sizes. Replicas
        on one machine, and a single replica, reduce faster or not at all: they are starts of their own.
        """
        batch, sizes = self.request.batch_size, self.request.microbatch_sizes
        smaller = sizes[sizes.index(microbatch_size) - 1] if microbatch_size != sizes[0] else 0
        most = self.most_replicas(depth)
        if smaller:
            most = min(most, (batch - 1) // smaller)
        if most < 1:
            return []
        others = [] if self.has_few_cuts else [min(self.largest_machine, most), 1]
        return list(dict.fromkeys([self.fewer_replicas(most + 1), *others]))

    def fewer_replicas(self, width: int) -> int:
        """Return the next smaller number of replicas that could be better than this one.

        In large clusters, of all numbers with the same largest share of the batch, only the fewest and the
        most that fill whole machines are tried.
        """
        batch, below = self.request.batch_size, width - 1
        if self.num_devices <= FEW_DEVICES:
            return below
        share = ceil(batch / below)
        fewest = ceil(batch / share)
        if self.request.shard_optimizer and width > self.num_devices:
            return below
        if share == ceil(batch / width):
            return fewest
        devices = self.cluster_map.cluster.machines[0].devices
        return max(fewest, below // devices * devices)

    def microbatches(self, node: Node) -> tuple[int, int]:
        """Return (number of micro-batches, size of the last) of the replica with most samples."""
        share = ceil(self.request.batch_size / node.width)
        microbatches = ceil(share / node.microbatch_size)
        return microbatches, share - (microbatches - 1) * node.microbatch_size

    def _sizes(self, node: Node) -> SegmentSums:
        microbatches, last_size = self.microbatches(node)
        return self.costs.sizes(node.microbatch_size if microbatches > 1 else last_size)

    def memory_totals(self, node: Node) -> MemoryTotals:
        samples = ceil(self.request.batch_size / node.width)
        terms = MemoryTerms(self._sizes(node), node.width, samples, self.request.shard_optimizer)
        return MemoryTotals(self.costs, terms)

    def memory_bytes(self, placement: Placement) -> tuple[int, ...]:
        """Return the usable memory of each stage."""
        return tuple(int(memory * (1 - self.request.headroom)) for memory in placement.memory_bytes)

    def ticks(self, node: Node, spans: Spans) -> float:
        """Estimate a step as if every tick of the pipeline took as long as its longest stage."""
        bounds = [0, *(stop for _, stop in spans)]
        work = self.costs.work_between(node.microbatch_size, bounds)
        return sum(work) + (self.microbatches(node)[0] - 1) * max(work)

    def place(self, node: Node, placement: Placement) -> PlacedNode:
        return PlacedNode(node, placement, self.time_limits(node, placement.speeds, placement))

    def time_limits(
        self, node: Node, speeds: tuple[float, ...], placement: Placement | None = None
    ) -> TimeLimits:
        sizes = self._sizes(node)
        # A smaller last micro-batch counts as a fraction.
        microbatches, last_size = self.microbatches(node)
        number = microbatches - 1 + (last_size / sizes.microbatch_size)
        kind = (sizes.microbatch_size, node.split)
        if kind not in self._works:
            self._works[kind] = StageWork(self.costs, sizes, split=node.split)
        sending: tuple[tuple[float, ...], ...] = ()
        if placement is not None and self.costs.cuts_differ and not self.has_few_cuts:
            hops = zip(placement.kinds[0].crossing, placement.messages_per_card, strict=True)
            sending = tuple(self._sending(sizes, *hop) for hop in hops)
        key = (*kind, number, speeds, sending)
        if key not in self._time_limits:
            self._time_limits[key] = TimeLimits(
                self._works[kind], microbatches=number, speeds=speeds, sending=sending
            )
        return self._time_limits[key]

    def _sending(self, sizes: SegmentSums, crossing: bool, card_users: int) -> tuple[float, ...]:
        """Return how long a micro-batch occupies each cut, in the busier direction."""
        key = (sizes.microbatch_size, crossing, card_users)
        if key not in self._sendings:
            self._sendings[key] = tuple(
                card_users * max(self.costs.message(b, between=crossing).sending for b in both)
                for both in zip(sizes.sent_bytes, sizes.returned_bytes, strict=True)
            )
        return self._sendings[key]

    def candidate(
        self, node: Node, placement: Placement, schedule: ScheduleName, cut: Cut
    ) -> CandidateLayout:
        return CandidateLayout(
            cut.spans,
            cut.recompute,
            schedule,
            node.microbatch_size,
            self.request.batch_size,
            placement,
            self.request.shard_optimizer,
        )

    def cutter(
        self, placed: PlacedNode, needs: MemoryTotals, schedule: ScheduleName, mode: RecomputeMode
    ) -> Cutter:
        return Cutter(
            placed.time_limits,
            needs,
            schedule=schedule,
            mode=mode,
            memory_bytes=self.memory_bytes(placed.placement),
            every=self.has_few_cuts,
        )


def node_of(item: Node | PlacedNode | CandidateLayout) -> Node:
    if isinstance(item, CandidateLayout):
        return Node(item.depth, item.microbatch_size, splits(item.schedule), item.width)
    return item.node if isinstance(item, PlacedNode) else item
