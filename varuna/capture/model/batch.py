"""The batch: which inputs have one, along which dimension, and which sizes follow from it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
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
    """The batch size of an example, and the batch dimension of each batched input."""

    size: int
    dims: Mapping[str, int]


def find_batch(inputs: Mapping[str, object], batch_dims: Mapping[str, int | None]) -> Batch:
    """Find the batch: the leading (or declared) dimension of tensors. A leading 1 means "shared by all"."""
    sizes: dict[str, int] = {}
    dims: dict[str, int] = {}
    for name, value in inputs.items():
        dim = batch_dims.get(name, 0)
        if not isinstance(value, Tensor) or dim is None or value.dim() == 0:
            continue
        if not -value.dim() <= dim < value.dim():
            raise CaptureError(
                f"batch_dims names dimension {dim} of the input {name!r}, which has the shape "
                f"{tuple(value.shape)}. Name one of its dimensions, or None if it has no batch."
            )
        dims[name] = dim % value.dim()
        sizes[name] = value.shape[dim]
    if not sizes:
        found = [f"{name!r}, a {type(value).__name__}" for name, value in inputs.items()]
        raise CaptureError(
            f"no input has a batch: got {', '.join(found) or 'nothing'}. "
            "Pass at least one tensor whose leading dimension is the batch."
        )
    declared = {name for name in sizes if batch_dims.get(name) is not None}
    ordered = sorted(sizes, key=lambda name: name not in declared)
    size = next((sizes[name] for name in ordered if sizes[name] != 1), 1)
    for name in ordered:
        if sizes[name] not in (1, size) or (name in declared and sizes[name] != size):
            raise CaptureError(
                f"the input {name!r} has {sizes[name]} along dimension {dims[name]}, but the batch is {size} "
                f"(as in {next(n for n in ordered if sizes[n] == size)!r}). Pass {size} samples, or 1 if all "
                f"samples share it, or set its batch dimension with batch_dims={{{name!r}: ...}}."
            )
    return Batch(size, {name: dims[name] for name in inputs if name in dims and sizes[name] == size})


def input_signature(inputs: Mapping[str, object], batch: Batch) -> Hashable:
    """Return everything about the inputs that a captured graph depends on."""
    return _signature(inputs, batch, lambda shape: tuple(shape))


def input_kind(inputs: Mapping[str, object], batch: Batch) -> Hashable:
    """Return the signature of the inputs without the sizes, and whether the batch is one sample."""
    return _signature(inputs, batch, lambda shape: len(shape))


def _signature(
    inputs: Mapping[str, object], batch: Batch, describe: Callable[[list[int]], Hashable]
) -> Hashable:
    items: list[Hashable] = [("single", batch.size == 1)]
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, Tensor):
            dim = batch.dims.get(name)
            shape = [size for i, size in enumerate(value.shape) if i != dim]
            items.append((name, dim, str(value.dtype), describe(shape)))
        elif value is None or isinstance(value, bool | int | float | str):
            items.append((name, type(value).__name__, value))
        else:
            raise CaptureError(
                f"the input {name!r} is a {type(value).__name__}; expected a tensor, None, bool, int, float "
                "or str. Pass the tensors of a structure as separate inputs."
            )
    return tuple(items)


def hint_size(
    inputs: Mapping[str, object], low: int = 2, high: int = 1 << 15, *, others: Sequence[int] = ()
) -> int:
    """Return a batch size that no other dimension of the example has, so that sizes cannot be confused."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
    taken = set(others) | {size for tensor in tensors for size in tensor.shape}
    primes = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
    candidates = (*(prime for prime in primes if low <= prime <= high), *range(low, min(high, low + 99) + 1))
    return next((size for size in candidates if size not in taken), low)


def dim_of(
    size: Any, symbol: sympy.Symbol | None, lengths: Mapping[sympy.Symbol, int] | None = None
) -> Dim | None:
    """Return a size of the graph as `per_sample * batch + fixed`; None if it has another form.

    `lengths` are the values of the other symbols.
    """
    if isinstance(size, int):
        return Dim(0, size)
    if not isinstance(size, torch.SymInt) or (symbol is None and not lengths):
        return None
    expression = size.node.expr
    return _linear(expression.xreplace(lengths) if lengths else expression, symbol)


@lru_cache(maxsize=4096)
def _linear(expression: sympy.Expr, symbol: sympy.Symbol | None) -> Dim | None:
    expression = sympy.expand(expression)
    if expression.free_symbols - {symbol}:
        return None
    if symbol is None:
        return Dim(0, int(expression))
    per_sample, fixed = expression.coeff(symbol, 1), expression.coeff(symbol, 0)
    if expression - per_sample * symbol - fixed != 0 or not (per_sample.is_Integer and fixed.is_Integer):
        return None
    return Dim(int(per_sample), int(fixed))
