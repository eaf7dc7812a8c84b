"""Values for a model on `meta`, made module by module, so that no process ever holds more than its stage.

Each module draws from a generator that is seeded by its own name: the values do not depend on which
stage, rank or layout asks for them. A module's tensors are made by whoever knows how:

    its own reset_parameters(), that of a module around it, or the model's _init_weights(module)
    (as Hugging Face has it), called on the module and on those around it
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from varuna.capture.model.copies import meta_copy
from varuna.errors import CaptureError


def initialized(
    model: nn.Module, names: Sequence[str], *, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """The named tensors of a hollow model, each made by its own module's initialisation."""
    by_owner: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_owner.setdefault(path, []).append(leaf)
    values: dict[str, Tensor] = {}
    working = meta_copy(model) if names else model
    for path, leaves in by_owner.items():
        made = _make(working, path, leaves, seed)
        for leaf in leaves:
            values[f"{path}.{leaf}" if path else leaf] = made[leaf].to(device)
    return values


def _make(model: nn.Module, path: str, leaves: Sequence[str], seed: int) -> dict[str, Tensor]:
    """One module's own tensors, on CPU, while all others of the model stay on `meta`."""
    module = model.get_submodule(path)
    before = (dict(module._parameters), dict(module._buffers))
    for leaf, parameter in before[0].items():
        if parameter is not None:
            real = poisoned(parameter.shape, parameter.dtype)
            module._parameters[leaf] = nn.Parameter(real, requires_grad=parameter.requires_grad)
    for leaf, buffer in before[1].items():
        if buffer is not None:
            module._buffers[leaf] = poisoned(buffer.shape, buffer.dtype)
    parts = path.split(".") if path else []
    around = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest, "little"))
            for candidate in [module, *around]:
                if any(is_poisoned(_own(module, leaf)) for leaf in leaves):
                    _reset(candidate)
            root_init = getattr(model, "_init_weights", None)
            if callable(root_init):
                for candidate in [module, *around]:
                    root_init(candidate)
        made = {leaf: _own(module, leaf).detach() for leaf in leaves}
    finally:
        module._parameters.update(before[0])
        module._buffers.update(before[1])
    for leaf, tensor in made.items():
        if is_poisoned(tensor):
            raise CaptureError(
                "the model is on `meta` and nothing tells the values of "
                f"{f'{path}.{leaf}' if path else leaf!r}: "
                f"expected {type(module).__name__}.reset_parameters(), or _init_weights(module) of "
                "the model, to make "
                "them (or pass initialize=, a mapping of names to tensors or a function that fills a tensor)"
            )
    return made


def _reset(module: nn.Module) -> None:
    for method in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, method, None)
        if callable(reset):
            reset()
            return


def _own(module: nn.Module, leaf: str) -> Tensor:
    found: Tensor | None = module._parameters.get(leaf)
    found = found if found is not None else module._buffers[leaf]
    assert found is not None
    return found


def _poison(dtype: torch.dtype) -> float | int | bool:
    """A value that no initialisation gives: memory that none touches must not pass for values."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).max - 6


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    return torch.full(tuple(shape), _poison(dtype), dtype=dtype, device=device)


def is_poisoned(tensor: Tensor) -> bool:
    if tensor.dtype == torch.bool or tensor.numel() == 0:
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bool(tensor.isnan().any())
    return bool((tensor == _poison(tensor.dtype)).any())
