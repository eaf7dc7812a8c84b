"""An optimizer that was made before the model was partitioned, and then keeps only this rank's parameters.

Its `state_dict()` stays that of the whole model: the same on every rank, in the form of a single process.
A single process or any other layout can load it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Gather = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the values of all ranks by name, the same on all ranks."""


class PartitionedOptimizer:
    """Replaces `state_dict` and `load_state_dict` of an optimizer by those of the whole model."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.optimizer = optimizer
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        # The parameters in the script's order: a name, or a tensor that is not the model's.
        self._order: list[list[str | Tensor]] = [
            [names.get(p, p) for p in group["params"]] for group in optimizer.param_groups
        ]
        self._held: dict[str, nn.Parameter] | None = None  # by canonical name; None: not partitioned yet
        self._partitioned: list[Tensor] = []  # the optimizer's parameters that this rank holds
        self._gather: Gather = lambda own: own
        self._names = names
        self._placeholder: Tensor | None = None
        self._plain_state_dict = optimizer.state_dict
        self._plain_load = optimizer.load_state_dict
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    def partition(self, held: dict[str, nn.Parameter], gather: Gather) -> None:
        """Keep only the parameters in `held`, and their state."""
        self._held, self._gather, names = held, gather, self._names
        self._names = {parameter: name for name, parameter in held.items()}
        optimizer_state = self.optimizer.state
        for group in self.optimizer.param_groups:
            kept: list[Tensor] = []
            for parameter in group["params"]:
                name = names.get(parameter)
                current = parameter if name is None else held.get(name)
                if current is None or current is not parameter:
                    state = optimizer_state.pop(parameter, None)
                    if current is not None and state is not None:
                        optimizer_state[current] = state
                if current is not None:
                    kept.append(current)
                    for key, value in optimizer_state.get(current, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            optimizer_state[current][key] = value.to(current.device)
            group["params"] = kept
            self._partitioned += kept

    def shard(self, gather: Gather) -> None:
        """Adapt to an optimizer that was sharded: it steps only a share of this rank's parameters."""
        assert self._held is not None
        own = {p for group in self.optimizer.param_groups for p in group["params"]}
        of_others = [p for p in self._partitioned if p not in own]
        self._held = {name: p for name, p in self._held.items() if p in own}
        self._gather = gather
        plain_zero_grad = self.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            """Zero all gradients of this rank, also those that other replicas step."""
            plain_zero_grad(set_to_none)
            for parameter in of_others:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

        self.optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def add_placeholder(self, device: torch.device, *, overflowed: bool) -> None:
        """Add a placeholder parameter with a gradient, if no parameter of this rank has a gradient.

        A gradient scaler needs at least one gradient, or it refuses the step. All ranks must see the same
        overflow, so that all keep the same scale.
        """
        self._remove_placeholder()
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            return
        self._placeholder = nn.Parameter(torch.zeros(1, device=device))
        self._placeholder.grad = torch.full_like(self._placeholder, float("inf") if overflowed else 0.0)
        self.optimizer.param_groups[0]["params"].append(self._placeholder)

    def _remove_placeholder(self) -> None:
        if self._placeholder is not None:
            self.optimizer.param_groups[0]["params"].pop()
            self.optimizer.state.pop(self._placeholder, None)
            self._placeholder = None

    def state_dict(self, from_global: bool = True, **_options: Any) -> dict[str, Any]:
        """Return the state of the whole model (`from_global=False`: of this rank); all ranks call it."""
        self._remove_placeholder()
        own = self._plain_state_dict()
        if self._held is None or not from_global:
            return own
        states = {
            self._names[p]: {key: _on_host(value) for key, value in state.items()}
            for p, state in self.optimizer.state.items()
            if p in self._names
        }
        everyone = self._gather(states)
        state: dict[int, Any] = {}
        groups, first = [], 0
        for order, group in zip(self._order, own["param_groups"], strict=True):
            for number, key in enumerate(order, first):
                found = everyone.get(key) if isinstance(key, str) else self.optimizer.state.get(key)
                if found:
                    state[number] = found
            groups.append({**group, "params": list(range(first, first + len(order)))})
            first += len(order)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any], from_global: bool = True) -> None:
        """Load what `state_dict` returned, in this layout, another layout, or a single process."""
        self._remove_placeholder()
        if self._held is None or not from_global:
            self._plain_load(dict(state_dict))
            return
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(order) for order in self._order]
        if found != expected:
            raise ValueError(
                f"the state has parameter groups of sizes {found}, but this optimizer was made with "
                f"{expected} (load the state of an optimizer for the same model)"
            )
        state, groups = {}, []
        for order, group in zip(self._order, state_dict["param_groups"], strict=True):
            own = []
            for key, index in zip(order, group["params"], strict=True):
                if isinstance(key, str) and key not in self._held:
                    continue
                own.append(index)
                if index in state_dict["state"]:
                    state[index] = state_dict["state"][index]
            groups.append({**group, "params": own})
        self._plain_load({"state": state, "param_groups": groups})


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
