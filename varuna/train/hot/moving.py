"""The state that a rank gives and takes when the stages of a job change: values, gradients, optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from varuna.capture import StageState
from varuna.checkpoint.format.manifest import hash_of
from varuna.checkpoint.format.optimizer import SPEED_OPTIONS, pack_groups
from varuna.checkpoint.format.tree import pack, unpack
from varuna.errors import WorkerError
from varuna.execute.rebuild.handover import Unit
from varuna.train.saving.training_state import TrainingState

JOB = ""
"""Name of the unit with what is the same on all ranks. Joiners take it."""


@dataclass
class MovingState:
    """The state of a rank on its way from one layout to the next.

    `training` is that of the last layout. `state` has the tensors of the next one; None: this rank leaves.
    """

    training: TrainingState
    state: StageState | None
    is_joiner: bool
    job: Callable[[], Mapping[str, Any]]  # plain values that joiners take
    groups: dict[str, int] = field(default_factory=dict)  # optimizer group of each tensor that arrived
    base: set[str] = field(default_factory=set)  # tensors of the next layout in the frozen base
    taken_job: dict[str, Any] | None = None

    @property
    def holds(self) -> dict[str, int]:
        """Bytes of the values that this rank can give, by name."""
        if self.is_joiner:
            return {}
        stage = self.training.stage
        return {JOB: 0, **{name: stage.tensor(name).nbytes for name in stage.canonical}}

    @property
    def lacks(self) -> list[str]:
        if self.state is None:
            return []
        held = self.holds
        return [name for name in (JOB, *self.state.canonical) if name not in held]

    def give(self, name: str) -> Unit:
        tensors: dict[str, Tensor] = {}
        if name == JOB:
            return Unit(pack(dict(self.job()), "job", tensors), tensors)
        tensor = self.training.stage.tensor(name)
        tensors["value"] = tensor
        if tensor.grad is not None:
            tensors["gradient"] = tensor.grad
        optimizer, group, state = self.training.optimizer, None, {}
        if optimizer is not None:
            group = _group_of(optimizer).get(tensor)
            state = dict(optimizer.state.get(tensor, {}))
        tree = {
            "trains": tensor.requires_grad,
            "group": group,
            "in_base": name in self.training.base,
            "state": pack(state, "state", tensors),
            "on_host": [key for key, one in tensors.items() if one.device.type == "cpu"],
        }
        return Unit(tree, tensors)

    def memory(self, name: str, key: str) -> Tensor | None:
        return self.state.tensor(name).data if self.state is not None and key == "value" else None

    def take(self, name: str, unit: Unit) -> None:
        assert self.state is not None, "a rank that leaves takes nothing"
        if name == JOB:
            self.taken_job = unpack(unit.tree, unit.tensors.__getitem__)
            return
        own, value = self.state.tensor(name), unit.tensors["value"]
        if value.data_ptr() != own.data_ptr():
            own.data.copy_(value)
        on_host = set(unit.tree["on_host"])

        def placed(key: str) -> Tensor:
            found = unit.tensors[key]
            return found if key in on_host else found.to(own.device)

        if own.is_leaf and own.requires_grad != unit.tree["trains"]:
            own.requires_grad_(unit.tree["trains"])
        own.grad = placed("gradient").view(own.shape) if "gradient" in unit.tensors else None
        if unit.tree["in_base"]:
            self.base.add(name)
        optimizer = self.training.optimizer
        if unit.tree["group"] is None:
            return
        if optimizer is None:
            raise WorkerError(
                "this rank has no optimizer (call set_optimizer before resume and the first step)"
            )
        self.groups[name] = unit.tree["group"]
        state = unpack(unit.tree["state"], placed)
        if state:
            optimizer.state[own] = state
        else:
            optimizer.state.pop(own, None)

    def arrange_optimizer(self) -> None:
        """Give the optimizer the parameters of the next layout; its groups stay the same objects."""
        optimizer = self.training.optimizer
        if optimizer is None or self.state is None:
            return
        before = _group_of(optimizer)
        held = {self.training.stage.tensor(name) for name in self.training.stage.canonical}
        canonical: dict[Tensor, str] = {self.state.tensor(name): name for name in self.state.canonical}
        lists: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for _, parameter in self.state.named_parameters():
            number = self.groups.get(canonical[parameter], before.get(parameter))
            if number is not None:
                lists[self._checked(number, optimizer)].append(parameter)
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            others = [one for one in group["params"] if one not in held and one not in canonical]
            group["params"][:] = [*parameters, *others]  # others: the placeholder
        current = {one for group in optimizer.param_groups for one in group["params"]}
        for gone in [one for one in optimizer.state if one not in current]:
            del optimizer.state[gone]

    def _checked(self, group: int, optimizer: torch.optim.Optimizer) -> int:
        if group >= len(optimizer.param_groups):
            raise WorkerError(
                f"a parameter of the optimizer's group {group} arrived, but the optimizer of this rank has "
                f"{len(optimizer.param_groups)} groups (make the same groups on all ranks, empty ones too)"
            )
        return group


def _group_of(optimizer: torch.optim.Optimizer) -> dict[Tensor, int]:
    groups = optimizer.param_groups
    return {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}


def hash_groups(optimizer: torch.optim.Optimizer | None) -> str | None:
    """Return a hash of the hyper-parameters of all groups; None if there are none, or they cannot be sent."""
    if optimizer is None:
        return None
    try:
        return hash_of(b"\0".join(pack_groups(optimizer)))
    except TypeError:
        return None


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def set_group_options(optimizer: torch.optim.Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    """Set the hyper-parameters of each group, in place."""
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for key, value in values.items():
            if key in SPEED_OPTIONS:
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value) if not isinstance(value, Tensor) else current.copy_(value)
            else:
                group[key] = value
