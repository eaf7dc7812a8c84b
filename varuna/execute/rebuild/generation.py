"""Leaves the links, process groups and store of a generation, and enters those of the next one.

All of torch.distributed's part of a morph is here: torch is about to get a function that reconfigures groups.
"""

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from varuna.execute.comm.address import job_key
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.groups import prove_members
from varuna.execute.comm.job_store import close_job_stores
from varuna.execute.comm.session import Session
from varuna.secure.listeners import close_gloo_listeners
from varuna.types import MorphOrder

_own_world = 0  # identity of the group that the library has made


def start_world(**options: Any) -> None:
    """Initialize torch.distributed, and note that the library has done it."""
    global _own_world
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, **options)
    _own_world = id(dist.group.WORLD)


def owns_world() -> bool:
    """Return False if the script has initialized torch.distributed itself."""
    return not dist.is_initialized() or id(dist.group.WORLD) == _own_world


def leave_generation(session: Session) -> None:
    """Say goodbye to the other ranks, and close links, groups and stores."""
    session.close()
    session.group = session.replicas = None
    if dist.is_initialized():
        dist.destroy_process_group()
    close_job_stores()


def enter_generation(order: MorphOrder, old_rank: int, *, timeout_seconds: float) -> Collective:
    """Initialize torch.distributed for the next generation, and return the group that hands tensors over.

    The environment already has the variables of the next generation. The group has all new ranks, and then
    the old ranks that leave. Those do not become ranks of torch.distributed.
    """
    world = order.layout.num_ranks
    index = world + order.leaving.index(old_rank) if order.rank is None else order.rank
    size = world + len(order.leaving)
    store, _, _ = next(iter(rendezvous("env://", index, world)))
    if order.rank is not None:
        start_world(store=distributed_c10d.PrefixStore("world", store), rank=order.rank, world_size=world)
    if size == 1:
        return Collective(0, [0])
    key = distributed_c10d.PrefixStore("handover", store)
    group = ProcessGroupGloo(key, index, size, timedelta(seconds=timeout_seconds))
    close_gloo_listeners()
    if (secret := job_key("groups")) is not None:
        prove_members(group, range(size), secret, index)
    return Collective(index, range(size), cast(dist.ProcessGroup, group))  # it has the same methods
