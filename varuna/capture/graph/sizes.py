"""Sizes of a graph as functions of the inputs' sizes, in place of sizes read from activations."""

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.model.lengths import Place
from varuna.types import Dim

aten = torch.ops.aten


class SizeNodes:
    """Makes the nodes that compute sizes, behind the placeholders, each size once."""

    def __init__(self, flat: FlatGraph, batch_dims: Mapping[str, int], lengths: Mapping[Place, Any]) -> None:
        self._flat = flat
        self._last = [node for node in flat.graph.nodes if node.op == "placeholder"][-1]
        self._made: dict[object, fx.Node] = {}  # by expression, or by Dim if the batch size alone varies
        if flat.symbol is not None:
            name, dim = next((name, dim) for name, dim in batch_dims.items() if name in flat.inputs)
            flat.batch = self._made[flat.symbol] = self._read(name, dim)
        for (name, dim), symbol in sorted(lengths.items(), key=lambda item: item[0][0] != self._batched):
            if symbol not in self._made and name in flat.inputs:
                flat.length_nodes[symbol] = self._made[symbol] = self._read(name, dim)

    @property
    def _batched(self) -> str | None:
        """The input from which the batch size is read; other sizes are read from it too, if it has them."""
        node = self._flat.batch
        return next((name for name, own in self._flat.inputs.items() if node and own is node.args[0]), None)

    def node(self, expression: sympy.Expr, value: Any) -> fx.Node | None:
        """Return the node that computes a size; None if it depends on more than the sizes of inputs."""
        dim = None if self._flat.lengths else self._flat.dim(value)
        key = expression if dim is None else dim
        if key not in self._made:
            if expression.free_symbols - self._made.keys():
                return None
            self._made[key] = self._computed(expression, value) if dim is None else self._linear(dim, value)
        return self._made[key]

    def _linear(self, dim: Dim, value: Any) -> fx.Node:
        new = self._made[self._flat.symbol]
        if dim.per_sample != 1:
            new = self._make(operator.mul, (new, dim.per_sample), value)
        return self._make(operator.add, (new, dim.fixed), value) if dim.fixed else new

    def _computed(self, expression: sympy.Expr, value: Any) -> fx.Node:
        graph = self._flat.graph
        tracer = GraphAppendingTracer(graph)
        if not expression.free_symbols:  # a size that the model fixes
            base = next(iter(self._made.values()))
            return self._make(operator.add, (self._make(operator.mul, (base, 0), 0), int(expression)), value)
        known = {symbol: fx.Proxy(self._made[symbol], tracer) for symbol in expression.free_symbols}
        before = set(graph.nodes)
        with graph.inserting_before(self._last.next):
            found: Any = sympy_interp(PythonReferenceAnalysis, known, expression)
        for node in graph.nodes:
            if node not in before:
                node.meta = {"val": None, "segment": 0, "size": expression}
                self._last = node
        found.node.meta["val"] = value
        new: fx.Node = found.node
        return new

    def _read(self, name: str, dim: int) -> fx.Node:
        source = self._flat.inputs[name]
        return self._make(aten.sym_size.int, (source, dim), source.meta["val"].shape[dim])

    def _make(self, target: Any, args: tuple[Any, ...], value: Any, size: Any = None) -> fx.Node:
        with self._flat.graph.inserting_after(self._last):
            new = self._flat.graph.call_function(target, args)
        new.meta = {"val": value, "segment": 0, "size": size}
        self._last = new
        return new


def compute_sizes_from_inputs(
    flat: FlatGraph, batch_dims: Mapping[str, int], lengths: Mapping[Place, Any]
) -> SizeNodes | None:
    """Compute every size from the sizes of the inputs; None if no size is symbolic."""
    if flat.symbol is None and not lengths:
        return None
    sizes = SizeNodes(flat, batch_dims, lengths)
    inputs = {flat.batch, *flat.length_nodes.values()}
    for node in flat.nodes:
        value = node.meta.get("val")
        if node in inputs or not isinstance(value, torch.SymInt):
            continue
        new = sizes.node(value.node.expr, value)
        if new is not None:
            node.replace_all_uses_with(new)
            flat.graph.erase_node(node)
    return sizes


def drop_needless_slices(flat: FlatGraph) -> None:
    """Drop slices of all elements, which torch leaves out itself where sizes are fixed."""
    for node in flat.nodes if flat.lengths else ():
        if node.target is aten.slice.Tensor and node not in flat.results:
            source: Any = node.args[0]
            if list(map(str, node.meta["val"].shape)) == list(map(str, source.meta["val"].shape)):
                node.replace_all_uses_with(source)
                flat.graph.erase_node(node)
