"""The parameters and buffers of one stage, under their names in the model."""

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from varuna.capture.model.hooks import copy_hooks
from varuna.capture.model.initialization import initialized, is_poisoned, own_tensor, poisoned, seeded
from varuna.capture.model.source import Source
from varuna.capture.model.tied_weights import named_tensors
from varuna.capture.run.captured import Captured
from varuna.errors import CaptureError


@runtime_checkable
class WeightReader(Protocol):
    """Reads initial values from files, tensor by tensor, by canonical names."""

    def bind(self, model: nn.Module, ties: Sequence[tuple[str, ...]]) -> None: ...
    def __contains__(self, name: object) -> bool: ...
    def read(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor: ...


Initialize = Mapping[str, Tensor] | Callable[[str, Tensor], object] | WeightReader


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


class StageCopy(StageState):
    """A copy of a stage's state, as `copy.deepcopy(model)` and torch's AveragedModel(model) make it."""

    def forward(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "a copy of a wrapped model holds the parameters of this rank's stage and cannot be called (to "
            "evaluate it, load it into the wrapped model: "
            "model.load_state_dict(copy.state_dict(), strict=False))"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(
                f"{error} (a copy of a wrapped model holds the parameters of this rank's stage: load it into "
                "the wrapped model, model.load_state_dict(copy.state_dict(), strict=False))"
            ) from None


def copied_stage(state: StageState, order: Iterable[str]) -> StageCopy:
    """Copy the state of a stage; `order` names its parameters as the wrapped model does."""
    found, places = StageCopy(), dict(state._places)
    canonical = {id(state.tensor(name)): name for name in places}
    names: dict[str, list[str]] = {name: [] for name in places}
    tensors = (
        *state.named_parameters(remove_duplicate=False),
        *state.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        names[canonical[id(tensor)]].append(name)
    copies = {name: copy.deepcopy(state.tensor(name)) for name in places}
    wanted = [canonical[id(tensor)] for tensor in map(dict(tensors).get, order) if id(tensor) in canonical]
    ordered = dict.fromkeys((*wanted, *places))
    for name in ordered:
        found.hold((name,), copies[name], persistent=state.is_persistent(name))
    for name in ordered:
        for alias in names[name]:
            if alias != name:
                found.hold((alias,), copies[name], persistent=state.is_persistent(name))
    return found


class ModelTensors:
    """A stage's tensors in the script's own model. Follows `weight.data = ...` and replaced buffers.

    In-place changes need no care: both models have the same memory.
    """

    def __init__(self, source: Source, state: StageState) -> None:
        self._entries: list[tuple[weakref.ref[nn.Module], str, Tensor, str]] = []
        self._known: list[tuple[int, int]] = []  # identity and address, by entry
        for name in state.canonical:
            for alias in source.names_of(name):
                owner, leaf = source.place(alias)
                tensor, own = own_tensor(owner, leaf), state.tensor(name)
                if tensor.data_ptr() == own.data_ptr() and not tensor.is_meta:
                    self._entries.append((weakref.ref(owner), leaf, own, alias))
                    self._known.append((id(tensor), tensor.data_ptr()))

    def follow(self) -> None:
        """Copy values that the script has assigned. Cheap: this runs in each step."""
        for index, (reference, leaf, own, name) in enumerate(self._entries):
            owner = reference()
            if owner is None:
                continue
            tensor: Tensor | None = owner._parameters.get(leaf)
            if tensor is None:
                tensor = owner._buffers.get(leaf)
            if tensor is None or (id(tensor), tensor.data_ptr()) == self._known[index]:
                continue
            self._follow(owner, leaf, tensor, own, name, replaced=id(tensor) != self._known[index][0])
            self._known[index] = id(tensor), tensor.data_ptr()

    def _follow(
        self, owner: nn.Module, leaf: str, tensor: Tensor, own: Tensor, name: str, *, replaced: bool
    ) -> None:
        moved = (tensor.device, tensor.dtype, tensor.shape) != (own.device, own.dtype, own.shape)
        if moved or tensor is own:
            return  # the script has moved its model away, or assigned to the stage's own tensor
        if replaced and isinstance(tensor, nn.Parameter):
            raise CaptureError(
                f"the script has replaced the parameter {name!r} since the model was wrapped, but its "
                "optimizer trains the earlier one. Copy the values in place: with torch.no_grad(): "
                "parameter.copy_(values)."
            )
        with torch.no_grad():
            own.copy_(tensor)
        tensor.data = own.data  # both have the same memory again


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
        if isinstance(tensor, nn.Parameter) and not source.is_freed:
            copy_hooks(source.value(name), tensor)
    return _held(source, own)


def model_values(source: Source, initialize: Initialize | None = None) -> dict[str, Tensor]:
    """Return the model's own tensors by canonical name, without those on `meta` or in `initialize`."""
    return {
        name: source.value(name)
        for name in named_tensors(source.meta_model)
        if source.canonical.get(name, name) == name
        and not _is_given(source, name, initialize)
        and not source.on_meta(name)
    }


def _is_given(source: Source, name: str, initialize: Initialize | None) -> bool:
    """Return whether a mapping or files have this tensor."""
    if isinstance(initialize, WeightReader):
        initialize.bind(source.meta_model, source.ties)
        return name in initialize
    return isinstance(initialize, Mapping) and any(alias in initialize for alias in source.names_of(name))


def adopted_state(
    source: Source,
    captured: Captured,
    first: int,
    stop: int,
    *,
    model: nn.Module,
    device: torch.device | str,
    initialize: Initialize | None = None,
    seed: int = 0,
) -> StageState:
    """Return the state of the segments as the model's own tensors, which stay registered in the model.

    All other tensors of the model move to `meta`. Tensors of the stage that were on `meta`, or that
    `initialize` has, get values.
    """
    device = torch.device(device)
    shells = _shells(source, captured, first, stop)
    lacking = [name for name in shells if source.on_meta(name) or _is_given(source, name, initialize)]
    made = _values(source, lacking, device, initialize, seed)
    values: dict[str, Tensor] = {}
    for name, shell in shells.items():
        if source.on_meta(name):
            values[name] = _like(shell, made[name])
        else:
            values[name] = source.value(name)
            values[name].data = made[name] if name in made else values[name].data.to(device)
    for name, shell in named_tensors(source.meta_model).items():
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        places: dict[str, Any] = owner._parameters if isinstance(shell, nn.Parameter) else owner._buffers
        places[leaf] = values.get(source.canonical.get(name, name), shell)
    return _held(source, values)


def moved_state(
    source: Source,
    captured: Captured,
    first: int,
    stop: int,
    *,
    held: StageState,
    device: torch.device,
) -> StageState:
    """Return the state of the segments: the tensors that `held` has, and new ones without values yet."""
    own: dict[str, Tensor] = {}
    for name, shell in _shells(source, captured, first, stop).items():
        own[name] = held.tensor(name) if name in held._places else _like(shell, _memory(source, name, device))
    return _held(source, own)


def _memory(source: Source, name: str, device: torch.device) -> Tensor:
    """Return memory for a tensor: that of the script's model, if it still exists."""
    with suppress(CaptureError):
        found = source.value(name)
        if found.dtype == source.dtype(name) and _can_be_shared(found, device):
            return found.detach()
    return torch.empty(source.shape(name), dtype=source.dtype(name), device=device)


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
    reader = initialize if isinstance(initialize, WeightReader) else None
    values: dict[str, Tensor] = {}
    missing: list[str] = []
    for name in names:
        if reader is not None and _is_given(source, name, reader):
            values[name] = reader.read(name, source.dtype(name), device)
            continue
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
