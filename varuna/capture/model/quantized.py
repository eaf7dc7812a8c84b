"""Linear layers with quantized, frozen weights (bitsandbytes 4-bit, torchao), in a form that can be traced.

Their weight is a tensor subclass with further tensors inside, which a capture does not see. Here such a layer
gets plain frozen parameters in place of the weight, and one operation that multiplies with the dequantized
weight and dequantizes it again in the backward, so that no activation holds it.

    layer.weight (Params4bit)  ──►  layer.weight_packed, layer.weight_absmax, ...
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from varuna.capture.trace.recorder import library
from varuna.errors import CaptureError

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers that hold the bits of other dtypes by size, so that no cast of a model changes them."""

FORMATS: dict[str, "QuantizedFormat"] = {}
"""The formats of this process's layers by their text, which operations of a graph name."""


@dataclass(frozen=True)
class QuantizedFormat:
    """Everything about a quantized weight except its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # of the weight that was quantized
    dtypes: tuple[tuple[str, torch.dtype], ...]  # of its tensors, by name

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> Any:
        """Return the weight as its own library has it."""
        raise NotImplementedError

    def dequantized(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        raise NotImplementedError

    def typed(self, bits: Sequence[Tensor]) -> dict[str, Tensor]:
        return {name: b.view(dtype) for b, (name, dtype) in zip(bits, self.dtypes, strict=True)}


@dataclass(frozen=True)
class FourBitFormat(QuantizedFormat):
    """A weight of bitsandbytes' Linear4bit."""

    quant_type: str
    blocksize: int
    nested_blocksize: int | None

    def _state(self, tensors: Mapping[str, Tensor]) -> Any:
        bnb = _functions()
        packed, absmax = tensors["weight_packed"], tensors["weight_absmax"]
        nested: Any = None
        if self.nested_blocksize is not None:
            nested = bnb.QuantState(
                tensors["weight_nested_absmax"],
                code=tensors["weight_nested_code"],
                blocksize=self.nested_blocksize,
                dtype=torch.float32,
            )
        return bnb.QuantState(
            absmax,
            shape=torch.Size(self.shape),
            code=_codes(self.quant_type, packed.device, self.blocksize),
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=tensors.get("weight_offset"),
            state2=nested,
        )

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> Any:
        packed, state = tensors["weight_packed"], self._state(tensors)
        return import_module("bitsandbytes.nn").Params4bit(
            packed,
            requires_grad=False,
            quant_state=state,
            blocksize=self.blocksize,
            compress_statistics=self.nested_blocksize is not None,
            quant_type=self.quant_type,
            quant_storage=packed.dtype,
            bnb_quantized=True,
        )

    def dequantized(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        packed, state = tensors["weight_packed"], self._state(tensors)
        state.dtype = dtype if dtype != torch.float64 else torch.float32
        found: Tensor = _functions().dequantize_4bit(packed, state)
        return found.to(dtype)


def _functions() -> Any:
    return import_module("bitsandbytes.functional")


@cache
def _codes(quant_type: str, device: torch.device, blocksize: int) -> Tensor:
    found: Tensor = _functions().get_4bit_type(quant_type, device=device, blocksize=blocksize)
    return found


@dataclass(frozen=True)
class SubclassFormat(QuantizedFormat):
    """A weight of torchao: a tensor subclass that is built of other tensors."""

    build: "Rebuild"

    def rebuilt(self, tensors: Mapping[str, Tensor]) -> Any:
        return nn.Parameter(self.build(iter(tensors.values())), requires_grad=False)

    def dequantized(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        found: Tensor = self.build(iter(tensors.values())).dequantize()
        return found.to(dtype)


@dataclass(frozen=True)
class Rebuild:
    """Builds a tensor subclass of its inner tensors, which may be subclasses, too."""

    kind: type
    inner: tuple[tuple[str, "Rebuild | None"], ...]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __call__(self, tensors: Any) -> Any:
        parts = {name: next(tensors) if build is None else build(tensors) for name, build in self.inner}
        kind: Any = self.kind
        return kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)


# ------------------------------------------------------------ the operation


library.define("dequantize(Tensor[] bits, str format, ScalarType dtype) -> Tensor")
library.impl(
    "dequantize",
    lambda bits, key, dtype: FORMATS[key].dequantized(FORMATS[key].typed(bits), dtype),
    "CompositeExplicitAutograd",
)


@torch.library.register_fake("varuna::dequantize", lib=library)  # type: ignore[untyped-decorator]
def _fake_weight(bits: list[Tensor], key: str, dtype: torch.dtype) -> Tensor:
    return bits[0].new_empty(FORMATS[key].shape, dtype=dtype)


class FrozenProduct(torch.autograd.Function):
    """The product with a frozen quantized weight, as bitsandbytes computes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: str, *bits: Tensor) -> Tensor:
        ctx.key, ctx.dtype = key, x.dtype
        ctx.save_for_backward(*bits)
        return F.linear(x, torch.ops.varuna.dequantize(bits, key, x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dtype = gradient.dtype if gradient.dtype == torch.float64 else FORMATS[ctx.key].dtype
        weight = torch.ops.varuna.dequantize(ctx.saved_tensors, ctx.key, dtype).to(gradient.dtype)
        product = gradient @ weight if ctx.needs_input_grad[0] else None
        return product, None, *(None for _ in ctx.saved_tensors)


class QuantizedLinear(nn.Module):
    """Mixed into the class of a layer whose weight is quantized: `_quantized` has its format."""

    _quantized: QuantizedFormat
    _plain_class: type[nn.Module]
    bias: Tensor | None

    def _bits(self) -> list[Tensor]:
        return [self._parameters[name] for name, _ in self._quantized.dtypes]  # type: ignore[misc]

    @property
    def weight(self) -> Any:
        """The weight as its library has it; while the model is traced, dequantized."""
        found, bits = self._quantized, self._bits()
        if bits[0].is_meta or isinstance(bits[0], FakeTensor) or torch.compiler.is_compiling():
            return torch.ops.varuna.dequantize(bits, repr(found), found.dtype)
        return found.rebuilt(found.typed([b.detach() for b in bits]))

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
        elif _address(value) != _address(self.weight):  # peft merges adapters; DoRA assigns the same weight
            restore(self)
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        dtype = getattr(self, "compute_dtype", None) or x.dtype
        apply: Any = FrozenProduct.apply
        result: Tensor = apply(x.to(dtype), repr(self._quantized), *self._bits())
        if self.bias is not None:
            result = result + self.bias.to(result.dtype)
        return result.to(x.dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the layer as its library does."""
        plain = copy.copy(self)
        plain.__dict__["_parameters"] = dict(self._parameters)
        restore(plain)
        plain._save_to_state_dict(destination, prefix, keep_vars)


def _address(weight: Tensor) -> int | None:
    return None if is_traceable_wrapper_subclass(weight) else weight.data_ptr()


@cache
def _traceable_class(kind: Any) -> Any:
    members = {"__module__": kind.__module__, "__doc__": kind.__doc__, "_plain_class": kind}
    return type(kind.__name__, (QuantizedLinear, kind), members)


# ------------------------------------------------------------ layers


def make_quantized_traceable(model: nn.Module) -> None:
    """Change the quantized layers of a model, in place, so that it can be traced. They compute the same."""
    layers: list[tuple[str, Any]] = list(model.named_modules())
    for path, module in layers:
        if isinstance(module, QuantizedLinear):
            FORMATS[repr(module._quantized)] = module._quantized
            continue
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        found = None if weight is None else _find(path, module, weight)
        if found is None:
            continue
        format, tensors = found
        if weight is not None and weight.requires_grad:
            raise CaptureError(
                f"the quantized weight of {path!r} is trained, but only its adapters can be (freeze it: "
                "peft.get_peft_model does)."
            )
        FORMATS[repr(format)] = format
        bits = {name: value.detach().contiguous() for name, value in tensors.items()}
        del module._parameters["weight"]
        module.__dict__.pop("quant_state", None)
        kind: Any = type(module)
        module.__class__ = _traceable_class(kind)
        module.__dict__["_quantized"] = format
        for name, value in bits.items():
            module._parameters[name] = nn.Parameter(value.view(BITS[value.element_size()]), False)


def restore(model: nn.Module) -> None:
    """Give the quantized layers of a model their own class and weight back, in place."""
    layers: list[Any] = list(model.modules())
    for module in layers:
        if isinstance(module, QuantizedLinear):
            weight = module.weight
            for name, _ in module._quantized.dtypes:
                del module._parameters[name]
            plain: Any = module._plain_class
            module.__class__ = plain
            del module.__dict__["_quantized"]
            module._parameters["weight"] = weight
            if hasattr(weight, "quant_state"):
                module.__dict__["quant_state"] = weight.quant_state


def _find(path: str, module: nn.Module, weight: Tensor) -> tuple[QuantizedFormat, dict[str, Tensor]] | None:
    kind = type(weight)
    if kind.__name__ == "Int8Params" and kind.__module__.startswith("bitsandbytes"):
        raise CaptureError(
            f"{path!r} is a Linear8bitLt of bitsandbytes, whose results depend on the other samples of a "
            "micro-batch: it searches them for outliers. Load the model in 4 bits: "
            "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4')."
        )
    if kind.__name__ == "Params4bit" and kind.__module__.startswith("bitsandbytes"):
        return _find_four_bits(path, module, weight)
    if kind.__module__.startswith("torchao.") and isinstance(module, nn.Linear):
        found = _find_subclass(weight)
        if found is not None and repr(found[0]) not in FORMATS:
            _refuse_rounded_inputs(path, weight)
        return found
    return None


@torch.no_grad()
def _refuse_rounded_inputs(path: str, weight: Any) -> None:
    """Raise if the product with this weight rounds its inputs, which is not what `FrozenProduct` computes.

    One large value in each row makes such rounding coarse for all others.
    """
    draw = torch.Generator().manual_seed(0)
    small = torch.randn(4, weight.shape[1], generator=draw)
    small[:, 0] = 0
    large = small.clone()
    large[:, 0] = 64
    small, large = (x.to(weight.device, weight.dtype) for x in (small, large))
    plain = weight.dequantize()
    error = (F.linear(large, weight) - F.linear(large, plain)).float().norm()
    if error > 0.05 * F.linear(small, plain).float().norm():
        raise CaptureError(
            f"the layer {path!r} rounds its inputs, too ({type(weight).__name__} of torchao): use a "
            "configuration that quantizes weights only, such as Int8WeightOnlyConfig."
        )


def _find_four_bits(path: str, module: nn.Module, weight: Any) -> tuple[QuantizedFormat, dict[str, Tensor]]:
    state = weight.quant_state if weight.quant_state is not None else getattr(module, "quant_state", None)
    if not isinstance(module, nn.Linear) or state is None:
        raise CaptureError(
            f"{path!r} has 4-bit weights, but is not a Linear4bit with quantized values (load the model with "
            "from_pretrained(..., quantization_config=), or move it to its device: model.to(device))."
        )
    if getattr(state, "packing_format_for_cpu", False):  # after an inference on the CPU
        weight.data, state = _functions()._convert_weight_packed_for_cpu_inverse(weight.data, state)
    packed = weight.detach().view(-1, 1).as_subclass(Tensor)
    tensors = {"weight_packed": packed, "weight_absmax": state.absmax}
    if state.nested:
        tensors["weight_nested_absmax"] = state.state2.absmax
        tensors["weight_nested_code"] = state.state2.code
        tensors["weight_offset"] = state.offset
    return FourBitFormat(
        tuple(state.shape),
        state.dtype,
        tuple((name, value.dtype) for name, value in tensors.items()),
        state.quant_type,
        state.blocksize,
        state.state2.blocksize if state.nested else None,
    ), tensors


def _find_subclass(weight: Tensor) -> tuple[QuantizedFormat, dict[str, Tensor]] | None:
    if not is_traceable_wrapper_subclass(weight):
        return None
    tensors: dict[str, Tensor] = {}

    def flatten(value: Any, prefix: str) -> Rebuild:
        names, context = value.__tensor_flatten__()
        inner = []
        for name in names:
            part = getattr(value, name)
            nested = is_traceable_wrapper_subclass(part)
            inner.append((name, flatten(part, f"{prefix}_{name}") if nested else None))
            if not nested:
                tensors[f"{prefix}_{name}"] = part
        return Rebuild(type(value), tuple(inner), context, tuple(value.shape), tuple(value.stride()))

    build = flatten(weight, "weight")
    dtypes = tuple((name, value.dtype) for name, value in tensors.items())
    return SubclassFormat(tuple(weight.shape), weight.dtype, dtypes, build), tensors
