"""Shards the optimizer's state over the replicas (ZeRO stage 1), for any torch optimizer.

Each replica's optimizer keeps only the parameters that it owns, so only their state is created. After its
step, the owners send the new values to the others. Gradients are complete on all replicas, so the updates are
those of the unsharded optimizer.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.types import BUCKET_BYTES, spread_by_size


def shard_optimizer(
    optimizer: torch.optim.Optimizer, *, replica: int, group: dist.ProcessGroup
) -> dict[Tensor, int]:
    """Leave each replica its own parameters in the optimizer's groups. Return the owner of each."""
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad starts with some
        raise ValueError(
            "the optimizer already has state (register it with set_optimizer before its first step)"
        )
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    sizes = [p.numel() * p.element_size() for p in parameters]
    owners = dict(zip(parameters, spread_by_size(sizes, parts=group.size()), strict=True))
    for param_group in optimizer.param_groups:
        param_group["params"] = [p for p in param_group["params"] if owners[p] == replica]
    for parameter in [p for p in optimizer.state if owners[p] != replica]:
        del optimizer.state[parameter]
    owned = [[p for p in parameters if owners[p] == owner] for owner in range(group.size())]
    _clear_all(optimizer, [p for p in parameters if owners[p] != replica])
    optimizer.register_step_post_hook(lambda *_: share_values(owned, group))
    return owners


def _clear_all(optimizer: torch.optim.Optimizer, others: Sequence[Tensor]) -> None:
    """Let `optimizer.zero_grad()` clear the gradients of all parameters, also of those of other replicas."""
    clear_own = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        clear_own(set_to_none=set_to_none)
        for parameter in others:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


def share_values(owned: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Broadcast each owner's values to all replicas, in few large messages."""
    for owner, theirs in enumerate(owned):
        if theirs:
            values = [tensor.detach() for tensor in theirs]
            dist._broadcast_coalesced(group, values, BUCKET_BYTES, owner)  # type: ignore[attr-defined]
