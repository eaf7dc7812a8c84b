"""Finds whether a module's forward uses all its parameters, by a run without values."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from varuna.capture.model.copies import fake_copy


def forward_covers(
    module: nn.Module,
    groups: Iterable[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> bool:
    """Return whether this call uses the module's own parameters, and some of each group of submodules.

    `groups` are names of submodules. A call that cannot run without values counts as covering: the capture of
    the module then says why.
    """
    try:
        used = _used_parameters(module, args, kwargs, device)
    except Exception:
        return True
    names = [name for name, _ in module.named_parameters()]
    for group in groups:
        inside = [name for name in names if name.startswith(f"{group}.")]
        if inside and used.isdisjoint(inside):
            return False
    return all("." in name or name in used for name in names)


def _used_parameters(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> set[str]:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied = fake_copy(module, mode, device)
    for parameter in copied.parameters():  # a script may freeze them for one of its losses
        parameter.requires_grad_(parameter.is_floating_point())
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    faked = [mode.from_tensor(leaf.detach()) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    fake_args, fake_kwargs = pytree.tree_unflatten(faked, structure)
    with mode, torch.random.fork_rng([]):
        outputs = copied(*fake_args, **fake_kwargs)
    names = {parameter: name for name, parameter in copied.named_parameters()}
    waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    seen: set[Any] = set()
    used: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and node.variable in names:
            used.add(names[node.variable])
        waiting += [following for following, _ in node.next_functions]
    return used
