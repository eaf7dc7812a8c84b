"""Branches on the batch size that compute the same on both sides, such as `if x.shape[0] >= 64`.

torch.export captures a branch for a range of batch sizes. The model is traced once in each range. If all
traces compute the same, apart from the layout of tensors in memory, any of them holds for every batch size.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.capture.trace.refusals import BatchRangeError

Range = tuple[int, int]
"""The smallest and the largest batch size."""

MOST_RANGES = 4

aten = torch.ops.aten
_LAYOUT = (aten.contiguous.default, aten.clone.default)


def trace_ranges(whole: Range, trace: Callable[[Range], Any]) -> Any:
    """Return the trace of the first range; raise BatchRangeError if another one computes something else.

    `trace` raises a BatchRangeError where it holds for a part of its range only.
    """
    pending, first, reason = [whole], None, None
    for _ in range(2 * MOST_RANGES):
        current = pending.pop()
        try:
            traced = trace(current)
        except BatchRangeError as error:
            low, high = max(current[0], error.range[0]), min(current[1], error.range[1])
            if (low, high) == current or low > high:
                raise
            reason = reason or error
            parts = [(current[0], low - 1), (high + 1, current[1]), (low, high)]
            pending += [part for part in parts if part[0] <= part[1]]
            continue
        if first is None:
            first = traced
        elif _operations(first.exported.graph_module) != _operations(traced.exported.graph_module):
            break
        if not pending:
            return first
    assert reason is not None
    raise reason


def _operations(module: fx.GraphModule) -> list[Any]:
    """Return the operations of a graph in a form that can be compared, without those on the layout."""
    numbers: dict[fx.Node, Any] = {}
    found: list[Any] = []
    for node in module.graph.nodes:
        source = node.args[0] if node.target in _LAYOUT else None
        if isinstance(source, fx.Node):
            numbers[node] = numbers[source]
            continue
        numbers[node] = len(found)
        nested = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(nested, fx.GraphModule):
            found.append(_operations(nested))
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        found.append(
            (
                node.op,
                str(node.target),
                str(structure),
                [("node", numbers[leaf]) if isinstance(leaf, fx.Node) else _text(leaf) for leaf in leaves],
                list(_shapes(node)),
            )
        )
    return found


def _shapes(node: fx.Node) -> Iterator[str]:
    for leaf in pytree.tree_leaves(node.meta.get("val")):
        yield _text([leaf.dtype, *leaf.shape] if isinstance(leaf, Tensor) else leaf)


def _text(value: Any) -> str:
    return re.sub(r"\bs\d+\b", "s", str(value))  # each trace numbers its symbols
