"""Leaves the links, process groups and store of a generation, and enters those of the next one.

All of torch.distributed's part of a morph is here: torch is about to get a function that reconfigures groups.
"""

import os
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from varuna import codec
from varuna.execute.comm.address import job_key
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.groups import prove_members
from varuna.execute.comm.job_store import close_job_stores
from varuna.execute.comm.session import Session
from varuna.secure.listeners import close_gloo_listeners, shut_gloo_connections
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


def leave_generation(session: Session, *, abandons: bool = False) -> None:
    """Say goodbye to the other ranks, and close links, groups and stores.

    `abandons`: all ranks have abandoned their operations. Some may wait for a peer that is gone or has given
    up, and gloo would wait for them when a group is freed.
    """
    session.close()
    if abandons:
        shut_gloo_connections()
    session.group = session.replicas = None
    if dist.is_initialized():
        dist.destroy_process_group()
    close_job_stores()


class SurvivorStep(msgspec.Struct, frozen=True):
    """The progress of a rank that survives the loss of another one."""

    iteration: int  # number of finished steps
    whole: bool  # its gradients of the next step are whole, and it took part in the commit


def exchange_steps(
    order: MorphOrder, old_rank: int, own: SurvivorStep, *, seconds: float
) -> list[SurvivorStep]:
    """Return the progress of all survivors, through the store of the next generation."""
    timeout = timedelta(seconds=seconds)
    survivors = sorted({*(rank for rank in order.previous if rank is not None), *order.leaving})
    os.environ.update(MASTER_ADDR=order.master_addr, MASTER_PORT=str(order.master_port))
    found, _, _ = next(iter(rendezvous("env://", old_rank, len(survivors), timeout=timeout)))
    store = distributed_c10d.PrefixStore("steps", found)
    store.set(str(old_rank), codec.encode(own))
    return [codec.decode(store.get(str(rank)), SurvivorStep, f"step of rank {rank}") for rank in survivors]


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
