"""Replaces attention masks that mean "causal" or "nothing" by the flag of scaled_dot_product_attention.

Libraries build an explicit mask while they are traced, and pass a flag otherwise. Fused kernels accept the
flag but not the mask. A mask that depends on sizes alone is the same in every step with these sizes: it is
computed here once, for two batch sizes, and compared.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, fx

from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import Flow
from varuna.capture.graph.randomness import bound
from varuna.capture.run.program import on_device

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
MAX_ELEMENTS = 1 << 26
"""Largest mask of one sample that is computed (8192 tokens); a larger one would take gigabytes."""
MAX_NODES = 256

Meaning = Literal["causal", "nothing"]


Lengths = Mapping[sympy.Symbol, int]


def mask_meanings(flat: FlatGraph, lengths: Lengths) -> tuple[Meaning | None, ...]:
    """Return for each attention what its mask means at these lengths; None: it must be computed."""
    calls = [node for node in flat.nodes if node.target is ATTENTION]
    if not calls:
        return ()
    meaning_of_node = cache(partial(_meaning_of_node, Flow(flat), lengths))
    given = [bound(ATTENTION, node.args, node.kwargs) for node in calls]
    return tuple(None if _is_kept(each) else meaning_of_node(each["attn_mask"]) for each in given)


def _is_kept(given: Mapping[str, Any]) -> bool:
    """Return whether an attention has no mask, or has one of numbers and dropout.

    On CUDA, kernels with and without a mask draw dropout differently. Libraries build masks of bools only
    while they are traced, but pass numbers (T5's biases) in any case.
    """
    mask = given["attn_mask"]
    if not isinstance(mask, fx.Node):
        return True
    value = mask.meta.get("val")
    return bool(given["dropout_p"]) and isinstance(value, Tensor) and value.dtype != torch.bool


def replace_masks(flat: FlatGraph, meanings: Sequence[Meaning | None]) -> None:
    calls = [node for node in flat.nodes if node.target is ATTENTION]
    for node, meaning in zip(calls, meanings, strict=True):
        if meaning is not None:
            given = bound(ATTENTION, node.args, node.kwargs)
            query, key, value = (given.pop(name) for name in ("query", "key", "value"))
            node.args = (query, key, value)
            node.kwargs = {**given, "attn_mask": None, "is_causal": meaning == "causal"}


def _meaning_of_node(flow: Flow, lengths: Lengths, mask: fx.Node) -> Meaning | None:
    value = mask.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2:
        return None
    rows, columns = (flow.flat.dim(size, lengths) for size in value.shape[-2:])
    if rows is None or columns is None or rows.per_sample or columns.per_sample:
        return None
    if rows.fixed * columns.fixed > MAX_ELEMENTS:
        return None
    nodes = _nodes_from_sizes(flow, mask)
    if nodes is None:
        return None
    found = {meaning_of(_compute(flow.flat, nodes, mask, batch, lengths)) for batch in (2, 3)}
    return found.pop() if len(found) == 1 else None


def meaning_of(mask: Tensor) -> Meaning | None:
    """Return the meaning of a mask of bools (True: visible) or of numbers that are added to the scores."""
    visible = mask
    if mask.dtype != torch.bool:
        hidden = mask <= torch.finfo(mask.dtype).min  # or -inf: after a softmax both are 0
        visible = mask == 0
        if not bool((visible | hidden).all()):
            return None
    if bool(visible.all()):
        return "nothing"
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    # Square only: otherwise the flag and a library may mean different corners.
    if mask.shape[-2] == mask.shape[-1] and bool((visible == causal).all()):
        return "causal"
    return None


def _nodes_from_sizes(flow: Flow, mask: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that make a mask, in order; None if it depends on more than sizes and constants."""
    found: set[fx.Node] = set()
    sizes = {flow.flat.batch, *flow.flat.length_nodes.values()}
    pending = [mask, *flow.writers_before(flow.root[mask], flow.order[mask])]
    while pending:
        node = pending.pop()
        if node in found or node in sizes:
            continue
        if node.op not in ("call_function", "get_attr") or len(found) == MAX_NODES:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return None
        found.add(node)
        pending.extend(flow.dependencies(node))
    return sorted(found, key=flow.order.__getitem__)


@torch.no_grad()
def _compute(flat: FlatGraph, nodes: list[fx.Node], mask: fx.Node, batch: int, lengths: Lengths) -> Tensor:
    cpu = torch.device("cpu")
    values: dict[fx.Node, Any] = {} if flat.batch is None else {flat.batch: batch}
    values |= {node: lengths[symbol] for symbol, node in flat.length_nodes.items()}
    sizes = set(values)
    last_use = {arg: node for node in nodes for arg in node.all_input_nodes}
    for node in nodes:
        if node.op == "get_attr":
            constant = flat.attributes[str(node.target)]
            values[node] = constant.to(cpu, copy=True) if isinstance(constant, Tensor) else constant
            continue
        args, kwargs = fx.map_arg(on_device((node.args, node.kwargs), cpu), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        for arg in node.all_input_nodes:
            if last_use[arg] is node and arg not in sizes and arg is not mask:
                del values[arg]
    found: Tensor = values[mask]
    return found
