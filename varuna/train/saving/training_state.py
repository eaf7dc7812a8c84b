"""The state of one rank that checkpoints save and load.

Everything has the names of the unwrapped model, so any layout can load a checkpoint of another.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Facts, Json, Manifest, hash_of
from varuna.checkpoint.format.optimizer import number_groups, pack_groups, unpack_optimizer
from varuna.checkpoint.format.part import FileTensor
from varuna.checkpoint.format.tensors import fill, spec_of, tensor_from
from varuna.checkpoint.format.tree import pack, unpack
from varuna.checkpoint.select import FROZEN, LoadSelection, NamedTensors
from varuna.errors import CheckpointError
from varuna.execute.step.trainer import Trainer
from varuna.execute.update.precision import LossScale
from varuna.execute.update.shard import OptimizerShards
from varuna.train.saving.frozen_base import FrozenBase
from varuna.types import spread_by_size

log = logging.getLogger("varuna")


class Stateful(Protocol):
    """An object that can be saved with the model: a learning rate scheduler, a data loader."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any) -> Any: ...


class RankSummary(msgspec.Struct, frozen=True):
    """The values that the ranks compare before a save."""

    facts: Facts  # those of the first rank are used
    groups: Sequence[bytes]  # hyper-parameters of its optimizer's groups
    registered: Mapping[str, str]  # hash of the state of each registered object


class PartContent(msgspec.Struct):
    """The tensors and trees that one rank writes."""

    tensors: dict[str, Tensor]
    trees: dict[str, Json]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def add(self, other: "PartContent") -> None:
        self.tensors |= other.tensors
        self.trees |= other.trees


