"""Cuts a model that has no CutPoints into segments that a partition algorithm chooses.

The algorithm cuts the first capture in training mode. Other captures of the same model (for evaluation, or
for inputs of another shape) have slightly different operations, but their segments must hold the same
parameters, because the stages exist already. So an operation is identified by its place in the program:
module, function, and number of the call in that module. It goes to the segment of the same place in the
first capture. An operation without a counterpart stays with its arguments.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from varuna.capture.cuts.operations import list_operations
from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.types import Partition, Segment

log = logging.getLogger("varuna")

Place = tuple[str, str, int]  # module, function, number of the call

OTHER_ORDER = (
    "is used in another order than in training, so that no cut fits both. Put CutPoints into the model, or "
    "train it in one stage."
)
FIRST_USE = (
    "is used for the first time, in the middle of a model that is already cut without it. Let the first "
    "call use all parameters, or train the model in one stage."
)


def cut(flow: Flow, partition: Partition) -> None:
    """Give every node the segment that the partition chooses, and sort the nodes by segment."""
    flat, (operations, groups) = flow.flat, list_operations(flow)
    segments = partition(operations)
    for nodes, segment in zip(groups, segments, strict=True):
        for node in nodes:
            node.meta["segment"] = segment
    for place, node in nodes_by_place(flat):
        node.meta["place"] = place
    flat.num_segments = max(segments, default=0) + 1
    _sort_by_segment(flat)
    log.info(
        "the model has no CutPoints: its %d operations are cut into %d segments",
        len(groups),
        flat.num_segments,
    )


@dataclass(frozen=True)
class MisplacedState:
    """State that a segment uses and does not hold; allowed in a stage that spans both."""

    name: str
    segment: int
    holders: set[int]
    reason: str

    def is_missing_in(self, first: int, stop: int) -> bool:
        """Return whether a span has the segment but not the state."""
        return first <= self.segment < stop and not any(first <= holder < stop for holder in self.holders)


def cut_like(flow: Flow, earlier: FlatGraph, segments: Sequence[Segment]) -> list[MisplacedState]:
    """Cut the graph like an earlier one that `cut` has cut, and return the state that does not fit."""
    segment_of = {node.meta["place"]: node.meta["segment"] for node in earlier.nodes if "place" in node.meta}
    holders: dict[str, set[int]] = {}
    for found in segments:
        for name in (*found.parameters, *found.buffers):
            holders.setdefault(name, set()).add(found.index)
    flat = flow.flat
    names = {node: name for name, node in flat.state.items()}
    rematerialization = Rematerialization(flow)
    misplaced: list[MisplacedState] = []
    for place, node in nodes_by_place(flat):
        if "size" in node.meta:  # computed from the inputs, in any segment
            node.meta["segment"] = 0
            continue
        earliest = max((arg.meta["segment"] for arg in flow.dependencies(node)), default=0)
        segment = max(segment_of.get(place, 0), earliest)
        used = [names[state] for state in rematerialization.reads(node)]
        possible = set.intersection(*(holders.get(name, set()) for name in used)) if used else {segment}
        possible = {other for other in possible if other >= earliest}
        if possible and segment not in possible:
            segment = min(possible)
        for name in used if not possible else ():
            held = holders.get(name, set())
            if segment not in held:
                reason = OTHER_ORDER if earlier.state[name].users else FIRST_USE
                misplaced.append(MisplacedState(name, segment, held, reason))
        node.meta["segment"] = segment
    flat.num_segments = max(segment_of.values(), default=0) + 1
    _sort_by_segment(flat)
    return misplaced


def nodes_by_place(flat: FlatGraph) -> list[tuple[Place, fx.Node]]:
    """Return nodes with their places. Call it before `_sort_by_segment`: places count in program order."""
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for node in flat.calls:
        stack: Any = node.meta.get("nn_module_stack") or {}
        module = next(reversed(stack.values()))[0] if stack else ""
        key = module, getattr(node.target, "__name__", str(node.target))
        seen[key] += 1
        found.append(((*key, seen[key]), node))
    return found


def _sort_by_segment(flat: FlatGraph) -> None:
    """Sort the nodes by segment; within a segment they keep their order."""
    nodes = flat.nodes
    ordered = sorted(nodes, key=lambda node: node.meta["segment"])
    if ordered != nodes:
        last = [node for node in flat.graph.nodes if node.op == "placeholder"][-1]
        for node in ordered:
            last.append(node)
            last = node
