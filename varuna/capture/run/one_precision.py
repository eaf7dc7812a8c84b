"""Computes all floating-point values of a model in one precision, so that two runs can be compared closely.

A model in bf16 rounds so coarsely that a wrong gradient hides in the rounding. In fp64 two correct runs agree
to twelve digits. A cast to a lower precision, in the model's code or in a captured graph, is ignored.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

WIDE = {torch.float64: torch.complex128, torch.float32: torch.complex64}
"""The complex dtype that belongs to a precision."""

KEEP_DEVICES = (aten._to_copy.default, aten.copy_.default)
"""Operations that may take tensors of two devices."""

EXTREMES: dict[float, float] = {
    getattr(torch.finfo(dtype), name): getattr(torch.finfo(torch.float32), name)
    for dtype in (torch.float16, torch.bfloat16)
    for name in ("min", "max")
}
"""Masks add the lowest number of their dtype: as constants of a graph they become those of fp32."""


class OnePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operations in one dtype on one device. `dtype` None: only moves stray tensors to the device."""

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self.requested: set[torch.dtype] = set()  # that the code or graph asked for
        self._dtypes: dict[torch.dtype, torch.dtype] = {}
        if dtype is not None:
            self._dtypes = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), dtype)
            self._dtypes[torch.complex64] = WIDE[dtype]
            self._dtypes.pop(dtype, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.view.dtype:  # reads the bits
            return func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        changed = {
            id(args[i])
            for i, argument in enumerate(schema.arguments if schema is not None and schema.is_mutable else ())
            if i < len(args) and argument.alias_info is not None and argument.alias_info.is_write
        }
        moves = func not in KEEP_DEVICES

        def convert(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf if id(leaf) in changed else self._converted(leaf, moves)
            if isinstance(leaf, torch.dtype):
                self.requested.add(leaf)
                return self._dtypes.get(leaf, leaf)
            if type(leaf) is float and self._dtypes:
                return EXTREMES.get(leaf, leaf)
            return leaf

        args, kwargs = pytree.tree_map(convert, (args, kwargs))
        return SUBSTITUTES.get(func, func)(*args, **kwargs)

    def _converted(self, tensor: Tensor, moves: bool) -> Tensor:
        dtype = self._dtypes.get(tensor.dtype, tensor.dtype)
        elsewhere = moves and tensor.dim() > 0 and tensor.device not in (self._device, torch.device("meta"))
        if dtype == tensor.dtype and not elsewhere:
            return tensor
        return tensor.to(device=self._device if elsewhere else tensor.device, dtype=dtype)


def _grouped_product(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Multiply groups of rows by matrices of their own; torch has it in low precisions only."""
    if offs is None:
        return torch.bmm(a, b)
    stops = offs.tolist()
    spans = list(zip([0, *stops], stops, strict=False))
    if a.dim() == 2 and b.dim() == 3:
        rows = a.new_zeros(a.shape[0], b.shape[2])
        for (first, stop), matrix in zip(spans, b, strict=True):
            rows[first:stop] = a[first:stop] @ matrix
        return rows
    if a.dim() == 3:
        columns = a.new_zeros(a.shape[1], b.shape[1])
        for (first, stop), matrix in zip(spans, a, strict=True):
            columns[:, first:stop] = matrix @ b[:, first:stop]
        return columns
    return torch.stack([a[:, first:stop] @ b[first:stop] for first, stop in spans])


CASTS: dict[Any, torch.dtype] = {
    Tensor.float: torch.float32,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}


class _NeedlessCasts(TorchFunctionMode):
    """Lets a cast return its tensor, as `x.to(torch.float32)` does in fp32, to be changed in place."""

    def __init__(self, dtype: torch.dtype, mode: OnePrecision) -> None:
        super().__init__()
        self._dtype, self._mode = dtype, mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in CASTS or func in (Tensor.to, Tensor.type, Tensor.type_as):
            tensor, *rest = args
            wanted = CASTS.get(func) or next((x for x in rest if isinstance(x, torch.dtype)), None)
            if wanted is None and len(rest) == 1 and isinstance(rest[0], Tensor):
                wanted = rest[0].dtype if rest[0].device == tensor.device else None
            wanted = kwargs.get("dtype", wanted)
            if wanted is not None:
                self._mode.requested.add(wanted)
            plain = len(rest) <= 1 and not kwargs.keys() - {"dtype"}
            if plain and tensor.dtype == self._dtype and wanted in (*CASTS.values(), self._dtype):
                return tensor
        return func(*args, **kwargs)


SUBSTITUTES: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_product}


@contextmanager
def one_precision(dtype: torch.dtype | None, device: torch.device) -> Iterator[OnePrecision]:
    """Run everything inside in one precision on one device; `dtype` None: in the precision of the code."""
    mode = OnePrecision(dtype, device)
    finfo, before = torch.finfo, torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    # The code's constants must be those of the graph, which was traced in a lower precision.
    replaced = patch.object(torch, "finfo", lambda *_, **__: finfo(torch.float32))
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")
            if dtype is None:
                yield mode
            else:
                with replaced, _NeedlessCasts(dtype, mode):
                    yield mode
    finally:
        torch.set_default_dtype(before)
