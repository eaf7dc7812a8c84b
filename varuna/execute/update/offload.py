"""Keeps the optimizer's state in host memory and copies it to the device for a few parameters at a time.

The optimizer's own update still runs on the device, so its results are bit for bit the same. The cost is the
copies in both directions, once per step.
"""

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""Parameters that are updated together: their state is on the device at the same time."""


def keep_state_on_host(optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Keep the state on the host. The optimizer must update parameters independently, without a closure."""
    own_step: Any = type(optimizer).step
    # The undecorated method: hooks run once around all chunks, not around each.
    update = getattr(own_step, "__wrapped__", own_step)

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("an optimizer with state on the host takes no closure (call step() without)")
        everything = self.param_groups
        for chunk in chunks(everything, chunk_bytes):
            with _only(self, everything, chunk):
                for parameter in chunk:
                    _to_device(self.state.get(parameter, {}), parameter.device)
                update(self)
                for parameter in chunk:
                    _to_host(self.state.get(parameter, {}))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # from now on the host may read the state

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(_all_to_host)
    _all_to_host(optimizer)


def chunks(groups: Sequence[dict[str, Any]], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the parameters that have a gradient, in chunks of at most `chunk_bytes` or one parameter."""
    chunk: list[Tensor] = []
    size = 0
    for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
        if chunk and size + parameter.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(parameter)
        size += parameter.nbytes
    if chunk:
        yield chunk


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], chunk: Sequence[Tensor]
) -> Iterator[None]:
    """Restrict the optimizer to these parameters; the groups stay the same objects."""
    wanted = set(chunk)
    all_parameters = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if p in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(groups, all_parameters, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups


def _to_device(state: dict[str, Any], device: torch.device) -> None:
    for key, value in state.items():
        if _is_large(value):
            state[key] = value.to(device, non_blocking=True)


def _to_host(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if _is_large(value) and value.device.type == "cuda":
            host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            state[key] = host.copy_(value, non_blocking=True)


def _all_to_host(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        _to_host(state)


def _is_large(value: object) -> bool:
    """Return False for counters: they stay where the optimizer wants them."""
    return isinstance(value, Tensor) and value.numel() > 1
