"""The optimizer's state in the host's memory, lent to the device for a few parameters at a time.

The update itself stays on the device and is the optimizer's own, so it gives the same bits as with the
state at home there; what it costs is the way there and back, once a step.
"""

import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 256 << 20
"""Of parameters that are updated at one go: their state is on the device together."""


def keep_state_on_host(optimizer: torch.optim.Optimizer, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """For any optimizer that updates each parameter by itself; those that ask for a closure do not."""
    own_step: Any = type(optimizer).step
    # As the class wrote it: hooks run once around all chunks, not around each.
    update = getattr(own_step, "__wrapped__", own_step)

    def step(self: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise ValueError("an optimizer whose state is kept on the host takes no closure")
        everything = self.param_groups
        for chunk in chunks(everything, chunk_bytes):
            with _only(self, everything, chunk):
                for parameter in chunk:
                    _move(self.state.get(parameter, {}), parameter.device)
                update(self)
                for parameter in chunk:
                    _keep(self.state.get(parameter, {}))
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # the host may read the state from now on

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    optimizer.step = types.MethodType(hooked, optimizer)  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(_keep_all)
    _keep_all(optimizer)


def chunks(groups: Sequence[dict[str, Any]], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """The parameters that have a gradient, in runs of at most so many bytes; one at least in each."""
    run: list[Tensor] = []
    size = 0
    for parameter in (p for group in groups for p in group["params"] if p.grad is not None):
        if run and size + parameter.nbytes > chunk_bytes:
            yield run
            run, size = [], 0
        run.append(parameter)
        size += parameter.nbytes
    if run:
        yield run


@contextmanager
def _only(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], chunk: Sequence[Tensor]
) -> Iterator[None]:
    """The optimizer as if it had no other parameters; the groups stay the same objects."""
    wanted = set(chunk)
    all_of = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if p in wanted]
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        for group, parameters in zip(groups, all_of, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups


def _move(state: dict[str, Any], device: torch.device) -> None:
    for key, value in state.items():
        if _is_large(value):
            state[key] = value.to(device, non_blocking=True)


def _keep(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if _is_large(value) and value.device.type == "cuda":
            home = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            state[key] = home.copy_(value, non_blocking=True)


def _keep_all(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        _keep(state)


def _is_large(value: object) -> bool:
    """Counters stay where the optimizer wants them."""
    return isinstance(value, Tensor) and value.numel() > 1
