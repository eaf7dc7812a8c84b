"""Whether what crosses a cut can be parted by sample: only then may stages differ in their replicas.

A value can be parted where one of its dimensions holds the samples one after the other; or where it is the
same for all of them. It cannot where it sums up samples (a mean over the batch that goes on to the
next stage), where its size follows from the data, or where samples lie otherwise than in order (two views
of a batch, one after the other).

A dimension of 2b may hold the samples as 0 0 1 1 2 2, or as 0 1 2 0 1 2: there they come over again.
Attention goes through the latter and back: [s, b, h] seen as [sb, h], and as [s, b, h] again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy
import torch
from torch import Tensor, fx

from varuna.capture.graph.flat_graph import FlatGraph
from varuna.capture.graph.flow import base_name, written
from varuna.capture.graph.passes import where
from varuna.capture.model.batch import dim_of
from varuna.types import Dim

_BY_INDEX = frozenset({"index", "_unsafe_index", "index_select", "gather", "take_along_dim"})
_BACK_BY_INDEX = frozenset(
    name + ending
    for name in ("index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce")
    for ending in ("", "_")
)
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"})


class Separability:
    """Facts about every value of a whole graph, found once."""

    def __init__(self, flat: FlatGraph, batched_inputs: Iterable[str], symbol: sympy.Symbol | None) -> None:
        self._symbol = symbol
        self._of_samples = {flat.inputs[name] for name in batched_inputs if name in flat.inputs}
        # How often the samples come over again along their dimension: 1 in order, 0 where that is not known.
        self._rounds: dict[fx.Node, int] = {}
        self._disorder: dict[fx.Node, fx.Node] = {}  # where the order of what has none was lost
        # What lies in the order of a sort over all samples, and where that was sorted.
        self._sorted: dict[fx.Node, fx.Node] = {}
        for node in flat.graph.nodes:
            if node.op == "placeholder":
                continue
            # A size is no value of a sample, though it was read off one.
            made_of = [arg for arg in node.all_input_nodes if _tensors(arg)]
            if any(arg in self._of_samples for arg in made_of):
                self._of_samples.add(node)
            self._rounds[node] = self._rounds_of(node, made_of)
            self._follow_sorts(node, made_of)
            if not self._rounds[node]:
                origins = [self._disorder[arg] for arg in made_of if arg in self._disorder]
                self._disorder[node] = origins[0] if origins else node

    def why_not(self, node: fx.Node) -> str | None:
        """Why a value that crosses a cut cannot be parted, in words; None where it can."""
        dims = self._dims(node.meta["val"])
        shape = ", ".join("?" if dim is None else str(dim) for dim in dims)
        if any(dim is None for dim in dims):
            return f"{node.name} [{shape}] has a size that follows from the data"
        batched = [dim for dim in dims if dim is not None and dim.per_sample]
        if not batched and node in self._of_samples:
            return f"{node.name} [{shape}] sums up all samples of a micro-batch"
        if len(batched) > 1 or any(dim.fixed for dim in batched) or self._rounds.get(node, 1) != 1:
            since = f", since {where(self._disorder[node])}" if node in self._disorder else ""
            return f"{node.name} [{shape}] does not hold the samples one after the other{since}"
        return None

    def why_not_over_a_cut(self, node: fx.Node) -> str | None:
        """The same; and places in a sorted micro-batch are none in that of which it is a part."""
        if node in self._sorted:
            return f"{node.name} is in the order of a sort over a micro-batch, {where(self._sorted[node])}"
        return self.why_not(node)

    def _follow_sorts(self, node: fx.Node, made_of: list[fx.Node]) -> None:
        """Experts sort their tokens and bring them back: sorted by what is sorted, they are in order."""
        name, operands = base_name(node), made_of
        if name in ("sort", "argsort"):
            value = made_of[0].meta["val"]
            chosen = [arg for arg in (*node.args[1:], *node.kwargs.values()) if type(arg) is int]
            dim = self._dims(value)[chosen[0] if chosen else -1] if value.dim() else None
            if dim is not None and dim.per_sample:
                self._sorted[node] = node
                return
        if name in _BACK_BY_INDEX:
            operands = [arg for arg in made_of if arg is not node.args[0]]
        origins = [self._sorted[arg] for arg in operands if arg in self._sorted]
        if not origins or (name in _BY_INDEX | _BACK_BY_INDEX and len(origins) == len(operands) > 1):
            return
        for value in (node, *written(node)):
            self._sorted[value] = origins[0]

    def _dims(self, value: Tensor) -> list[Dim | None]:
        return [dim_of(size, self._symbol) for size in value.shape]

    def _rounds_of(self, node: fx.Node, made_of: list[fx.Node]) -> int:
        """Joining, repeating and interleaving show in how much of the dimension is each sample's."""
        results = [place for value in _tensors(node) if (place := self._place(value)) is not None]
        given = {
            (place, self._rounds.get(arg, 1))
            for arg in made_of
            for value in _tensors(arg)
            if (place := self._place(value)) is not None
        }
        rounds = {number for _, number in given}
        if not results or not given:
            return 1
        if len(rounds) > 1:
            return 0
        (number,) = rounds
        if base_name(node) in _VIEWS:
            # What comes before the samples in memory, in other dimensions or in their own, stays before them.
            ((before, _), _), (before_then, _) = next(iter(given)), results[0]
            return before * number // before_then if before_then and before * number % before_then == 0 else 0
        if base_name(node) == "repeat_interleave":
            return int(number == 1)
        each = {each for (_, each), _ in given}
        if base_name(node) == "repeat" and len(each) == 1:
            return number * (results[0][1] // each.pop())
        return number if all(each_then in each for _, each_then in results) else 0

    def _place(self, value: Tensor) -> tuple[int, int] | None:
        """The elements before the samples' dimension, and how much of it is each one's."""
        dims = self._dims(value)
        for index, dim in enumerate(dims):
            if dim is not None and dim.per_sample:
                return math.prod(d.fixed if d is not None else 0 for d in dims[:index]), dim.per_sample
        return None


def _tensors(node: fx.Node) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return [value for value in leaves if isinstance(value, Tensor)]
