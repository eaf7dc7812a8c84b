"""Compares two captures of one model: one with sizes that vary, and one with fixed sizes.

A size that the model lost on its way (an int made of it, a table built for it) shows as a difference: the
capture with fixed sizes has another number or another shape there.
"""

from typing import Any

import torch
from torch import Tensor, fx

from varuna.capture.graph.checks import where
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.randomness import bound
from varuna.capture.model.lengths import Sizes
from varuna.capture.run.captured import Captured

aten = torch.ops.aten
_MAY_BE_NEEDLESS = {
    *(aten.slice.Tensor, aten.expand.default, aten.alias.default, aten.contiguous.default),
    *(aten.view.default, aten.reshape.default),
}
"""Operations that change no element if they change no size."""


def first_difference(varying: Captured, fixed: Captured, sizes: Sizes) -> str | None:
    """Return the model's line of the first different operation; None if the graphs are equal."""
    lengths = varying.guards.values(sizes)
    one, other = _Texts(varying._flat, lengths), _Texts(fixed._flat, {})
    for (node, text), (_, expected) in zip(one.lines, other.lines, strict=False):
        if text != expected:
            return f"{where(node)} ({text}, with fixed sizes {expected})"
    if len(one.lines) != len(other.lines):
        return f"{len(one.lines)} operations, with fixed sizes {len(other.lines)}"
    return None


class _Texts:
    """The operations on tensors as text, with numbers in place of sizes."""

    def __init__(self, flat: FlatGraph, lengths: dict[Any, int]) -> None:
        self._flat, self._lengths = flat, lengths
        self._names: dict[fx.Node, str] = {node: f"state {name}" for name, node in flat.state.items()}
        self._names |= {node: f"input {name}" for name, node in flat.inputs.items()}
        if flat.work is not None:
            self._names[flat.work] = "work"
        self.lines: list[tuple[fx.Node, str]] = []
        for node in flat.nodes:
            if self._is_number(node):
                continue
            if self._is_needless(node):
                self._names[node] = self._text(node.args[0])
                continue
            self._names[node] = f"%{len(self.lines)}"
            target = node.target if node.op == "call_function" else node.op
            arguments: Any = (node.args, dict(node.kwargs))
            if isinstance(target, torch._ops.OpOverload):
                arguments = bound(target, node.args, node.kwargs)
                if target is aten.slice.Tensor:  # the shape shows where it ends
                    arguments |= {"start": arguments["start"] or 0, "end": None}
            name = str(target) if isinstance(target, torch._ops.OpOverload) else _name(target)
            self.lines.append((node, f"{name}{self._text(arguments)} {self._text(node.meta.get('val'))}"))
        results = self._text(tuple(flat.results))
        self.lines.append((flat.graph.output_node(), results))

    def _is_needless(self, node: fx.Node) -> bool:
        """Return whether a node changes nothing, such as a slice of all elements."""
        if node.target not in _MAY_BE_NEEDLESS or not isinstance(node.args[0], fx.Node):
            return False
        return self._text(node.meta["val"]) == self._text(node.args[0].meta.get("val"))

    def _is_number(self, node: fx.Node) -> bool:
        numbers = torch.SymInt | torch.SymFloat | torch.SymBool | int | float
        return "size" in node.meta or isinstance(node.meta.get("val"), numbers)

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._number(value) if self._is_number(value) else self._names[value]
        if isinstance(value, Tensor):
            return f"{value.dtype}[{','.join(map(self._text, value.shape))}]"
        if isinstance(value, torch.SymInt):
            dim = self._flat.dim(value, self._lengths)
            return "?" if dim is None else str(dim)
        if isinstance(value, tuple | list):
            return f"[{','.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._text(item)}' for key, item in value.items())}}}"
        if isinstance(value, float):
            return f"{value:.12g}"
        if isinstance(value, fx.GraphModule):
            return "graph"
        return _name(value) if callable(value) else str(value)

    def _number(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if isinstance(value, torch.SymFloat | torch.SymBool):
            found = value.node.expr.xreplace(self._lengths)
            return f"{float(found):.12g}" if found.is_number else str(found)
        if isinstance(value, torch.SymInt):
            return self._text(value)
        if "size" in node.meta:
            return str(node.meta["size"].xreplace(self._lengths))
        return self._text(value)


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
