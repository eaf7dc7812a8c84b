"""Lower bounds on the step time of layouts that are not cut yet.

A search expands the layout with the smallest bound first. Every bound is sound: no simulated step of the
layouts that it covers is shorter.
"""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from math import ceil, inf

from varuna.plan.cost.bounds import UncutLayout, least_of_any_cut, least_seconds
from varuna.plan.cost.forecast import orders_of, pipelines
from varuna.plan.cost.least import LeastWork, least_of
from varuna.plan.cost.simulate import Orders, PipelineTimes
from varuna.plan.cut.cuts import Cut
from varuna.plan.cut.place import Placement
from varuna.plan.search.space import LayoutSpace, Node, PlacedNode


class LayoutBounds:
    """Bounds for the nodes of a space."""

    def __init__(self, space: LayoutSpace) -> None:
        self.space = space
        self._nodes: dict[Node, float] = {}
        self._leasts: dict[tuple[int, bool], LeastWork] = {}
        self._rates: dict[tuple[int, bool], float] = {}
        self._simulated: dict[tuple[object, ...], tuple[Node, float]] = {}

    def of_space(self, space: LayoutSpace) -> "LayoutBounds":
        """Return the same bounds for a space with fewer depths; they share the caches."""
        one = copy(self)
        one.space, one._simulated = space, {}
        return one

    def of_node(self, node: Node) -> float:
        """Return the bound for any cut on any devices."""
        if node not in self._nodes:
            self._nodes[node] = self.of_placement(node, None)
        return self._nodes[node]

    def of_placement(self, node: Node, placement: Placement | None) -> float:
        """Return the bound for any cut. With a placement, it includes messages and reductions."""
        costs, profile, depth = self.space.costs, self.space.costs.profile, node.depth
        microbatches, last_size = self.space.microbatches(node)
        last = self._least(last_size, node.split)
        each = self._least(node.microbatch_size, node.split) if microbatches > 1 else last
        overhead = depth * profile.overheads.instruction_seconds
        tied_bytes, tied_elements = costs.tied_twice(0, costs.num_segments)
        optimizer = (costs.num_trained[-1] - tied_elements) * profile.optimizer.seconds_per_element
        layout = UncutLayout(
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
            + optimizer / (node.width if self.space.request.shard_optimizer else 1),
        )
        if placement is None:
            return least_of_any_cut(layout)
        if node.width > 1:
            # A single stage may hold nearly all parameters, so the fastest kind of reduction counts.
            rate = min(self._rate(node.width, between) for between in set(placement.between))
            hidden = (last.weights if node.split else last.backward) + overhead
            reduction = (costs.gradient_bytes[-1] - tied_bytes) * rate
            layout = layout._replace(
                at_the_end=layout.at_the_end + max(0.0, reduction - hidden),
                lanes=len(set(placement.lanes)) if all(placement.between) else 0,
                longest_lane=max(Counter(placement.lanes).values()),
                reduction=rate * each.gradient_bytes,
            )
        return least_of_any_cut(layout._replace(messages=self._messages(node, placement, last_size)))

    def of_fastest_cut(self, placed: PlacedNode) -> tuple[float, float]:
        """Return the bounds, with and without reductions, of the best cut if memory were unlimited."""
        recompute, depth = self.space.recomputes_everywhere, placed.node.depth
        cut = Cut(placed.time_limits.fastest(recompute), (recompute,) * depth)
        slowest = placed.placement._replace(kinds=placed.placement.kinds[:1])  # or nearly the slowest
        candidate = self.space.candidate(
            placed.node, slowest, self.space.schedules(placed.node.split)[0], cut
        )
        orders = orders_of(candidate)
        orders = orders._replace(limits=(orders.microbatches,) * depth)
        return least_of_replicas(orders, pipelines(self.space.costs, candidate, orders))

    def _messages(self, node: Node, placement: Placement, last_size: int) -> tuple[float, float]:
        """Return the least and the most seconds of messages down the pipeline, over all cuts."""
        if node.depth == 1:
            return 0.0, 0.0
        costs = self.space.costs
        size = min(node.microbatch_size, ceil(self.space.request.batch_size / node.width))
        fewest_bytes, most_bytes = costs.extremes(last_size)[0], costs.extremes(size)[1]
        least = most = 0.0
        hops = Counter(zip(placement.kinds[0].crossing, placement.messages_per_card, strict=True))
        for (crossing, card_users), number in hops.items():
            low = costs.message(fewest_bytes, between=crossing)
            high = costs.message(most_bytes, between=crossing)
            least += number * max(0.0, low.sending * card_users + low.latency - low.sender_seconds)
            most += number * (high.sending * card_users + high.latency)
        return least, most

    def _least(self, size: int, split: bool) -> LeastWork:
        key = (size, split)
        if key not in self._leasts:
            self._leasts[key] = least_of(self.space.costs, size, split, self.space.cluster_map.fastest)
        return self._leasts[key]

    def of_fewer_replicas(self, placed: PlacedNode, seconds: float, bare: float) -> float:
        """Bound fewer replicas: only reductions become faster. `bare` is the bound without reductions."""
        space, placement = self.space, placed.placement
        if space.cluster_map.unequal:  # fewer replicas may avoid the slower machines
            return 0.0
        narrower = space.fewer_replicas(max(2, placed.node.width))
        arrangements = {len(space.cluster_map.cluster.machines) > 1, narrower > space.largest_machine}
        least = min(self._rate(narrower, between) for between in arrangements) if narrower > 1 else 0.0
        rate = self._rate(placement.width, any(placement.between)) if placement.width > 1 else inf
        # A rate is zero if larger reductions took no longer when they were measured.
        faster = min(1.0, least / rate) if rate else 0.0
        return bare + faster * (seconds - bare)

    def record_simulated(self, node: Node, bare_seconds: float) -> None:
        """Record a simulated step without reductions, for `from_more_replicas`."""
        other, bare = self._simulated.get(node[:3], (node, inf))
        if other.width <= node.width:
            self._simulated[node[:3]] = (node, min(bare_seconds, bare if other == node else inf))

    def from_more_replicas(self, node: Node) -> float:
        """Scale a simulated step with more replicas by the node bounds. Not sound, but close."""
        wider, seconds = self._simulated.get(node[:3], (node, 0.0))
        if wider.width <= node.width or self.space.cluster_map.unequal:
            return 0.0
        return seconds + self.of_node(node) - self.of_node(wider)

    def _rate(self, width: int, between: bool) -> float:
        """Return the least seconds per byte of an all-reduce of any size."""
        key = (width, between)
        if key not in self._rates:
            costs = self.space.costs
            measured = costs.reduction_sizes(width, between=between)
            seconds = [costs.reduce_seconds(width, size, between=between) for size in measured]
            beyond = costs.reduce_seconds(width, 2 * measured[-1], between=between) - seconds[-1]
            rates = [taken / size for taken, size in zip(seconds, measured, strict=True)]
            self._rates[key] = min(*rates, beyond / measured[-1])
        return self._rates[key]


def least_of_replicas(orders: Orders, replicas: Sequence[PipelineTimes]) -> tuple[float, float]:
    """Return the bounds, with and without reductions, of the slowest replica."""
    bounds = [least_seconds(orders, pipeline) for pipeline in replicas]
    return max(least for least, _ in bounds), max(bare for _, bare in bounds)
