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

from varuna.capture.batch import dim_of
from varuna.capture.flatten import Whole
from varuna.capture.flow import base_name
from varuna.capture.tidy import where
from varuna.types import Dim

_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"})


class Apart:
    """Facts about every value of a whole graph, found once."""

    def __init__(self, whole: Whole, batched_inputs: Iterable[str], symbol: sympy.Symbol | None) -> None:
        self._symbol = symbol
        self._of_samples = {whole.inputs[name] for name in batched_inputs if name in whole.inputs}
        # How often the samples come over again along their dimension: 1 in order, 0 where that is not known.
        self._rounds: dict[fx.Node, int] = {}
        self._disorder: dict[fx.Node, fx.Node] = {}  # where the order of what has none was lost
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                continue
            # A size is no value of a sample, though it was read off one.
            made_of = [arg for arg in node.all_input_nodes if _tensors(arg)]
            if any(arg in self._of_samples for arg in made_of):
                self._of_samples.add(node)
            self._rounds[node] = self._rounds_of(node, made_of)
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
