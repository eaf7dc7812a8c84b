"""An optimizer that was made before the model was spread: it keeps this rank's parameters alone.

Its `state_dict()` stays that of the whole model: the same on every rank, as one plain process would have
it, and one that a plain process or any other layout loads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Known = dict[str, nn.Parameter]
"""The parameters of the model that this rank holds, by canonical name."""


class Patched:
    """`gather` brings together what the ranks hold: a mapping by name, the same on all of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        self._optimizer = optimizer
        # The parameters in the order in which the script gave them: a name, or one that is not the model's.
        self._order: list[list[str | Tensor]] = [
            [names.get(p, p) for p in group["params"]] for group in optimizer.param_groups
        ]
        self._held: Known | None = None  # None: all, for nothing is spread yet
        self._spread: list[Tensor] = []  # what the optimizer was given and this rank holds
        self._gather: Callable[[dict[str, Any]], dict[str, Any]] = lambda own: own
        self._names = {parameter: name for parameter, name in names.items()}
        self._stand_in: Tensor | None = None
        self._plain_state_dict = optimizer.state_dict
        self._plain_load = optimizer.load_state_dict
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    def spread(
        self,
        held: Known,
        replaced: Mapping[Tensor, str],
        gather: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        """From now on the optimizer has what this rank holds, and state for nothing else."""
        self._held, self._gather = held, gather
        self._names = {parameter: name for name, parameter in held.items()}
        for group in self._optimizer.param_groups:
            kept: list[Tensor] = []
            for parameter in group["params"]:
                name = replaced.get(parameter)
                now = parameter if name is None else held.get(name)
                if now is None or now is not parameter:
                    state = self._optimizer.state.pop(parameter, None)
                    if now is not None and state is not None:
                        self._optimizer.state[now] = state
                if now is not None:
                    kept.append(now)
                    for key, value in self._optimizer.state.get(now, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            self._optimizer.state[now][key] = value.to(now.device)
            group["params"] = kept
            self._spread += kept

    def share(self, gather: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """The optimizer has been left a share of what this rank holds."""
        assert self._held is not None
        here = {p for group in self._optimizer.param_groups for p in group["params"]}
        elsewhere = [p for p in self._spread if p not in here]
        self._held = {name: p for name, p in self._held.items() if p in here}
        self._gather = gather
        plain_zero_grad = self._optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            """Of all that it was given: other replicas step for some, but their gradients are here too."""
            plain_zero_grad(set_to_none)
            for parameter in elsewhere:
                if set_to_none or parameter.grad is None:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

        self._optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def stand_in(self, device: torch.device, *, overflowed: bool) -> None:
        """After a backward in fp16: where no parameter here has a gradient, one that is none of the model's.

        A gradient scaler must find something to look at (else it refuses the step), and on all ranks the
        same, so that all have one scale.
        """
        self._dismiss()
        if any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"]):
            return
        self._stand_in = nn.Parameter(torch.zeros(1, device=device))
        self._stand_in.grad = torch.full_like(self._stand_in, float("inf") if overflowed else 0.0)
        self._optimizer.param_groups[0]["params"].append(self._stand_in)

    def _dismiss(self) -> None:
        if self._stand_in is not None:
            self._optimizer.param_groups[0]["params"].pop()
            self._optimizer.state.pop(self._stand_in, None)
            self._stand_in = None

    def state_dict(self, from_global: bool = True, **_options: Any) -> dict[str, Any]:
        """Of the whole model, the same on all ranks, who all call it; `from_global=False`: of this rank."""
        self._dismiss()
        own = self._plain_state_dict()
        if self._held is None or not from_global:
            return own
        states = {
            self._names[p]: {key: _on_host(value) for key, value in state.items()}
            for p, state in self._optimizer.state.items()
            if p in self._names
        }
        everyone = self._gather(states)
        state: dict[int, Any] = {}
        groups, number = [], 0
        for order, group in zip(self._order, own["param_groups"], strict=True):
            indices = []
            for key in order:
                found = everyone.get(key) if isinstance(key, str) else self._optimizer.state.get(key)
                if found:
                    state[number] = found
                indices.append(number)
                number += 1
            groups.append({**group, "params": indices})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any], from_global: bool = True) -> None:
        """What `state_dict` gave, on this layout or another, or a plain process."""
        self._dismiss()
        if self._held is None or not from_global:
            self._plain_load(dict(state_dict))
            return
        counts = [len(group["params"]) for group in state_dict["param_groups"]]
        if counts != [len(order) for order in self._order]:
            raise ValueError(
                f"the state has groups of {counts} parameters, this optimizer was made with "
                f"{[len(order) for order in self._order]} (load what an optimizer of the same model saved)"
            )
        state, groups = {}, []
        for order, group in zip(self._order, state_dict["param_groups"], strict=True):
            here = []
            for key, index in zip(order, group["params"], strict=True):
                if isinstance(key, str) and key not in self._held:
                    continue
                here.append(index)
                if index in state_dict["state"]:
                    state[index] = state_dict["state"][index]
            groups.append({**group, "params": here})
        self._plain_load({"state": state, "param_groups": groups})


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
