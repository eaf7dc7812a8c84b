"""Passes that prepare the flat graph to be cut: seeded randomness, no dead nodes."""

import operator
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.capture.graph import randomness
from varuna.capture.graph.flat_graph import DETACH, FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.graph.sizes import SizeNodes
from varuna.capture.trace.data_branches import ModelCheck

aten = torch.ops.aten
_DROPOUTS = (aten.dropout.default, aten.dropout_.default)


def bind_randomness(
    flat: FlatGraph, shared: frozenset[int], sizes: SizeNodes | None
) -> dict[int, randomness.DrawDims]:
    """Number every random operation and seed it by its work; return where its samples are, by ordinal.

    Opaque modules are left out, and draws of the one sample where the batch is one. `shared` holds the
    ordinals of draws that all samples share, from the capture with a symbolic batch.
    """
    random_nodes = [node for node in flat.nodes if _draws(node)]
    for node in flat.nodes:
        if node.target in _DROPOUTS and not _draws(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            flat.graph.erase_node(node)
    if not random_nodes:
        return {}
    with flat.graph.inserting_before(next(iter(flat.graph.nodes))):
        flat.work = flat.graph.placeholder("work")
    flat.work.meta = {"val": None, "segment": 0}
    found = [_bind(flat, node, i, i in shared, sizes) for i, node in enumerate(random_nodes)]
    return {ordinal: dims for ordinal, dims in enumerate(found) if dims is not None}


def _draws(node: fx.Node) -> bool:
    target = node.target
    if "leaf" in node.meta:
        return True  # an opaque module may draw
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return randomness.draws(target, node.args, node.kwargs)


def _bind(
    flat: FlatGraph, node: fx.Node, ordinal: int, shared: bool, sizes: SizeNodes | None
) -> randomness.DrawDims | None:
    """Replace one random node by a seeded one; return where its samples are, if they are several."""
    graph, work = flat.graph, flat.work
    target: Any = node.target
    if "leaf" in node.meta:
        node.meta["leaf"].ordinal = ordinal  # an opaque module numbers its own draws
        node.meta["random"] = ordinal
        node.args = (*node.args, work, 1 if flat.batch is None else flat.batch)
        return None
    in_place = target._schema.name.endswith("_")
    values = pytree.tree_leaves(node.meta["val"])
    results = [_sample_dim(flat, value, sizes) for value in values]
    leaves = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    arguments = [
        _sample_dim(flat, leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf, sizes)
        for leaf in leaves
    ]
    single = flat.symbol is None  # the batch is one sample
    batched = not shared if single else any(dim is not None for dim in (*arguments, *results))
    with graph.inserting_before(node):
        if node.target in _DROPOUTS:
            found = results[0]
            if batched and single:
                size = values[0].shape[0]  # the sample owns the whole value
                if isinstance(size, torch.SymInt):
                    assert sizes is not None
                    size = sizes.node(size.node.expr, size)
                found = (0, size)
            dim, per_sample = found if found is not None else (None, 0)
            new = graph.call_function(randomness.dropout, (*node.args[:2], work, ordinal, dim, per_sample))
        else:
            divisible = not single and all(dim is not None for dim in results)
            num_samples: Any = None
            if batched:
                num_samples = 1 if single else flat.batch
            new = graph.call_function(
                randomness.draw_in_place if in_place else randomness.draw,
                (target, list(node.args), dict(node.kwargs), work, ordinal),
                {"parts": arguments, "results": results if divisible else None, "num_samples": num_samples},
            )
    new.meta = {**node.meta, "random": ordinal}
    final = new
    if in_place:
        with graph.inserting_before(node):
            final = graph.call_function(aten.copy_.default, (node.args[0], new))
        final.meta = dict(node.meta)
    node.replace_all_uses_with(final, delete_user_cb=lambda user: user is not final)
    graph.erase_node(node)
    if single and batched:
        return None
    given = zip(leaves, arguments, strict=True)
    tensors = [dim for leaf, dim in given if isinstance(leaf, fx.Node) and _is_tensor(leaf)]
    return randomness.DrawDims(tuple(map(_dimension, tensors)), tuple(map(_dimension, results)))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _dimension(found: tuple[int, Any] | None) -> int | None:
    return None if found is None else found[0]


def _sample_dim(flat: FlatGraph, value: Any, sizes: SizeNodes | None) -> tuple[int, Any] | None:
    """Return the dimension that holds the samples, and the size of each: a number or the node of one."""
    shape = value.shape if isinstance(value, Tensor) else (value,)
    for i, size in enumerate(shape):
        dim = flat.dim(size) if isinstance(size, torch.SymInt) else None
        if dim is not None and dim.per_sample and not dim.fixed:
            if not flat.lengths or dim.per_sample == 1:
                return i, dim.per_sample
            assert sizes is not None
            return i, sizes.node(sympy.expand(size.node.expr / flat.symbol), None)
    return None


def normalize(flat: FlatGraph) -> None:
    """Bring operations to the places where cuts expect them, and drop those that do nothing."""
    move_items_to_their_list(flat)
    move_buffer_updates_to_their_values(flat)
    drop_dead_nodes(flat, drop_needless_detaches(flat))


def move_items_to_their_list(flat: FlatGraph) -> None:
    """Move the items of a list to the segment that makes the list: only tensors can cross a cut."""
    for node in flat.nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and node.meta["segment"] != source.meta["segment"]:
            node.meta["segment"] = source.meta["segment"]
            source.append(node)


def move_buffer_updates_to_their_values(flat: FlatGraph) -> None:
    """Move `self.buffer = value` to the segment of the value: torch.export writes it at the graph's end."""
    for name, buffer in flat.state.items():
        if name in flat.parameters:
            continue
        for node in list(buffer.users):
            if node.target is not aten.copy_.default or node.args[0] is not buffer:
                continue
            others = [user for user in buffer.users if user is not node] + node.all_input_nodes
            order = {other: i for i, other in enumerate(flat.graph.nodes)}
            last = max(
                (other for other in others if other.op != "placeholder"), key=order.__getitem__, default=None
            )
            if last is not None and last.meta["segment"] < node.meta["segment"] and order[last] < order[node]:
                node.meta["segment"] = last.meta["segment"]
                last.append(node)


def drop_needless_detaches(flat: FlatGraph) -> Flow | None:
    """Return the facts about the graph, if they still hold."""
    flow, dropped = Flow(flat), False
    for node in flat.nodes:
        if node.target is DETACH and node.args[0] not in flow.needs_grad:
            node.replace_all_uses_with(node.all_input_nodes[0])
            flat.graph.erase_node(node)
            dropped = True
    return None if dropped else flow


def drop_dead_nodes(flat: FlatGraph, flow: Flow | None = None) -> None:
    """Keep the nodes that the results need, those that change a buffer, and checks."""
    flow = flow or Flow(flat)
    state = set(flat.state.values())
    needed: set[fx.Node] = set(flat.results)
    roots: set[fx.Node] = {flow.root[node] for node in flat.results}
    for node in reversed(flat.nodes):
        changes = any(root in state or root in roots for root in flow.writes[node])
        if node in needed or changes or isinstance(node.target, ModelCheck):
            needed.update(node.all_input_nodes)
            roots.update(flow.root[arg] for arg in node.all_input_nodes)
        else:
            flat.graph.erase_node(node)
