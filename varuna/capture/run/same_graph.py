"""Compares two captures of one model: one with sizes that vary, and one with fixed sizes.

A size that the model lost on its way (an int made of it, a table built for it) shows as a difference: the
capture with fixed sizes has another number, another shape or another constant there.
"""

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

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
    """Return the model's line of the first different operation; None if the graphs are equal.

    Two operations are equal if their arguments are: the order of independent ones may differ.
    """
    names: dict[str, str] = {}
    one = _Texts(varying._flat, varying.guards.values(sizes), names)
    other = _Texts(fixed._flat, {}, names)
    known = Counter(text for _, text in other.lines)
    for node, text in one.lines:
        known[text] -= 1
        if known[text] < 0:
            return f"{where(node)} ({text})"
    if len(varying.misplaced) > len(fixed.misplaced):
        return f"{varying.misplaced[0].name} is used in another segment"
    missing = next((node for node, text in other.lines if known[text] > 0), None)
    return None if missing is None else f"{where(missing)} (only with fixed sizes)"


class _Texts:
    """The operations on tensors as text, with numbers in place of sizes; equal texts have equal names."""

    def __init__(self, flat: FlatGraph, lengths: dict[Any, int], names: dict[str, str]) -> None:
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
            text = self._operation(node)
            self._names[node] = names.setdefault(text, f"%{len(names)}")
            self.lines.append((node, text))
        results = self._text(tuple(flat.results))
        self.lines.append((flat.graph.output_node(), results))

    def _operation(self, node: fx.Node) -> str:
        value = self._text(node.meta.get("val"))
        if node.op == "get_attr":
            return f"{_constant(self._flat.attributes[str(node.target)])} {value}"
        target: Any = node.target
        arguments: Any = (node.args, dict(node.kwargs))
        if isinstance(target, torch._ops.OpOverload):
            arguments = bound(target, node.args, node.kwargs)
            if target is aten.slice.Tensor:  # the shape shows where it ends
                arguments |= {"start": arguments["start"] or 0, "end": None}
        name = str(target) if isinstance(target, torch._ops.OpOverload) else _name(target)
        return f"{name}{self._text(arguments)} {value}"

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


def _constant(value: Any) -> str:
    """Return a tensor that the model makes of numbers, with its values: they may follow from a size."""
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor) or value.is_meta:
        return type(value).__name__
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(bytes(data.untyped_storage())).hexdigest()[:16]


def _name(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)
