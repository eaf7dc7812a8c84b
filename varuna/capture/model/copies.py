"""Copies of a model without its values, for later captures.

model ──meta_copy──► the same modules on `meta` ──fake_copy──► the same modules on fake tensors, to trace
"""

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model on `meta`: it shares no storage with the original and keeps its ties."""
    return _copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """Copy a model with fake tensors of a device."""

    def make(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    return _copy_with(model, make)


def uninitialized_copy(module: nn.Module) -> nn.Module:
    """Copy a module on the CPU, with memory of its own that is not initialized."""
    return _copy_with(module, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))


def copy_with_values(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a model on `meta`; the named tensors get these values, and all others stay on `meta`."""
    named = dict(
        [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    )
    given = {id(named[name]): value for name, value in values.items()}
    return _copy_with(model, lambda tensor: given.get(id(tensor), tensor.detach()))


def working_copy(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """Copy a model to run it: buffers are its own, and parameters too unless device and dtype are the same.

    `dtype` None keeps each tensor's; else all floating-point tensors get it.
    """

    def make(tensor: Tensor) -> Tensor:
        wanted = tensor.dtype
        if dtype is not None and (tensor.is_floating_point() or tensor.is_complex()):
            wanted = dtype.to_complex() if tensor.is_complex() else dtype
        return tensor.detach().to(device, wanted, copy=not isinstance(tensor, nn.Parameter))

    return _copy_with(model, make)


@torch.no_grad()
def _copy_with(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    # deepcopy finds every parameter and buffer in its memo, so that no real one is copied.
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = make(buffer)
    for module in model.modules():
        for value in vars(module).values():
            # The old weight_norm keeps a computed weight beside its parameters.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach()
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        return copy.deepcopy(model, {**memo, **_uncopyable(model, memo)})


def _uncopyable(model: nn.Module, memo: dict[int, object]) -> dict[int, object]:
    """Return the attributes that cannot be copied (locks, files, process groups): both models share them."""
    shared: dict[int, object] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules") or isinstance(value, nn.Module):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                shared[id(value)] = value
    return shared
