"""The optimizer's state spread over the replicas (ZeRO stage 1), for any torch optimizer.

Each replica's optimizer keeps only the parameters that it owns, so only their state is ever made;
after its step the owners send the new values to the others. Gradients are whole on all replicas, so
the updates are those of the unsharded optimizer.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.types import spread_by_size


def shard_optimizer(
    optimizer: torch.optim.Optimizer, *, replica: int, group: dist.ProcessGroup
) -> dict[Tensor, int]:
    """Leaves each replica its own parameters in the optimizer's groups; returns the owner of each."""
    if optimizer.state:
        raise ValueError(
            "the optimizer has state already (register it with set_optimizer before its first step)"
        )
    parameters = [p for param_group in optimizer.param_groups for p in param_group["params"]]
    sizes = [p.numel() * p.element_size() for p in parameters]
    owners = dict(zip(parameters, spread_by_size(sizes, parts=group.size()), strict=True))
    for param_group in optimizer.param_groups:
        param_group["params"] = [p for p in param_group["params"] if owners[p] == replica]
    ranks = dist.get_process_group_ranks(group)

    def share(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        works = [
            dist.broadcast(p.detach(), src=ranks[owner], group=group, async_op=True)
            for p, owner in owners.items()
        ]
        for work in works:
            assert work is not None
            work.wait()

    optimizer.register_step_post_hook(share)
    return owners
