"""An optimizer that was made before its models were partitioned, and then keeps only this rank's parameters.

Its `state_dict()` stays that of the whole models: the same on every rank, in the form of a single process.
A single process or any other layout can load it. An optimizer may have parameters of several models, and a
model may have several optimizers.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.execute.update.clipping import ModelNorm
from varuna.execute.update.optimizers import keep_parameters

Gather = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the values of all ranks by name, the same on all ranks."""


class ParameterName(NamedTuple):
    """A parameter of one of the optimizer's models."""

    model: "OptimizedModel"
    name: str


@dataclass(eq=False)
class OptimizedModel:
    """One model of an optimizer."""

    model: nn.Module
    names: dict[Tensor, str]  # of its current parameters
    held: dict[str, nn.Parameter] | None = None  # by canonical name; None: not partitioned yet
    gather: Gather = field(default=lambda own: own)

    def states(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of this rank's parameters on the host, by name."""
        assert self.held is not None
        return {
            name: {key: _on_host(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in self.held.items()
            if parameter in optimizer.state
        }


class PartitionedOptimizer:
    """Replaces `state_dict` and `load_state_dict` of an optimizer by those of its whole models."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._models: list[OptimizedModel] = []
        # The parameters in the script's order; those of a partitioned model by name, not to keep them alive.
        self._order: list[list[Tensor | ParameterName]] = [list(g["params"]) for g in optimizer.param_groups]
        self._placeholder: Tensor | None = None
        self._norm: weakref.ref[ModelNorm] | None = None  # of its first partitioned model
        self._plain_state_dict = optimizer.state_dict
        self._plain_load = optimizer.load_state_dict
        optimizer.state_dict = self.state_dict  # type: ignore[method-assign]
        optimizer.load_state_dict = self.load_state_dict  # type: ignore[method-assign]

    def add(self, model: nn.Module) -> None:
        """Add a model, which has some of the optimizer's parameters."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._models.append(OptimizedModel(model, names))

    @property
    def num_models(self) -> int:
        return len(self._models)

    def _model(self, model: nn.Module) -> OptimizedModel:
        return next(found for found in reversed(self._models) if found.model is model)

    def partition(self, model: nn.Module, held: dict[str, nn.Parameter], gather: Gather) -> None:
        """Keep only those of the model's parameters that are in `held`, and their state."""
        optimized = self._model(model)
        names, optimized.held, optimized.gather = optimized.names, held, gather
        self._order = [
            [ParameterName(optimized, names[p]) if isinstance(p, Tensor) and p in names else p for p in order]
            for order in self._order
        ]
        optimized.names = {parameter: name for name, parameter in model.named_parameters()}
        optimized.names |= {parameter: name for name, parameter in held.items()}
        optimizer_state = self.optimizer.state
        for group in self.optimizer.param_groups:
            currents: list[Tensor | None] = []
            for parameter in group["params"]:
                name = names.get(parameter)
                current = parameter if name is None else held.get(name)
                if current is None or current is not parameter:
                    state = optimizer_state.pop(parameter, None)
                    if current is not None and state is not None:
                        optimizer_state[current] = state
                currents.append(current)
                if current is not None:
                    for key, value in optimizer_state.get(current, {}).items():
                        if isinstance(value, Tensor) and value.dim():
                            optimizer_state[current][key] = value.to(current.device)
            keep_parameters(self.optimizer, group, currents)

    def clip_together(self, norm: ModelNorm) -> None:
        """Clip the gradients of a model together with those of the optimizer's other models."""
        first = self._norm() if self._norm is not None else None
        if first is None:
            self._norm = weakref.ref(norm)
        else:
            norm.join(first)

    def shard(self, model: nn.Module, before: Sequence[Tensor], gather: Gather) -> None:
        """Adapt to an optimizer that was sharded: it steps only a share of its parameters `before`."""
        optimized = self._model(model)
        assert optimized.held is not None
        own = {p for group in self.optimizer.param_groups for p in group["params"]}
        of_others = [p for p in before if p not in own]
        optimized.held = {name: p for name, p in optimized.held.items() if p in own}
        optimized.gather = gather
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
        """Return the state of the whole models (`from_global=False`: of this rank); all ranks call it."""
        self._remove_placeholder()
        self._adopt_added_groups()
        own = self._plain_state_dict()
        partitioned = [model for model in self._models if model.held is not None]
        if not partitioned or not from_global:
            return own
        everyone = {model: model.gather(model.states(self.optimizer)) for model in partitioned}
        state: dict[int, Any] = {}
        groups, first = [], 0
        for order, group in zip(self._order, own["param_groups"], strict=True):
            for number, key in enumerate(order, first):
                if isinstance(key, ParameterName):
                    found = everyone[key.model].get(key.name)
                else:
                    found = self.optimizer.state.get(key)
                if found:
                    state[number] = found
            groups.append({**group, "params": list(range(first, first + len(order)))})
            first += len(order)
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any], from_global: bool = True) -> None:
        """Load what `state_dict` returned, in this layout, another layout, or a single process."""
        self._remove_placeholder()
        self._adopt_added_groups()
        if not from_global or all(model.held is None for model in self._models):
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
                if isinstance(key, ParameterName) and key.name not in (key.model.held or {}):
                    continue
                own.append(index)
                if index in state_dict["state"]:
                    state[index] = state_dict["state"][index]
            groups.append({**group, "params": own})
        self._plain_load({"state": state, "param_groups": groups})

    def release(self, state_dict: Mapping[str, Any]) -> None:
        """Become a plain optimizer of the whole models again, whose parameters are on this rank by now."""
        own = {model: dict(model.model.named_parameters()) for model in self._models}
        for order, group in zip(self._order, self.optimizer.param_groups, strict=True):
            keys = [own[key.model][key.name] if isinstance(key, ParameterName) else key for key in order]
            group["params"] = keys
        self.optimizer.state_dict = self._plain_state_dict  # type: ignore[method-assign]
        self.optimizer.load_state_dict = self._plain_load  # type: ignore[method-assign]
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(dict(state_dict))

    def _adopt_added_groups(self) -> None:
        """Note the order of groups that the script has added, and keep this rank's parameters of them."""
        names = {
            parameter: ParameterName(model, name)
            for model in self._models
            if model.held is not None
            for parameter, name in model.names.items()
        }
        for group in self.optimizer.param_groups[len(self._order) :]:
            self._order.append([names.get(parameter, parameter) for parameter in group["params"]])
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]


def partition_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> PartitionedOptimizer:
    """Return the one object that replaces the optimizer's `state_dict`, for all models of the optimizer."""
    found = getattr(optimizer.state_dict, "__self__", None)
    partitioned = found if isinstance(found, PartitionedOptimizer) else PartitionedOptimizer(optimizer)
    partitioned.add(model)
    return partitioned


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value
