"""The operations of a captured model before it is cut, as input of a partition algorithm.

An operation is one node of the graph, or a run of nodes that no cut may separate:

    a list and its items                                              only tensors can cross a cut
    a number that depends on the data, and all its users
    a tensor whose size depends on the data, and all its users        its cost is unknown
    a value that is changed in place, until its last change           two stages would hold two copies
    all uses of a buffer that a forward changes                       likewise
"""

import operator
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import Tensor, fx

from varuna.capture.cuts.rematerialization import Rematerialization
from varuna.capture.cuts.summary import flops_per_sample, moved_bytes, num_bytes
from varuna.capture.graph.flow import Flow
from varuna.types import Operation, OperationGraph, Value


def list_operations(flow: Flow) -> tuple[OperationGraph, list[list[fx.Node]]]:
    """Return the operations, and the nodes of each."""
    flat = flow.flat
    nodes = flat.calls
    rematerialization = Rematerialization(flow)
    free = {node for node in nodes if rematerialization.closure(node, len(flow.order)) is not None}
    spans = _inseparable(flow, nodes, free)
    joined = {i for first, last in spans for i in range(first + 1, last + 1)}  # with the node before
    starts = [i for i in range(len(nodes)) if i not in joined]
    groups = [nodes[i:j] for i, j in pairwise([*starts, len(nodes)])]
    number = {node: i for i, group in enumerate(groups) for node in group}
    values = []
    for node in nodes:
        users = {number[user] for user in node.users if user in number}
        if node in flat.results:
            users.add(len(groups) - 1)
        users.discard(number[node])
        if users:
            directions = 2 if node in flow.gets_grad else 1
            crossing = 0 if node in free else directions * num_bytes(node, flat)
            values.append(Value(number[node], tuple(sorted(users)), crossing))
    # Values of 0 bytes keep readers of changed memory after the change.
    values += [
        Value(number[writer], (own,), 0)
        for node, own in number.items()
        for arg in node.all_input_nodes
        for writer in flow.writers_before(flow.root[arg], flow.order[node])
        if number[writer] != own
    ]
    operations = tuple(
        Operation(
            sum(flops_per_sample(node, flat) for node in group if node not in free),
            sum(moved_bytes(node, flat) for node in group if node not in free),
        )
        for group in groups
    )
    return OperationGraph(operations, tuple(values)), groups


def _inseparable(flow: Flow, nodes: Sequence[fx.Node], free: set[fx.Node]) -> Iterator[tuple[int, int]]:
    """Yield spans of nodes, first and last, that must stay in one segment."""
    place = {node: i for i, node in enumerate(nodes)}
    for node, i in place.items():
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            yield place.get(source, i), i
        elif node not in free:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or any(flow.flat.dim(size) is None for size in value.shape):
                yield i, max((place[user] for user in node.users if user in place), default=0)
    state = set(flow.flat.state.values())
    uses: dict[fx.Node, list[int]] = {}
    for node, i in place.items():
        for arg in node.all_input_nodes:
            uses.setdefault(flow.root[arg], []).append(i)
    for root, writers in flow.writers.items():
        places = uses[root] + ([place[root]] if root in place else [])
        yield min(places), max(places) if root in state else max(place[writer] for writer in writers)
