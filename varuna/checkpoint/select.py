"""Choose what one rank loads from a checkpoint, and refuse a checkpoint that does not fit the model.

This only looks at the manifest. It reads no tensors and changes nothing.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Json, Manifest, TensorEntry
from varuna.checkpoint.format.optimizer import foreign_options, match_groups
from varuna.checkpoint.format.tensors import spec_of
from varuna.checkpoint.format.tree import tensors_in
from varuna.errors import CheckpointError, list_some

log = logging.getLogger("varuna")

FROZEN = "frozen/"
"""Trees of this prefix describe tensors of the frozen base, whose values are not in the checkpoint."""


class NamedTensors(Protocol):
    """The parameters and buffers of a stage by canonical name."""

    @property
    def canonical(self) -> Sequence[str]: ...
    def tensor(self, name: str) -> Tensor: ...
    def is_persistent(self, name: str) -> bool: ...


class LoadSelection(msgspec.Struct):
    """The tensors and trees that a rank loads from a checkpoint."""

    tensors: dict[str, str] = {}  # name: key
    gradients: dict[str, str] = {}
    optimizer_keys: dict[Tensor, str] = {}
    optimizer: dict[Tensor, Json] = {}
    registered: dict[str, Json] = {}
    groups: list[dict[str, object]] | None = None  # hyper-parameters of the optimizer's groups

    @property
    def keys(self) -> list[str]:
        """The keys of all tensors to read, each once."""
        trees = [tree["state"] for tree in self.optimizer.values()] + list(self.registered.values())
        in_trees = [key for tree in trees for key in tensors_in(tree)]
        return list(dict.fromkeys([*self.tensors.values(), *self.gradients.values(), *in_trees]))


def select(
    manifest: Manifest,
    state: NamedTensors,
    optimizer: torch.optim.Optimizer | None,
    *,
    ties: Sequence[tuple[str, ...]],
    names: frozenset[str],
    strict: bool,
    complete: bool,
    cast: bool,
    hash_of_base: Callable[[str], str],
) -> LoadSelection:
    """Choose what to load. `names` are all names in the whole model; `complete` refuses missing tensors.

    `hash_of_base` returns the hash of one of this stage's tensors, to compare the frozen base.
    """
    saved = {key.removeprefix("model/") for key in manifest.tensors if key.startswith("model/")}
    if strict and (unknown := sorted(saved - names)):
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} belongs to another model: this model has no "
            f"{list_some(unknown)} (strict=False ignores them)"
        )
    aliases = {group[0]: group for group in ties}
    names_of = {name: aliases.get(name, (name,)) for name in state.canonical}
    chosen = LoadSelection()
    _choose_tensors(manifest, state, names_of, chosen, required=strict and complete, cast=cast)
    _check_base(manifest, state, names_of, hash_of_base, strict=strict, cast=cast)
    if optimizer is not None and "groups" in manifest.trees:
        parameters = {state.tensor(name): names_of[name] for name in state.canonical}
        _choose_optimizer(manifest, optimizer, parameters, chosen, required=strict and complete)
    chosen.registered = {
        key.removeprefix("registered/"): tree
        for key, tree in manifest.trees.items()
        if key.startswith("registered/") and all(name in manifest.tensors for name in tensors_in(tree))
    }
    return chosen


def _choose_tensors(
    manifest: Manifest,
    state: NamedTensors,
    names_of: Mapping[str, tuple[str, ...]],
    chosen: LoadSelection,
    *,
    required: bool,
    cast: bool,
) -> None:
    saved, missing = manifest.tensors, []
    for name, names in names_of.items():
        key = _first(saved, [f"{kind}/{alias}" for kind in ("model", "transient") for alias in names])
        gradient = _first(saved, [f"gradient/{alias}" for alias in names])
        if key is not None:
            _check_fits(name, state.tensor(name), saved[key], cast=cast)
            chosen.tensors[name] = key
        elif state.is_persistent(name) and _first(manifest.trees, _frozen_keys(names)) is None:
            missing.append(name)
        if gradient is not None:
            chosen.gradients[name] = gradient
    if missing and required:
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} has no {list_some(missing)} (does it belong to another model? "
            "strict=False keeps the current values)"
        )
    if missing:
        listed = list_some(missing)
        log.warning("checkpoint %s has no %s: the current values stay", manifest.facts.step, listed)


def _frozen_keys(names: Sequence[str]) -> list[str]:
    return [FROZEN + name for name in names]


def _check_base(
    manifest: Manifest,
    state: NamedTensors,
    names_of: Mapping[str, tuple[str, ...]],
    hash_of_base: Callable[[str], str],
    *,
    strict: bool,
    cast: bool,
) -> None:
    """Refuse a base with other values than the one whose adapters are in the checkpoint."""
    differing = []
    for name, names in names_of.items():
        key = _first(manifest.trees, _frozen_keys(names))
        if key is None:
            continue
        saved, own = manifest.trees[key], spec_of(name, state.tensor(name))
        found = [f"{form['dtype']} {list(form['shape'])}" for form in (saved, msgspec.structs.asdict(own))]
        if found[0] != found[1]:
            if not cast or list(saved["shape"]) != list(own.shape):
                differing.append(f"{name} ({found[0]} then, {found[1]} now)")
        elif saved["hash"] != hash_of_base(name):
            differing.append(name)
    if not differing:
        return
    if strict:
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} has adapters of another base model: when it was saved, other "
            f"values were in {list_some(differing)} (load the same base model, in the same dtype, before "
            "wrapping; strict=False uses the adapters with this one)"
        )
    log.warning(
        "checkpoint %s has adapters of another base model: %s had other values",
        manifest.facts.step,
        list_some(differing),
    )


def _choose_optimizer(
    manifest: Manifest,
    optimizer: torch.optim.Optimizer,
    names_of: Mapping[Tensor, tuple[str, ...]],
    chosen: LoadSelection,
    *,
    required: bool,
) -> None:
    foreign = foreign_options(optimizer, manifest.trees["groups"])
    if foreign and required:
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} was saved with another optimizer class than "
            f"{type(optimizer).__name__}: it has {', '.join(foreign)} (use the same class; "
            "load_checkpoint(..., strict=False) keeps the state of the new optimizer)"
        )
    if foreign:
        log.warning(
            "checkpoint %s was saved with another optimizer class: its optimizer state is not loaded",
            manifest.facts.step,
        )
        return
    missing = []
    for parameter in [p for group in optimizer.param_groups for p in group["params"] if p in names_of]:
        key = _first(manifest.trees, [f"optimizer/{name}" for name in names_of[parameter]])
        tensors = [] if key is None else tensors_in(manifest.trees[key]["state"])
        if key is not None and all(name in manifest.tensors for name in tensors):
            chosen.optimizer_keys[parameter] = key
            chosen.optimizer[parameter] = manifest.trees[key]
        else:
            missing.append(names_of[parameter][0])
    if missing and required:
        raise CheckpointError(
            f"checkpoint {manifest.facts.step} has no optimizer state of {list_some(missing)} "
            "(strict=False keeps their current state)"
        )
    first_names = {parameter: names[0] for parameter, names in names_of.items()}
    chosen.groups = match_groups(optimizer, chosen.optimizer, manifest.trees["groups"], name_of=first_names)


def _first(available: Mapping[str, object], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if key in available), None)


def _check_fits(name: str, own: Tensor, saved: TensorEntry, *, cast: bool) -> None:
    spec = spec_of(name, own)
    if saved.shape != spec.shape:
        raise CheckpointError(
            f"{name} has shape {list(saved.shape)} in the checkpoint and {list(spec.shape)} in the model "
            "(build the same model as the job that saved)"
        )
    if saved.dtype != spec.dtype and not cast:
        raise CheckpointError(
            f"{name} is {saved.dtype} in the checkpoint and {spec.dtype} in the model "
            "(build the model in that precision, or pass cast=True)"
        )
