"""Whether what crosses a cut can be parted by sample: only then may stages differ in their replicas.

A value can be parted where one of its dimensions holds the samples one after the other; or where it is the
same for all of them. It cannot where it sums up samples (a mean over the batch that goes on to the
next stage), where its size follows from the data, or where samples lie otherwise than in order (two views
of a batch, one after the other).
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
from varuna.types import Dim

_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias"})


class Apart:
    """Facts about every value of a whole graph, found once."""

    def __init__(self, whole: Whole, batched_inputs: Iterable[str], symbol: sympy.Symbol | None) -> None:
        self._symbol = symbol
        self._of_samples = {whole.inputs[name] for name in batched_inputs if name in whole.inputs}
        self._disordered: set[fx.Node] = set()
        for node in whole.graph.nodes:
            if node.op == "placeholder":
                continue
            # A size is no value of a sample, though it was read off one.
            made_of = [arg for arg in node.all_input_nodes if _tensors(arg)]
            if any(arg in self._of_samples for arg in made_of):
                self._of_samples.add(node)
            if any(arg in self._disordered for arg in made_of) or self._disorders(node, made_of):
                self._disordered.add(node)

    def why_not(self, node: fx.Node) -> str | None:
        """Why a value that crosses a cut cannot be parted, in words; None where it can."""
        dims = self._dims(node.meta["val"])
        shape = ", ".join("?" if dim is None else str(dim) for dim in dims)
        if any(dim is None for dim in dims):
            return f"{node.name} [{shape}] has a size that follows from the data"
        batched = [dim for dim in dims if dim is not None and dim.per_sample]
        if not batched and node in self._of_samples:
            return f"{node.name} [{shape}] sums up all samples of a micro-batch"
        if len(batched) > 1 or any(dim.fixed for dim in batched) or node in self._disordered:
            return f"{node.name} [{shape}] does not hold the samples one after the other"
        return None

    def _dims(self, value: Tensor) -> list[Dim | None]:
        return [dim_of(size, self._symbol) for size in value.shape]

    def _disorders(self, node: fx.Node, made_of: list[fx.Node]) -> bool:
        """Whether samples that lay in order in what goes in lie otherwise in what comes out.

        Joining, repeating and interleaving show in how much of the dimension is each sample's.
        """
        results = [place for value in _tensors(node) if (place := self._place(value)) is not None]
        given = [
            place for arg in made_of for value in _tensors(arg) if (place := self._place(value)) is not None
        ]
        if not results or not given:
            return False
        if base_name(node) == "repeat_interleave":
            return False
        if base_name(node) in _VIEWS:
            # In memory the samples come first of all, or nothing before them has changed.
            (before, each), (before_then, each_then) = given[0], results[0]
            return not (before == before_then == 1 or (before, each) == (before_then, each_then))
        return any(each not in {each for _, each in given} for _, each in results)

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
