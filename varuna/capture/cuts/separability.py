"""Decides whether values that cross a cut can be divided by sample: stages with unequal replicas need it.

A value can be divided if one of its dimensions holds the samples in order, or if all samples share it. It
cannot if it sums up samples (a mean over the batch that goes to the next stage), if its size depends on the
data, or if the samples are not in order (two views of a batch, one after the other).

A dimension of 2b may hold the samples as 0 0 1 1 2 2, in one round, or as 0 1 2 0 1 2, in two rounds.
Attention goes through the latter and back: [s, b, h] viewed as [sb, h], and as [s, b, h] again.
"""

import math
from collections.abc import Iterable

from torch import Tensor, fx

from varuna.capture.graph.checks import where
from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import base_name, tensors_of, written
from varuna.types import Dim

_GATHERS = frozenset({"index", "_unsafe_index", "index_select", "gather", "take_along_dim"})
_SCATTERS = frozenset(
    name + ending
    for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")
    for ending in ("", "_")
)
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"})


class Separability:
    """Facts about every value of a graph, computed once."""

    def __init__(self, flat: FlatGraph, batched_inputs: Iterable[str]) -> None:
        self._flat = flat
        self._of_samples = {flat.inputs[name] for name in batched_inputs if name in flat.inputs}
        self._rounds: dict[fx.Node, int] = {}  # 1: samples in order; 0: unknown
        self._disorder: dict[fx.Node, fx.Node] = {}  # the node that lost the order
        self._sorted: dict[fx.Node, fx.Node] = {}  # values in the order of a sort over all samples → the sort
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                continue
            # A size is not a sample's value, even if it was read from one.
            operands = [arg for arg in node.all_input_nodes if tensors_of(arg)]
            if any(arg in self._of_samples for arg in operands):
                self._of_samples.add(node)
            self._rounds[node] = self._rounds_of(node, operands)
            self._follow_sorts(node, operands)
            if not self._rounds[node]:
                origins = [self._disorder[arg] for arg in operands if arg in self._disorder]
                self._disorder[node] = origins[0] if origins else node

    def why_not(self, node: fx.Node) -> str | None:
        """Return why a value cannot be divided by sample; None if it can."""
        dims = self._dims(node.meta["val"])
        shape = ", ".join("?" if dim is None else str(dim) for dim in dims)
        if any(dim is None for dim in dims):
            return f"{node.name} [{shape}] has a size that depends on the data"
        batched = [dim for dim in dims if dim is not None and dim.per_sample]
        if not batched and node in self._of_samples:
            return f"{node.name} [{shape}] sums up all samples of a micro-batch"
        if len(batched) > 1 or any(dim.fixed for dim in batched) or self._rounds.get(node, 1) != 1:
            since = f", since {where(self._disorder[node])}" if node in self._disorder else ""
            return f"{node.name} [{shape}] does not hold the samples in order{since}"
        return None

    def why_not_over_a_cut(self, node: fx.Node) -> str | None:
        """Return why a value cannot be divided at a cut, where sorted values cannot be divided either."""
        if node in self._sorted:
            return f"{node.name} is in the order of a sort over a micro-batch, {where(self._sorted[node])}"
        return self.why_not(node)

    def _follow_sorts(self, node: fx.Node, operands: list[fx.Node]) -> None:
        """Track values in sorted order. Experts sort their tokens; a sorted index restores the order."""
        name, sources = base_name(node), operands
        if name in ("sort", "argsort"):
            value = operands[0].meta["val"]
            chosen = [arg for arg in (*node.args[1:], *node.kwargs.values()) if type(arg) is int]
            dim = self._dims(value)[chosen[0] if chosen else -1] if value.dim() else None
            if dim is not None and dim.per_sample:
                self._sorted[node] = node
                return
        if name in _SCATTERS:
            sources = [arg for arg in operands if arg is not node.args[0]]
        origins = [self._sorted[arg] for arg in sources if arg in self._sorted]
        if not origins or (name in _GATHERS | _SCATTERS and len(origins) == len(sources) > 1):
            return
        for value in (node, *written(node)):
            self._sorted[value] = origins[0]

    def _dims(self, value: Tensor) -> list[Dim | None]:
        return [self._flat.dim(size) for size in value.shape]

    def _rounds_of(self, node: fx.Node, operands: list[fx.Node]) -> int:
        """Return the rounds of a node's value: concatenation and repetition change the size per sample."""
        results = [place for value in tensors_of(node) if (place := self._place(value)) is not None]
        known = {
            (place, self._rounds.get(arg, 1))
            for arg in operands
            for value in tensors_of(arg)
            if (place := self._place(value)) is not None
        }
        rounds = {number for _, number in known}
        if not results or not known:
            return 1
        if len(rounds) > 1:
            return 0
        (number,) = rounds
        if base_name(node) in _VIEWS:
            # Elements that lie before the samples in memory, or rounds of them, stay before them.
            ((before, _), _), (new_before, _) = next(iter(known)), results[0]
            return before * number // new_before if new_before and before * number % new_before == 0 else 0
        if base_name(node) == "repeat_interleave":
            return int(number == 1)
        per_sample = {size for (_, size), _ in known}
        if base_name(node) == "repeat" and len(per_sample) == 1:
            return number * (results[0][1] // per_sample.pop())
        return number if all(size in per_sample for _, size in results) else 0

    def _place(self, value: Tensor) -> tuple[int, int] | None:
        """Return the number of elements before the samples' dimension, and the size of a sample in it."""
        dims = self._dims(value)
        for index, dim in enumerate(dims):
            if dim is not None and dim.per_sample:
                return math.prod(d.fixed if d is not None else 0 for d in dims[:index]), dim.per_sample
        return None
