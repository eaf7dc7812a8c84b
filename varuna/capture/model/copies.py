"""A model without its values: the code and the shapes that every later capture needs, at no cost in memory.

user's model ──hollow──► the same modules on `meta` ──fake──► the same modules on fake tensors, to be traced
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy that shares no storage with the model and holds none itself; ties are kept."""
    return _copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def fake_copy(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """A copy on fake tensors of a device."""

    def make(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    return _copy_with(model, make)


@torch.no_grad()
def _copy_with(model: nn.Module, make: Callable[[Tensor], Tensor]) -> nn.Module:
    # The memo of deepcopy answers for every parameter and buffer, so that no real one is ever copied.
    memo: dict[int, object] = {}
    keep_alive: list[Tensor] = []
    for parameter in model.parameters():
        new = make(parameter)
        memo[id(parameter)] = nn.Parameter(new, requires_grad=parameter.requires_grad)
        keep_alive.append(parameter)
    for buffer in model.buffers():
        memo[id(buffer)] = make(buffer)
        keep_alive.append(buffer)
    for module in model.modules():
        for value in vars(module).values():
            # Old weight_norm keeps a computed weight beside its parameters: it is computed anew at each call.
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach()
                keep_alive.append(value)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        return copy.deepcopy(model, {**memo, **_shared(model, memo)})


def _shared(model: nn.Module, memo: dict[int, object]) -> dict[int, object]:
    """Attributes that cannot be copied (locks, files, process groups): both models have the same ones."""
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


def uninitialized_copy(module: nn.Module) -> nn.Module:
    """A copy of one module with memory of its own on CPU, not yet written to."""
    return _copy_with(module, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"))
