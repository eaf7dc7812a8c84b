"""The state that a rank gives and takes when the stages of a job change: values, gradients, optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from varuna.capture import StageState
from varuna.checkpoint.format.manifest import hash_of
from varuna.checkpoint.format.optimizer import PARAMETER_KEYS, SPEED_OPTIONS, pack_groups
from varuna.checkpoint.format.tree import pack, unpack
from varuna.errors import WorkerError
from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.session import Session
from varuna.execute.rebuild.handover import Unit, hand_over
from varuna.train.saving.training_state import TrainingState

JOB = ""
"""Name of the unit with what is the same on all ranks. Joiners take it."""
SHARD = "\0"
"""Prefix of units with a shard of the optimizer's state, in a copy."""


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
    copied: Mapping[str, Unit] | None = None  # all ranks go back to this state of an earlier step
    taken_job: dict[str, Any] | None = None
    note_progress: Callable[[], None] = lambda: None  # some bytes have moved

    @property
    def holds(self) -> dict[str, int]:
        """Bytes of the values that this rank can give, by name."""
        if self.is_joiner:
            return {}
        if self.copied is not None:
            return {name: num_bytes(one) for name, one in self.copied.items() if not name.startswith(SHARD)}
        stage = self.training.stage
        return {JOB: 0, **{name: stage.tensor(name).nbytes for name in stage.canonical}}

    @property
    def lacks(self) -> list[str]:
        if self.state is None:
            return []
        held = self.holds
        return [name for name in (JOB, *self.state.canonical) if name not in held]

    def all_units(self) -> dict[str, Unit]:
        """Return everything that this rank can give, to be copied."""
        units = {name: self.give(name) for name in self.holds}
        if self.training.shards is not None:
            shards = MovingShards(self.training, False, None)
            units |= {f"{SHARD}{name}": shards.give(name) for name in shards.holds}
        return units

    def give(self, name: str) -> Unit:
        if self.copied is not None:
            return self.copied[name]
        tensors: dict[str, Tensor] = {}
        if name == JOB:
            return Unit(pack(dict(self.job()), "job", tensors), tensors)
        tensor = self.training.stage.tensor(name)
        tensors["value"] = tensor
        if tensor.grad is not None:
            tensors["gradient"] = tensor.grad
        optimizer = self.training.optimizer
        state = {} if optimizer is None or self.training.shards else dict(optimizer.state.get(tensor, {}))
        tree = {
            "trains": tensor.requires_grad,
            "group": self._groups_before.get(tensor),
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
            self.taken_job = unpack(unit.tree, lambda key: own_memory(unit.tensors[key]))
            return
        own, value = self.state.tensor(name), unit.tensors["value"]
        if value.data_ptr() != own.data_ptr():
            own.data.copy_(value)
        if own.is_leaf and own.requires_grad != unit.tree["trains"]:
            own.requires_grad_(unit.tree["trains"])
        gradient = unit.tensors.get("gradient")
        own.grad = None if gradient is None else own_memory(gradient.to(own.device)).view(own.shape)
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
        if self.training.shards is not None:  # the state follows to the owner
            return
        set_state(optimizer, own, unit)

    @cached_property
    def _groups_before(self) -> dict[Tensor, int]:
        """The optimizer group of each parameter in the last layout."""
        if self.training.shards is not None:
            return dict(self.training.shards.group_of)
        groups = [] if self.training.optimizer is None else self.training.optimizer.param_groups
        return {parameter: index for index, group in enumerate(groups) for parameter in group["params"]}

    def hand_over(self, group: Collective, session: Session | None) -> int:
        """Give and take what changes its owner, and give the optimizer its parameters. All ranks call this.

        `session` of the next layout; None: this rank leaves. Returns the bytes that arrived here.
        """
        move = partial(hand_over, group, machine_identity(), note_progress=self.note_progress)
        received = move(self.holds, self.lacks, self)
        if self.copied is not None and self.state is not None:
            for name in (JOB, *self.state.canonical):
                if name in self.copied:
                    self.take(name, self.copied[name])
        shards = None
        if self.training.shards is not None:
            shards = MovingShards(self.training, self.is_joiner, self.copied)
        if session is not None:
            self._arrange_optimizer(session)
        if shards is not None:
            lacks = [] if self.state is None else shards.lacks(self.state)
            received += move(shards.holds, lacks, shards)
            shards.take_copied()
        return received

    def _arrange_optimizer(self, session: Session) -> None:
        """Give the optimizer the parameters of the next layout; its groups stay the same objects."""
        optimizer = self.training.optimizer
        if optimizer is None or self.state is None:
            return
        before = self._groups_before
        held = {self.training.stage.tensor(name) for name in self.training.stage.canonical}
        canonical: dict[Tensor, str] = {self.state.tensor(name): name for name in self.state.canonical}
        lists: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for _, parameter in self.state.named_parameters():
            number = self.groups.get(canonical[parameter], before.get(parameter))
            if number is not None:
                lists[self._checked(number, optimizer)].append(parameter)
        for one, number in before.items():
            if one not in held and one not in canonical:  # the placeholder
                lists[number].append(one)
        if self.training.shards is not None:
            self.training.shards.place(lists, session)
            return
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"][:] = parameters
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


class OptimizerBackup:
    """The parts of an optimizer that a move changes, as they were before. It changes no tensor of them."""

    def __init__(self, training: TrainingState) -> None:
        optimizer = training.optimizer
        self._optimizer, self._shards = optimizer, training.shards
        self._groups = [] if optimizer is None else [list(one["params"]) for one in optimizer.param_groups]
        self._state = {} if optimizer is None else dict(optimizer.state)
        self._owners = {} if training.shards is None else dict(vars(training.shards))

    def restore(self) -> None:
        if self._optimizer is None:
            return
        for group, parameters in zip(self._optimizer.param_groups, self._groups, strict=True):
            group["params"][:] = parameters
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        if self._shards is not None:
            vars(self._shards).update(self._owners)


class MovingShards:
    """The sharded state of the optimizer on its way to its next owners."""

    def __init__(self, training: TrainingState, is_joiner: bool, copied: Mapping[str, Unit] | None) -> None:
        assert training.optimizer is not None
        self._optimizer = training.optimizer
        self._parameters: dict[str, Tensor] = {}  # of the next layout
        self._is_copied = copied is not None
        self._held: dict[str, Unit] = {}  # as long as others may ask for it
        if copied is not None:
            self._held = {k.removeprefix(SHARD): one for k, one in copied.items() if k.startswith(SHARD)}
            return
        for name in () if is_joiner else training.stage.canonical:
            if (parameter := training.stage.tensor(name)) in self._owned():
                self._held[name] = _state_unit(self._optimizer.state.get(parameter, {}))

    def _owned(self) -> set[Tensor]:
        return {p for group in self._optimizer.param_groups for p in group["params"]}

    @property
    def holds(self) -> dict[str, int]:
        """Bytes of the state that this rank has owned until now, by name of the parameter."""
        return {name: num_bytes(unit) for name, unit in self._held.items()}

    def lacks(self, state: StageState) -> list[str]:
        """Return the names of parameters of the next layout that this rank owns from now on."""
        owned = self._owned()
        tensors = {name: state.tensor(name) for name in state.canonical}
        self._parameters = {name: tensor for name, tensor in tensors.items() if tensor in owned}
        return [name for name in self._parameters if name not in self._held]

    def give(self, name: str) -> Unit:
        return self._held[name]

    def take_copied(self) -> None:
        """Go back to the copied state of what this rank owns."""
        for name in self._parameters if self._is_copied else ():
            if name in self._held:
                self.take(name, self._held[name])

    def memory(self, name: str, key: str) -> Tensor | None:
        return None

    def take(self, name: str, unit: Unit) -> None:
        set_state(self._optimizer, self._parameters[name], unit)


def _state_unit(state: Mapping[str, Any]) -> Unit:
    tensors: dict[str, Tensor] = {}
    packed = pack(dict(state), "state", tensors)
    on_host = [key for key, one in tensors.items() if one.device.type == "cpu"]
    return Unit({"state": packed, "on_host": on_host}, tensors)


def num_bytes(unit: Unit) -> int:
    return sum(tensor.nbytes for tensor in unit.tensors.values())


def own_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor of a snapshot: it would keep the memory of the whole snapshot."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def set_state(optimizer: torch.optim.Optimizer, parameter: Tensor, unit: Unit) -> None:
    """Set the state of a parameter from a unit; a tensor that was on the host stays there."""
    on_host = set(unit.tree["on_host"])

    def placed(key: str) -> Tensor:
        found = unit.tensors[key]
        return own_memory(found if key in on_host else found.to(parameter.device))

    state = unpack(unit.tree["state"], placed)
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


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
        {key: value for key, value in group.items() if key not in PARAMETER_KEYS}
        for group in optimizer.param_groups
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
