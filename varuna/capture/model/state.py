"""The parameters and buffers of one stage, under their names in the model."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture.model.hooks import copy_hooks
from varuna.capture.model.initialization import initialized, is_poisoned, own_tensor, poisoned, seeded
from varuna.capture.model.source import Source
from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.run.captured import Captured
from varuna.errors import CaptureError

Initialize = Mapping[str, Tensor] | Callable[[str, Tensor], object]


class StageState(nn.Module):
    """Holds the state of a stage in modules nested as in the model, so that `state_dict()` has its names."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._transient: set[str] = set()

    def hold(self, names: tuple[str, ...], tensor: Tensor, *, persistent: bool) -> None:
        """Register one tensor under all of its names, the canonical one first."""
        for name in names:
            owner: nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(leaf, tensor)
            else:
                owner.register_buffer(leaf, tensor, persistent=persistent)
            if name == names[0]:
                self._places[name] = (owner, leaf)
        if not persistent:
            self._transient.add(names[0])

    def tensor(self, name: str) -> Tensor:
        """Return the current tensor of a canonical name (`to()` may have replaced it)."""
        return own_tensor(*self._places[name])

    def by_name(self) -> dict[str, Tensor]:
        """Return all tensors by canonical name."""
        return {name: self.tensor(name) for name in self._places}

    def is_persistent(self, name: str) -> bool:
        """Return whether a canonical name is in `state_dict()`."""
        return name not in self._transient

    @property
    def canonical(self) -> tuple[str, ...]:
        return tuple(self._places)


def stage_state(
    source: Source,
    captured: Captured,
    first: int,
    stop: int,
    *,
    device: torch.device | str,
    initialize: Initialize | None = None,
    seed: int = 0,
    shares: bool = False,
) -> StageState:
    """Return the state of the segments `first..stop-1`: copied from the model, or made if it is on `meta`.

    `shares` uses the model's own memory for what is on the device already, so that it is not there twice.
    """
    shells = _shells(source, captured, first, stop)
    values = _values(source, list(shells), torch.device(device), initialize, seed, shares)
    own = {name: _like(shell, values[name]) for name, shell in shells.items()}
    for name, tensor in own.items():
        if isinstance(tensor, nn.Parameter):
            copy_hooks(source.value(name), tensor)
    return _held(source, own)


def model_values(source: Source, initialize: Initialize | None = None) -> dict[str, Tensor]:
    """Return the model's own tensors by canonical name, without those on `meta` or set by a mapping."""
    given = initialize if isinstance(initialize, Mapping) else {}
    return {
        name: source.value(name)
        for name in named_tensors(source.meta_model)
        if source.canonical.get(name, name) == name
        and not any(alias in given for alias in source.names_of(name))
        and not source.on_meta(name)
    }


def adopted_state(
    source: Source,
    captured: Captured,
    first: int,
    stop: int,
    *,
    model: nn.Module,
    device: torch.device | str,
    seed: int = 0,
) -> StageState:
    """Return the state of the segments as the model's own tensors, which stay registered in the model.

    All other tensors of the model move to `meta`. Tensors of the stage that were on `meta` get values.
    """
    device = torch.device(device)
    shells = _shells(source, captured, first, stop)
    made = _values(source, [name for name in shells if source.on_meta(name)], device, None, seed)
    values: dict[str, Tensor] = {}
    for name, shell in shells.items():
        if name in made:
            values[name] = _like(shell, made[name])
        else:
            values[name] = source.value(name)
            values[name].data = values[name].data.to(device)
    for name, shell in named_tensors(source.meta_model).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        places: dict[str, Any] = owner._parameters if isinstance(shell, nn.Parameter) else owner._buffers
        places[leaf] = values.get(source.canonical.get(name, name), shell)
    return _held(source, values)


def _shells(source: Source, captured: Captured, first: int, stop: int) -> dict[str, Tensor]:
    """Return the meta tensors of the segments `first..stop-1`, by canonical name."""
    segments = captured.graph.segments[first:stop]
    wanted = {name for segment in segments for name in (*segment.parameters, *segment.buffers)}
    # Values that are recomputed after a cut read buffers of earlier segments.
    wanted.update(captured.carve(first, stop).state)
    return {name: shell for name, shell in named_tensors(source.meta_model).items() if name in wanted}


def _like(shell: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, shell.requires_grad) if isinstance(shell, nn.Parameter) else value


def _held(source: Source, values: Mapping[str, Tensor]) -> StageState:
    state = StageState()
    for name, tensor in values.items():
        state.hold(source.names_of(name), tensor, persistent=_is_persistent(source.meta_model, name))
    return state


def _values(
    source: Source,
    names: list[str],
    device: torch.device,
    initialize: Initialize | None,
    seed: int,
    shares: bool = False,
) -> dict[str, Tensor]:
    given = initialize if isinstance(initialize, Mapping) else {}
    fill = initialize if callable(initialize) and not isinstance(initialize, Mapping) else None
    values: dict[str, Tensor] = {}
    missing: list[str] = []
    for name in names:
        found = next((given[alias] for alias in source.names_of(name) if alias in given), None)
        is_own = found is None and not source.on_meta(name)
        if is_own:
            found = source.value(name)
        if found is None:
            missing.append(name)
            continue
        shape = source.shape(name)
        if tuple(found.shape) != shape:
            raise CaptureError(
                f"initialize has {name!r} with the shape {tuple(found.shape)}, but the model has {shape}. "
                "Pass values of this model."
            )
        shared = shares and is_own and _can_be_shared(found, device)
        values[name] = found.detach().to(device=device, dtype=source.dtype(name), copy=not shared)
    if fill is not None:
        for name in missing:
            if not _is_persistent(source.meta_model, name):  # the model may compute it from its sizes
                with suppress(CaptureError):
                    values.update(initialized(source.meta_model, [name], device=device, seed=seed))
            if name not in values:
                tensor = poisoned(source.shape(name), source.dtype(name), device)
                with seeded(seed, name, device), torch.no_grad():
                    fill(name, tensor)
                if not is_poisoned(tensor):
                    values[name] = tensor
    left = [name for name in missing if name not in values]
    values.update(initialized(source.meta_model, left, device=device, seed=seed))
    return values


def _can_be_shared(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a stage can train a model's own tensor: in usual memory, which no other process sees."""
    usual = tensor.stride() == torch.empty_like(tensor, device="meta").stride()
    among_processes = tensor.device.type == "cpu" and tensor.is_shared()  # type: ignore[no-untyped-call]
    return tensor.device == device and usual and not among_processes and not tensor.is_inference()


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set
