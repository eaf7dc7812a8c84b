"""A captured model before it is cut, told in nouns, so that an algorithm can decide where to cut it.

An operation here is one node of the graph, or as many neighbours as no cut may part:

    a list and its items                                            only tensors cross a cut
    a number that follows from the data, and all who read it
    a tensor whose size follows from the data, and all who read it  what it costs could not be foretold
    a value that is changed in place, until its last change         two stages would hold two copies
    all uses of a buffer that a forward changes                     likewise
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
from torch import Tensor, fx

from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.cuts.summary import flops_per_sample, moved_bytes, num_bytes
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.model.batch import dim_of
from varuna.types import Operation, OperationGraph, Value


@dataclass(frozen=True)
class Operations:
    """The graph in nouns, and the nodes of each operation."""

    graph: OperationGraph
    nodes: Sequence[Sequence[fx.Node]]


def describe(flat: FlatGraph, flow: Flow, symbol: sympy.Symbol | None) -> Operations:
    nodes = [node for node in flat.nodes if node.op != "get_attr"]
    place = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((place[user] for user in node.users if user in place), default=0) for node in nodes}
    again = Rematerialization(flat, flow)
    free = {node for node in nodes if again.closure(node, len(flow.order)) is not None}
    together = [False] * (len(nodes) + 1)  # each with the one before it
    for first, last in _inseparable(flat, flow, place, last_use, free, symbol):
        for i in range(first + 1, last + 1):
            together[i] = True
    number: dict[fx.Node, int] = {}
    groups: list[list[fx.Node]] = []
    for i, node in enumerate(nodes):
        if together[i]:
            groups[-1].append(node)
        else:
            groups.append([node])
        number[node] = len(groups) - 1
    values = []
    for node in nodes:
        users = {number[user] for user in node.users if user in number}
        if node in flat.results:
            users.add(len(groups) - 1)
        users.discard(number[node])
        if users:
            ways = 2 if node in flow.gets_grad else 1
            crossing = 0 if node in free else ways * num_bytes(node.meta.get("val"), symbol)
            values.append(Value(number[node], tuple(sorted(users)), crossing))
    values += _afterwards(flow, number)
    return Operations(
        OperationGraph(
            tuple(
                Operation(
                    sum(flops_per_sample(node, symbol) for node in group if node not in free),
                    sum(moved_bytes(node, symbol) for node in group if node not in free),
                )
                for group in groups
            ),
            tuple(values),
        ),
        groups,
    )


def _afterwards(flow: Flow, number: dict[fx.Node, int]) -> Iterator[Value]:
    """Who reads memory after its last change comes after that, also where it was there before: an input's."""
    for node, own in number.items():
        for arg in node.all_input_nodes:
            for writer in flow.writers_before(flow.root[arg], flow.order[node]):
                if number[writer] != own:
                    yield Value(number[writer], (own,), 0)


def _inseparable(
    flat: FlatGraph,
    flow: Flow,
    place: dict[fx.Node, int],
    last_use: dict[fx.Node, int],
    free: set[fx.Node],
    symbol: sympy.Symbol | None,
) -> Iterator[tuple[int, int]]:
    """Spans of nodes, first and last, that must stay in one segment."""
    for node, i in place.items():
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            yield place.get(source, i), i
        elif node not in free and not _can_be_sent(node, symbol):
            yield i, last_use[node]
    state = set(flat.state.values())
    uses: dict[fx.Node, list[int]] = {}
    for node, i in place.items():
        for arg in node.all_input_nodes:
            uses.setdefault(flow.root[arg], []).append(i)
    for root, writers in flow.writers.items():
        places = uses[root] + ([place[root]] if root in place else [])
        yield min(places), max(places) if root in state else max(place[writer] for writer in writers)


def _can_be_sent(node: fx.Node, symbol: sympy.Symbol | None) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(dim_of(size, symbol) is not None for size in value.shape)
