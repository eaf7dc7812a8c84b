"""Values for a model on `meta`, made module by module, so that no process ever holds more than its stage.

Each module draws from a generator that is seeded by its own name: the values do not depend on which
stage, rank or layout asks for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from varuna.capture.hollow import emptied
from varuna.errors import CaptureError


def initialized(model: nn.Module, names: Sequence[str], *, device: torch.device, seed: int) -> dict[str, Tensor]:
    """The named tensors of a hollow model, each made by its own module's initialisation."""
    by_owner: dict[str, list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        by_owner.setdefault(path, []).append(leaf)
    values: dict[str, Tensor] = {}
    for path, leaves in by_owner.items():
        made = _make(model, path, leaves, seed)
        for leaf in leaves:
            values[f"{path}.{leaf}" if path else leaf] = made[leaf].to(device)
    return values


def _make(model: nn.Module, path: str, leaves: Sequence[str], seed: int) -> dict[str, Tensor]:
    """One module's own tensors (not its children's), on CPU, as its initialisation makes them."""
    module = emptied(model.get_submodule(path), own=True)
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    own = {**module._parameters, **module._buffers}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest, "little"))
        reset = getattr(module, "reset_parameters", None)
        root_init = getattr(model, "_init_weights", None)
        if not callable(root_init) and not callable(reset):
            what = f"{path}.{leaves[0]}" if path else leaves[0]
            raise CaptureError(
                f"the model is on `meta` and nothing tells the values of {what!r}: {type(module).__name__} has no "
                "reset_parameters(), and the model no _init_weights(module) (pass initialize=, a mapping of "
                "names to tensors or a function that fills a tensor)"
            )
        for tensor in own.values():
            if tensor is not None:
                _poison(tensor)
        if callable(reset):
            reset()
        if callable(root_init):
            root_init(module)
    own = {**module._parameters, **module._buffers}
    made = {}
    for leaf in leaves:
        tensor = own[leaf]
        assert tensor is not None
        made[leaf] = tensor.detach()
    return made


def _poison(tensor: Tensor) -> None:
    """Memory that no initialisation touches must not pass for values."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
