"""Initial values of a model on `meta`, made module by module, so that no process holds more than its stage.

A generator seeded by the module's name draws each module's values: they do not depend on stage, rank or
layout. These functions make the tensors of a module, the first one that knows how:

    1. its own reset_parameters(), or that of a module around it
    2. the model's _init_weights(module) (Hugging Face), for the module and those around it
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from varuna.capture.model.copies import meta_copy
from varuna.errors import CaptureError


def initialized(
    model: nn.Module, names: Sequence[str], *, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Return the named tensors of a model on `meta`, initialized by their modules."""
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
    """Return one module's own tensors on the CPU; the rest of the model stays on `meta`."""
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
    outer = [model.get_submodule(".".join(parts[:n])) for n in range(len(parts) - 1, -1, -1)]
    try:
        with seeded(seed, path), torch.no_grad():
            for candidate in [module, *outer]:
                own = getattr(candidate, "_reset_parameters", None)
                reset = getattr(candidate, "reset_parameters", own)
                if callable(reset) and any(is_poisoned(own_tensor(module, leaf)) for leaf in leaves):
                    reset()
            root_init = getattr(model, "_init_weights", None)
            if callable(root_init):
                for candidate in [module, *outer]:
                    root_init(candidate)
        made = {leaf: own_tensor(module, leaf).detach() for leaf in leaves}
    finally:
        module._parameters.update(before[0])
        module._buffers.update(before[1])
    for leaf, tensor in made.items():
        if is_poisoned(tensor):
            raise CaptureError(
                f"nothing initializes {(f'{path}.{leaf}' if path else leaf)!r} of the model on `meta`. "
                f"Write {type(module).__name__}.reset_parameters() or the model's _init_weights(module), or "
                "pass initialize=, a mapping of names to tensors or a function that fills a tensor."
            )
    return made


@contextmanager
def seeded(seed: int, name: str, device: torch.device | None = None) -> Iterator[None]:
    """Draw random numbers by the seed and the name, on the CPU and on the device."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(digest, "little"))
        yield


def own_tensor(module: nn.Module, leaf: str) -> Tensor:
    """Return a parameter or buffer that the module itself holds."""
    found = {**module._buffers, **module._parameters}[leaf]
    assert found is not None
    return found


def _poison(dtype: torch.dtype) -> float | int | bool:
    """Return a value that no initialization gives, to detect memory that none has written."""
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
