"""Runs the gradient hooks of parameters once for each step, on the gradient of the global batch.

torch would run them in the backward of every micro-batch, on a part of the gradient that is neither reduced
nor scaled yet. So they are taken off during the backwards.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HooksOfParameter(NamedTuple):
    """The hooks of one parameter, by the number of their handle."""

    gradient: dict[int, Any]  # register_hook
    accumulated: dict[int, Any]  # register_post_accumulate_grad_hook


class ParameterHooks:
    """Keeps the hooks of parameters during the backwards of a step."""

    def __init__(self) -> None:
        self._removed: dict[Tensor, HooksOfParameter] = {}

    def take_off(self, parameters: Iterable[Tensor]) -> None:
        """Remove all hooks of the parameters, until `put_back`."""
        hooked = [p for p in parameters if p._backward_hooks or p._post_accumulate_grad_hooks]
        for parameter in hooked:
            gradient: Any = parameter._backward_hooks or {}
            accumulated: Any = parameter._post_accumulate_grad_hooks or {}
            self._removed[parameter] = HooksOfParameter(dict(gradient), dict(accumulated))
            gradient.clear()  # in place: handles and autograd refer to these dictionaries
            accumulated.clear()

    def put_back(self) -> dict[Tensor, HooksOfParameter]:
        """Register the hooks again, and return them."""
        removed, self._removed = self._removed, {}
        for parameter, hooks in removed.items():
            for registered, own in (
                (parameter._backward_hooks, hooks.gradient),
                (parameter._post_accumulate_grad_hooks, hooks.accumulated),
            ):
                if own:
                    assert registered is not None
                    registered.update(own)
        return removed


@torch.no_grad()
def run_gradient_hooks(hooks: dict[Tensor, HooksOfParameter]) -> None:
    """Let each hook see and replace the new gradient of its parameter, as in a backward."""
    for parameter, own in hooks.items():
        for hook in own.gradient.values():
            replaced = hook(parameter.grad) if parameter.grad is not None else None
            if replaced is not None:
                assert parameter.grad is not None
                parameter.grad.copy_(replaced)


@torch.no_grad()
def run_accumulated_hooks(hooks: dict[Tensor, HooksOfParameter]) -> None:
    """Run the hooks that follow the accumulation of the gradient."""
    for parameter, own in hooks.items():
        for hook in own.accumulated.values():
            if parameter.grad is not None:
                hook(parameter)
