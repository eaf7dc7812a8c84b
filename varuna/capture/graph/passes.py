"""Makes the flat graph fit to be cut: sizes follow from the batch, draws belong to samples, dead nodes go."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.capture.graph import randomness as random
from varuna.capture.graph.flat_graph import DETACH, FlatGraph
from varuna.capture.graph.flow import Flow, base_name
from varuna.capture.model.batch import dim_of
from varuna.errors import CaptureError
from varuna.types import Dim

aten = torch.ops.aten
_ALONG = frozenset(
    {"flip", "roll", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"}
    | {"softmax", "_softmax", "log_softmax", "_log_softmax"}
)
_DROPOUTS = (aten.dropout.default, aten.dropout_.default)


def symbol_of(flat: FlatGraph, batch_dims: Mapping[str, int]) -> sympy.Symbol | None:
    """The symbol of the batch; None where the batch is fixed at one."""
    for name, dim in batch_dims.items():
        if name in flat.inputs:
            size = flat.inputs[name].meta["val"].shape[dim]
            if isinstance(size, torch.SymInt):
                symbol = size.node.expr
                assert isinstance(symbol, sympy.Symbol)
                return symbol
    return None


def sizes_from_the_batch(flat: FlatGraph, batch_dims: Mapping[str, int], symbol: sympy.Symbol | None) -> None:
    """Every size that was read off some activation is computed from an input's batch instead."""
    if symbol is None:
        return
    name, dim = next((name, dim) for name, dim in batch_dims.items() if name in flat.inputs)
    graph = flat.graph
    made: dict[Dim, fx.Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def make(target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.call_function(target, args)
        last.meta = {"val": value, "segment": 0}
        return last

    batch = make(aten.sym_size.int, (flat.inputs[name], dim), flat.inputs[name].meta["val"].shape[dim])
    flat.batch = batch
    for node in flat.nodes:
        value = node.meta.get("val")
        if node is batch or node in made.values() or not isinstance(value, torch.SymInt):
            continue
        size = dim_of(value, symbol)
        if size is None:
            continue
        if size not in made:
            new = batch
            if size.per_sample != 1:
                new = make(operator.mul, (batch, size.per_sample), value)
            if size.fixed:
                new = make(operator.add, (new, size.fixed), value)
            made[size] = new
        node.replace_all_uses_with(made[size])
        graph.erase_node(node)


def refuse_coupled_samples(flat: FlatGraph, symbol: sympy.Symbol | None) -> None:
    """A matrix of every sample against every other means something else in each micro-batch."""
    if symbol is None:
        return
    for node in flat.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        shape: tuple[Any, ...] = tuple(value.shape)
        sizes = tuple(size.node.expr for size in shape if isinstance(size, torch.SymInt))
        if _degree(sizes, symbol) >= 2:
            raise CaptureError(
                f"{where(node)}: the value {node.name} has the shape "
                f"{[str(s) for s in value.shape]} with the batch "
                f"{symbol} in it twice: it compares every sample with every other, so the loss would mean "
                "something else in every micro-batch (compute such a loss outside the pipeline, or "
                "train with "
                "micro-batches as large as the batch)"
            )


@lru_cache(maxsize=4096)
def _degree(sizes: tuple[sympy.Expr, ...], symbol: sympy.Symbol) -> int:
    """How often a symbol is a factor of the product."""
    count = sympy.expand(sympy.Mul(*sizes))
    return int(sympy.degree(count, symbol)) if symbol in count.free_symbols else 0


def refuse_reordered_samples(flat: FlatGraph, symbol: sympy.Symbol | None) -> None:
    """An operation along the batch sees other neighbours in each micro-batch.

    Sums are not among them: whoever takes a mean over the batch means one over the micro-batch, as
    BatchNorm does. Neither is sorting, by which experts gather their tokens, and bring them back.
    """
    for node in flat.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or base_name(node) not in _ALONG:
            continue
        arguments = dict(
            zip((argument.name for argument in target._schema.arguments), node.args, strict=False)
        )
        arguments.update(node.kwargs)
        value = node.all_input_nodes[0].meta.get("val")
        dims = arguments.get("dims", arguments.get("dim"))
        for dim in dims if isinstance(dims, list | tuple) else [dims]:
            if not isinstance(value, Tensor) or not isinstance(dim, int) or not value.dim():
                continue
            found = dim_of(value.shape[dim], symbol)
            if found is not None and found.per_sample:
                raise CaptureError(
                    f"{where(node)}: {base_name(node)} goes along the batch, from sample to sample, so it "
                    "would give something else in every micro-batch (do it outside of the pipeline; or, if "
                    "each micro-batch may do it by itself, keep its module whole with varuna.opaque)"
                )


def refuse_sparse_gradients(flat: FlatGraph) -> None:
    """Gradients are summed over replicas and stages, and measured, as whole tensors."""
    for node in flat.nodes:
        embeds = isinstance(node.target, torch._ops.OpOverload) and "embedding" in base_name(node)
        if embeds and random.bound(node.target, node.args, node.kwargs).get("sparse"):
            raise CaptureError(
                f"{where(node)}: an embedding with sparse=True gives sparse gradients; expected dense ones "
                "(make it with sparse=False)"
            )


def where(node: fx.Node) -> str:
    """The model's line that made a node, or its module."""
    return node.meta.get("stack_trace") or node.name


def bind_randomness(flat: FlatGraph, symbol: sympy.Symbol | None, shared: frozenset[int]) -> frozenset[int]:
    """Every operation that draws is numbered and seeded by its work; gives the ordinals that samples share.

    `shared` brings those in from the capture with a symbolic batch, where the batch here is fixed at one.
    """
    draws = [node for node in flat.nodes if _draws(node)]
    for node in flat.nodes:
        if node.target in _DROPOUTS and not _draws(node):
            # Dropout that drops nothing gives its input back.
            node.replace_all_uses_with(node.all_input_nodes[0])
            flat.graph.erase_node(node)
    if not draws:
        return frozenset()
    with flat.graph.inserting_before(next(iter(flat.graph.nodes))):
        flat.work = flat.graph.placeholder("work")
    flat.work.meta = {"val": None, "segment": 0}
    return frozenset(
        ordinal for ordinal, node in enumerate(draws) if _bind(flat, node, ordinal, symbol, ordinal in shared)
    )


def _draws(node: fx.Node) -> bool:
    target = node.target
    if "leaf" in node.meta:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return random.draws(target, node.args, node.kwargs)


def _bind(flat: FlatGraph, node: fx.Node, ordinal: int, symbol: sympy.Symbol | None, shared: bool) -> bool:
    """Replaces one node that draws; True where all samples share the draw."""
    graph, work = flat.graph, flat.work
    target: Any = node.target
    if "leaf" in node.meta:
        # An opaque module may draw or not; it numbers its draws by itself.
        node.meta["leaf"].ordinal = ordinal
        node.meta["random"] = ordinal
        node.args = (*node.args, work, 1 if flat.batch is None else flat.batch)
        return False
    in_place = target._schema.name.endswith("_")
    values = pytree.tree_leaves(node.meta["val"])
    results = [_part(value, symbol) for value in values]
    leaves = pytree.tree_leaves((list(node.args), dict(node.kwargs)))
    parts = [_part(leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf, symbol) for leaf in leaves]
    batched = any(part is not None for part in (*parts, *results)) if symbol is not None else not shared
    with graph.inserting_before(node):
        if node.target in _DROPOUTS:
            part = results[0]
            if batched and symbol is None:
                # The batch is one sample: all of the value is its own.
                part = (0, values[0].shape[0])
            dim, per_sample = part if part is not None else (None, 0)
            new = graph.call_function(random.dropout, (*node.args[:2], work, ordinal, dim, per_sample))
        else:
            apart = symbol is not None and all(part is not None for part in results)
            num_samples: Any = None
            if batched:
                num_samples = 1 if symbol is None else flat.batch
            new = graph.call_function(
                random.draw_in_place if in_place else random.draw,
                (target, list(node.args), dict(node.kwargs), work, ordinal),
                {"parts": parts, "results": results if apart else None, "num_samples": num_samples},
            )
    new.meta = {**node.meta, "random": ordinal}
    final = new
    if in_place:
        with graph.inserting_before(node):
            final = graph.call_function(aten.copy_.default, (node.args[0], new))
        final.meta = dict(node.meta)
    node.replace_all_uses_with(final, delete_user_cb=lambda user: user is not final)
    graph.erase_node(node)
    return not batched


def _part(value: Any, symbol: sympy.Symbol | None) -> random.Part | None:
    """Which dimension of a value belongs to the samples, and how much of it to each."""
    sizes = value.shape if isinstance(value, Tensor) else (value,)
    for i, size in enumerate(sizes):
        if isinstance(size, torch.SymInt):
            dim = dim_of(size, symbol)
            if dim is not None and dim.per_sample and not dim.fixed:
                return i, dim.per_sample
    return None


def drop_needless_detaches(flat: FlatGraph, flow: Flow) -> None:
    for node in flat.nodes:
        if node.target is DETACH and node.args[0] not in flow.needs_grad:
            node.replace_all_uses_with(node.all_input_nodes[0])
            flat.graph.erase_node(node)


def parts_beside_their_whole(flat: FlatGraph) -> None:
    """The items of a list belong to the segment that made the list: only tensors cross a cut."""
    for node in flat.nodes:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            source = node.args[0]
            if node.meta["segment"] != source.meta["segment"]:
                node.meta["segment"] = source.meta["segment"]
                source.append(node)


def changes_where_their_values_are(flat: FlatGraph) -> None:
    """`self.buffer = ...` is written down at the very end: it belongs to the segment that made the value."""
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


def drop_dead(flat: FlatGraph, flow: Flow) -> None:
    """Keeps what the results need, and what changes a buffer."""
    state = set(flat.state.values())
    needed: set[fx.Node] = set(flat.results)
    roots: set[fx.Node] = {flow.root[node] for node in flat.results}
    for node in reversed(flat.nodes):
        changes = any(root in state or root in roots for root in flow.writes[node])
        if node in needed or changes:
            needed.update(node.all_input_nodes)
            roots.update(flow.root[arg] for arg in node.all_input_nodes)
        else:
            flat.graph.erase_node(node)


def refuse_torn_buffers(flat: FlatGraph, flow: Flow) -> None:
    """A buffer that one segment changes and another reads would need its change sent along."""
    for name, root in flat.state.items():
        if root not in flow.writers:
            continue
        users = [node for node in flat.nodes if any(flow.root[arg] is root for arg in node.all_input_nodes)]
        segments = sorted({node.meta["segment"] for node in users})
        if len(segments) > 1:
            raise CaptureError(
                f"{where(flow.writers[root][0])}: the buffer {name!r} is changed in place and used "
                "in the segments "
                f"{', '.join(map(str, segments))}; expected in one (put the CutPoints so that all its uses "
                "lie between two of them)"
            )
