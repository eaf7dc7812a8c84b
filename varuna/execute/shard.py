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


def assign_owners(sizes: Sequence[int], *, replicas: int) -> list[int]:
    """Largest first, each to the replica with least so far: even by bytes, the same on every rank."""
    loads = [0] * replicas
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = loads.index(min(loads))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


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
    owners = dict(zip(parameters, assign_owners(sizes, replicas=group.size()), strict=True))
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
