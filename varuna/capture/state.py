"""The parameters and buffers of one stage: its own copies, under the names that they have in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from varuna.capture.captured import Captured
from varuna.capture.init import initialized
from varuna.capture.source import Source
from varuna.errors import CaptureError

Initialize = Mapping[str, Tensor] | Callable[[str, Tensor], object]


class StageState(nn.Module):
    """Holds state and nothing else: modules nested as in the model, so that `state_dict()` has its names."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._transient: set[str] = set()

    def hold(self, names: tuple[str, ...], tensor: Tensor, *, persistent: bool) -> None:
        """Registers one tensor under all of its names, the canonical one first."""
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
        """The tensor of a canonical name, as it is registered now (`to()` may have replaced it)."""
        owner, leaf = self._places[name]
        found: Tensor | None = owner._parameters.get(leaf)
        found = found if found is not None else owner._buffers[leaf]
        assert found is not None
        return found

    def is_persistent(self, name: str) -> bool:
        """Whether a canonical name is in `state_dict()`."""
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
) -> StageState:
    """The state of the segments `first..stop-1`, copied from the model, or made where that is on `meta`."""
    segments = captured.graph.segments[first:stop]
    wanted = {name for segment in segments for name in (*segment.parameters, *segment.buffers)}
    # Values that are made again after a cut read buffers of segments before it.
    wanted.update(captured.carve(first, stop).state)
    aliases = {group[0]: group for group in source.ties}
    shells: dict[str, Tensor] = dict(source.hollow.named_parameters(remove_duplicate=False))
    shells.update(source.hollow.named_buffers(remove_duplicate=False))
    names = [name for name in shells if name in wanted]
    values = _values(source, names, torch.device(device), initialize, seed)
    state = StageState()
    for name in names:
        tensor: Tensor = values[name]
        shell = shells[name]
        if isinstance(shell, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=shell.requires_grad)
        state.hold(aliases.get(name, (name,)), tensor, persistent=_is_persistent(source.hollow, name))
    return state


def _values(
    source: Source, names: list[str], device: torch.device, initialize: Initialize | None, seed: int
) -> dict[str, Tensor]:
    given = initialize if isinstance(initialize, Mapping) else {}
    fill = initialize if callable(initialize) and not isinstance(initialize, Mapping) else None
    aliases = {group[0]: group for group in source.ties}
    values: dict[str, Tensor] = {}
    missing: list[str] = []
    for name in names:
        found = next((given[alias] for alias in aliases.get(name, (name,)) if alias in given), None)
        if found is None and not source.on_meta(name):
            found = source.value(name)
        if found is None:
            missing.append(name)
            continue
        shape = source.shape(name)
        if tuple(found.shape) != shape:
            raise CaptureError(
                f"initialize gives {name!r} the shape {tuple(found.shape)}, the model has {shape} "
                "(give the values of this very model)"
            )
        values[name] = found.detach().to(device=device, dtype=source.dtype(name), copy=True)
    if fill is not None:
        for name in missing:
            tensor = torch.empty(source.shape(name), dtype=source.dtype(name), device=device)
            with torch.no_grad():
                fill(name, tensor)
            values[name] = tensor
        return values
    values.update(initialized(source.hollow, missing, device=device, seed=seed))
    return values


def _is_persistent(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf not in model.get_submodule(path)._non_persistent_buffers_set