@dataclass
class TrainingState:
    """Model, optimizer, loss scale, step counter and registered objects of this rank."""

    stage: NamedTensors
    trainer: Trainer
    base: FrozenBase  # not saved
    shards_optimizer: bool = False
    optimizer: torch.optim.Optimizer | None = None
    shards: OptimizerShards | None = None  # the owners of the optimizer's parameters, if it is sharded
    loss_scale: LossScale = field(default_factory=LossScale)
    loaded_before_optimizer: str = ""  # names a checkpoint whose optimizer state was skipped
    _registered: dict[str, Stateful] = field(default_factory=dict)
    _unclaimed: dict[str, Any] = field(default_factory=dict)  # loaded state of objects not yet registered
    _first_stage: dict[str, int] = field(default_factory=dict)  # the stage that saves each tensor

    def register(self, name: str, thing: Stateful) -> None:
        if name in self._registered:
            raise ValueError(f"an object is already registered as {name!r} (choose another name)")
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(
                f"the object registered as {name!r} must have state_dict() and load_state_dict(), but is a "
                f"{type(thing).__name__} (add the two methods, or register another object)"
            )
        self._registered[name] = thing
        if name in self._unclaimed:
            thing.load_state_dict(self._unclaimed.pop(name))

    @property
    def registered(self) -> Mapping[str, Stateful]:
        return self._registered

    def registered_state(self) -> dict[str, Any]:
        """Return the state of each registered object."""
        return {name: thing.state_dict() for name, thing in self._registered.items()}

    def load_registered(self, states: Mapping[str, Any]) -> list[str]:
        """Load the state of registered objects; others get theirs when they are registered.

        Returns the names of objects that have no state here.
        """
        self._unclaimed = dict(states)
        for name, thing in self._registered.items():
            if name in self._unclaimed:
                thing.load_state_dict(self._unclaimed.pop(name))
        return [name for name in self._registered if name not in states]

    @property
    def num_bytes(self) -> int:
        """Size of the model's and the optimizer's tensors on this rank, without the frozen base."""
        tensors: list[Tensor] = [self.stage.tensor(n) for n in self.stage.canonical if not self._in_base(n)]
        if self.optimizer is not None:
            states = self.optimizer.state.values()
            tensors += [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def summary(self, facts: Facts) -> RankSummary:
        tensors: dict[str, Tensor] = {}
        hashes = {
            name: hash_of(msgspec.json.encode(pack(thing.state_dict(), f"registered/{name}", tensors)))
            for name, thing in self._registered.items()
        }
        return RankSummary(facts, [] if self.optimizer is None else pack_groups(self.optimizer), hashes)

    def find_first_stages(self, places: Sequence[tuple[int, int]]) -> None:
        """Find the first stage that holds each tensor: that stage saves it. All ranks call this."""
        if not self._first_stage:
            held = self.trainer.session.gather(tuple(self.stage.canonical), tuple[str, ...])
            for (stage, _), names in zip(places, held, strict=True):
                for name in names:
                    self._first_stage[name] = min(stage, self._first_stage.get(name, stage))

    def content(
        self, summaries: Sequence[RankSummary], index: int, *, is_first: bool, shard: bool, gradients: bool
    ) -> PartContent:
        """Return what this rank writes. Each tensor is written once, by the first stage that holds it.

        The first replica of the stage writes it; with `shard`, all replicas write equal numbers of bytes.
        A sharded optimizer's state is on one replica only, which writes it.
        """
        session = self.trainer.session
        groups, numbers = number_groups([summary.groups for summary in summaries])
        content = PartContent({}, {})
        units = list(self._model_units(gradients))
        for name, state, group in self._optimized():
            unit, key = PartContent({}, {}), f"optimizer/{name}"
            unit.trees[key] = {"group": numbers[index][group], "state": pack(state, key, unit.tensors)}
            if self.shards_optimizer:
                content.add(unit)
            else:
                units.append(unit)
        sizes = [unit.num_bytes for unit in units]
        replicas = spread_by_size(sizes, parts=session.width) if shard else [0] * len(units)
        for replica, unit in zip(replicas, units, strict=True):
            if replica == session.replica:
                content.add(unit)
        if is_first:
            content.trees["groups"] = groups
            content.trees["loss_scale"] = pack(self.loss_scale.state_dict(), "loss_scale", content.tensors)
            for name, thing in self._registered.items():
                key = f"registered/{name}"
                content.trees[key] = pack(thing.state_dict(), key, content.tensors)
        return content

    def _model_units(self, gradients: bool) -> Iterator[PartContent]:
        for name in self._names_saved_here():
            is_persistent = self.stage.is_persistent(name)
            if self._in_base(name):
                if is_persistent:
                    yield PartContent({}, {f"{FROZEN}{name}": self.base.describe(name)})
                continue
            kind = "model" if is_persistent else "transient"
            tensor = self.stage.tensor(name)
            yield PartContent({f"{kind}/{name}": tensor}, {})
            if gradients and tensor.grad is not None:
                yield PartContent({f"gradient/{name}": tensor.grad}, {})

    def _in_base(self, name: str) -> bool:
        """Return whether a tensor is frozen since it was loaded, and forward does not change it."""
        return name in self.base and name not in self.trainer.mutated

    def _names_saved_here(self) -> list[str]:
        stage = self.trainer.session.stage
        return [name for name in self.stage.canonical if self._first_stage[name] == stage]

    def _optimized(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Yield (name, state, group) of the parameters in this rank's optimizer that this stage saves."""
        if self.optimizer is None:
            return
        names = {self.stage.tensor(name): name for name in self._names_saved_here()}
        for index, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                if parameter in names:
                    yield names[parameter], dict(self.optimizer.state.get(parameter, {})), index

    @torch.no_grad()
    def restore(self, manifest: Manifest, chosen: LoadSelection, views: Mapping[str, memoryview]) -> None:
        """Load the chosen tensors and trees, whose bytes are in `views`."""
        current: dict[str, Tensor] = {}  # the optimizer's tensors under their checkpoint keys
        if self.optimizer is not None:
            for parameter, key in chosen.optimizer_keys.items():
                pack(dict(self.optimizer.state.get(parameter, {})), key, current)

        def tensor(key: str) -> Tensor:
            entry = manifest.tensors[key]
            if key not in current or spec_of("", current[key]) != FileTensor("", entry.dtype, entry.shape):
                return tensor_from(views[key], entry)
            fill(current[key], views[key], entry)  # allocating new memory would take longer than the copy
            return current[key]

        for name, key in chosen.tensors.items():
            own = self.stage.tensor(name)
            if not self._in_base(name) or manifest.tensors[key].hash != self.base.hash(name):
                fill(own, views[key], manifest.tensors[key])
                self.base.forget(name)
            own.grad = None
            if name in chosen.gradients:
                own.grad = tensor(chosen.gradients[name]).to(own)
        if self.optimizer is None:
            has_optimizer = "groups" in manifest.trees
            self.loaded_before_optimizer = f"checkpoint {manifest.facts.step}" if has_optimizer else ""
        elif chosen.groups is not None:
            unpack_optimizer(self.optimizer, chosen.optimizer, chosen.groups, tensor)
        scale = unpack(manifest.trees.get("loss_scale", {"dict": []}), tensor)
        if scale and self.loss_scale.checks_overflow:
            self.loss_scale.load_state_dict(scale)
        if manifest.facts.seed is not None:
            self.trainer.seed = manifest.facts.seed
        self.trainer.iteration = manifest.facts.iteration
        states = {name: unpack(tree, tensor) for name, tree in chosen.registered.items()}
        for name in self.load_registered(states):
            if manifest.facts.plan is not None:
                log.warning("checkpoint %s has no %r: its state is unchanged", manifest.facts.step, name)


def check_summaries(summaries: Sequence[RankSummary]) -> None:
    """Check that all ranks save the same step and have the same registered state."""
    moments = {(summary.facts.step, summary.facts.iteration) for summary in summaries}
    if len(moments) > 1:
        raise CheckpointError(
            f"the ranks are at different steps: they would save (step, iteration) {sorted(moments)} "
            "(call checkpoint on all ranks after the same step, with the same step number)"
        )
    for name in sorted({name for summary in summaries for name in summary.registered}):
        if len({summary.registered.get(name) for summary in summaries}) > 1:
            raise CheckpointError(
                f"the object registered as {name!r} has different states on different ranks, or is missing "
                "on some (register objects with the same state on every rank)"
            )
