"""The optimizer's state spread over the replicas (ZeRO stage 1), for any torch optimizer.

Each replica's optimizer keeps only the parameters that it owns, so only their state is ever made;
after its step the owners send the new values to the others. Gradients are whole on all replicas, so
the updates are those of the unsharded optimizer.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.types import spread_by_size

SHARE_BYTES = 25 << 20
"""Of the values that are sent as one."""


def shard_optimizer(
    optimizer: torch.optim.Optimizer, *, replica: int, group: dist.ProcessGroup
) -> dict[Tensor, int]:
    """Leaves each replica its own parameters in the optimizer's groups; returns the owner of each."""
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):  # Adagrad begins with some
        raise ValueError(
            "the optimizer has state already (register it with set_optimizer before its first step)"
        )
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    sizes = [p.numel() * p.element_size() for p in parameters]
    owners = dict(zip(parameters, spread_by_size(sizes, parts=group.size()), strict=True))
    for param_group in optimizer.param_groups:
        param_group["params"] = [p for p in param_group["params"] if owners[p] == replica]
    for parameter in [p for p in optimizer.state if owners[p] != replica]:
        del optimizer.state[parameter]
    owned = [[p for p in parameters if owners[p] == owner] for owner in range(group.size())]

    def share(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        share_values(owned, group)

    optimizer.register_step_post_hook(share)
    return owners


def share_values(owned: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> None:
    """Gives everyone the values of each owner: together, for a message costs more than a tensor's bytes."""
    for owner, theirs in enumerate(owned):
        if theirs:
            values = [tensor.detach() for tensor in theirs]
            dist._broadcast_coalesced(group, values, SHARE_BYTES, owner)  # type: ignore[attr-defined]
