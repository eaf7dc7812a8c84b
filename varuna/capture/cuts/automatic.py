"""Cuts a model that has no CutPoints: into the segments that an algorithm chose, in every capture alike.

What is cut is the first capture in training mode. Other captures of the same model (for evaluation,
or for inputs of another shape) have other operations here and there, but their segments must hold
the same parameters, for the stages are made. So an operation is known by its place in the program (the
module that runs it, what it does, and how often that module has done it before) and goes where its
counterpart went; what has none stays with what it needs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from varuna.capture.cuts.operations import describe
from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.types import Partition

log = logging.getLogger("varuna")

Place = tuple[str, str, int]

DISORDERED = (
    "is used in another order than in training, so that no cut fits both (put CutPoints into the model: they "
    "hold wherever they are; or train it in one stage)"
)
FIRST_USED = (
    "is used for the first time, in the middle of a model that was cut and spread without it (let the first "
    "call be one that uses all parameters, or train it in one stage)"
)


def cut(flat: FlatGraph, flow: Flow, symbol: sympy.Symbol | None, partition: Partition) -> None:
    """Gives every node its segment, and puts each segment's nodes next to each other."""
    operations = describe(flat, flow, symbol)
    segments = partition(operations.graph)
    for nodes, segment in zip(operations.nodes, segments, strict=True):
        for node in nodes:
            node.meta["segment"] = segment
    for place, node in _places(flat):
        node.meta["place"] = place
    flat.num_segments = max(segments, default=0) + 1
    _put_in_order(flat)
    log.info(
        "the model has no CutPoints: its %d operations are cut into %d segments",
        len(operations.nodes),
        flat.num_segments,
    )


@dataclass(frozen=True)
class Stray:
    """State that is used in a segment where it is not held: fine in a stage that spans both."""

    name: str
    segment: int
    holders: frozenset[int]
    why: str

    def is_within(self, first: int, stop: int) -> bool:
        """Whether a span has the segment, and not the state."""
        return first <= self.segment < stop and not any(first <= holder < stop for holder in self.holders)


def cut_alike(
    flat: FlatGraph,
    flow: Flow,
    model: Mapping[Place, int],
    holders: Mapping[str, set[int]],
    unused: Collection[str],
) -> list[Stray]:
    """Cuts as another capture was: `model` tells where its nodes went, `holders` where its state is.

    `unused` are the names that it has no use for. Gives what does not fit.
    """
    names = {node: name for name, node in flat.state.items()}
    again = Rematerialization(flat, flow)
    strays: list[Stray] = []
    for place, node in _places(flat):
        earliest = max((arg.meta["segment"] for arg in flow.dependencies(node)), default=0)
        segment = max(model.get(place, 0), earliest)
        used = [names[state] for state in again.reads(node)]
        possible = set.intersection(*(holders.get(name, set()) for name in used)) if used else {segment}
        possible = {other for other in possible if other >= earliest}
        if possible and segment not in possible:
            segment = min(possible)
        for name in used if not possible else ():
            held = frozenset(holders.get(name, ()))
            if segment not in held:
                strays.append(Stray(name, segment, held, FIRST_USED if name in unused else DISORDERED))
        node.meta["segment"] = segment
    flat.num_segments = max(model.values(), default=0) + 1
    _put_in_order(flat)
    return strays


def places(flat: FlatGraph) -> dict[Place, int]:
    """Where the nodes of a graph that was cut are."""
    return {node.meta["place"]: node.meta["segment"] for node in flat.nodes if "place" in node.meta}


def _places(flat: FlatGraph) -> list[tuple[Place, fx.Node]]:
    """Before the graph is put into another order than the program's, for that is what captures share."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for node in flat.nodes:
        if node.op == "get_attr":
            continue
        stack: Any = node.meta.get("nn_module_stack") or {}
        module = next(reversed(stack.values()))[0] if stack else ""
        key = module, getattr(node.target, "__name__", str(node.target))
        seen[key] = seen.get(key, 0) + 1
        found.append(((*key, seen[key]), node))
    return found


def _put_in_order(flat: FlatGraph) -> None:
    """Each segment's nodes after those of the segments before it, else in the order that they had."""
    nodes = flat.nodes
    ordered = sorted(nodes, key=lambda node: node.meta["segment"])
    if ordered != nodes:
        place = [node for node in flat.graph.nodes if node.op == "placeholder"][-1]
        for node in ordered:
            place.append(node)
            place = node
