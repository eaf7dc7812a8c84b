"""The batch: which inputs have one, along which dimension, and how sizes follow from it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor

from varuna.errors import CaptureError
from varuna.types import Dim


@dataclass(frozen=True)
class Batch:
    """The size of an example's batch, and the dimension it has in each batched input."""

    size: int
    dims: Mapping[str, int]


def find_batch(inputs: Mapping[str, object], batch_dims: Mapping[str, int | None]) -> Batch:
    """A tensor is batched where its leading (or declared) dimension is the batch; a leading 1 is shared."""
    sizes: dict[str, int] = {}
    declared: set[str] = set()
    dims: dict[str, int] = {}
    for name, value in inputs.items():
        if not isinstance(value, Tensor):
            continue
        dim = batch_dims.get(name, 0)
        if dim is None or value.dim() == 0:
            continue
        if not -value.dim() <= dim < value.dim():
            raise CaptureError(
                f"batch_dims names dimension {dim} of the input {name!r}, which has the shape "
                f"{tuple(value.shape)} (name one of its dimensions, or None where it has no batch)"
            )
        dims[name] = dim % value.dim()
        sizes[name] = value.shape[dim]
        if batch_dims.get(name) is not None:
            declared.add(name)
    ordered = sorted(sizes, key=lambda name: name not in declared)
    size = next((sizes[name] for name in ordered if sizes[name] != 1), 1)
    if not sizes:
        given = [f"{name!r}, a {type(value).__name__}" for name, value in inputs.items()]
        raise CaptureError(
            f"no input has a batch: got {', '.join(given) or 'nothing'} "
            "(give at least one tensor whose leading dimension is the batch)"
        )
    for name in ordered:
        if sizes[name] not in (1, size) or (name in declared and sizes[name] != size):
            raise CaptureError(
                f"the input {name!r} has {sizes[name]} along dimension {dims[name]}, but the batch is {size} "
                f"(as in {next(n for n in ordered if sizes[n] == size)!r}); expected {size}, or 1 "
                "for an input "
                f"that all samples share (name its batch dimension, or None: batch_dims={{{name!r}: ...}})"
            )
    return Batch(size, {name: dims[name] for name in inputs if name in dims and sizes[name] == size})


def describe(inputs: Mapping[str, object], batch: Batch) -> Hashable:
    """All of the inputs that a captured graph depends on."""
    items: list[Hashable] = [("single", batch.size == 1)]
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, Tensor):
            dim = batch.dims.get(name)
            shape = tuple(size for i, size in enumerate(value.shape) if i != dim)
            items.append((name, dim, str(value.dtype), shape))
        elif value is None or isinstance(value, bool | int | float | str):
            items.append((name, type(value).__name__, value))
        else:
            raise CaptureError(
                f"the input {name!r} is a {type(value).__name__}; expected a tensor, or a constant "
                "that is None, "
                "bool, int, float or str (pass the tensors of a structure as inputs of their own)"
            )
    return tuple(items)


def hint_size(inputs: Mapping[str, object]) -> int:
    """A batch size that is no other size of the example, so that no two sizes are equal by accident."""
    taken = {size for value in inputs.values() if isinstance(value, Tensor) for size in value.shape}
    return next(
        prime for prime in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47) if prime not in taken
    )


def dim_of(size: Any, symbol: sympy.Symbol | None) -> Dim | None:
    """A size of the graph as `per_sample * batch + fixed`, None where it is neither."""
    if isinstance(size, int):
        return Dim(0, size)
    if not isinstance(size, torch.SymInt) or symbol is None:
        return None
    return _line(size.node.expr, symbol)


@lru_cache(maxsize=4096)
def _line(expression: sympy.Expr, symbol: sympy.Symbol) -> Dim | None:
    expression = sympy.expand(expression)
    if expression.free_symbols - {symbol}:
        return None
    per_sample, fixed = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    if expression - per_sample * symbol - fixed != 0 or not (per_sample.is_Integer and fixed.is_Integer):
        return None
    return Dim(int(per_sample), int(fixed))
