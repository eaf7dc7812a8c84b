"""Leaves the links, process groups and store of a generation, and enters those of the next one.

All of torch.distributed's part of a morph is here: torch is about to get a function that reconfigures groups.
"""

import ctypes
import errno
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

from varuna import codec
from varuna.environment import VarunaEnvironment
from varuna.errors import PeerLost, VarunaError
from varuna.execute.comm.address import job_key
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.groups import prove_members, seconds_in_gloo, waiting_in_gloo
from varuna.execute.comm.job_store import close_job_stores, disconnect_job_stores
from varuna.execute.comm.session import Session
from varuna.execute.device.facts import ran_out_of_memory
from varuna.execute.rebuild.abort_nccl import abort_nccl, keep_process_after_errors
from varuna.secure.listeners import close_gloo_listeners, shut_gloo_connections
from varuna.types import MorphOrder

log = logging.getLogger("varuna")

SHUT_SECONDS = 0.3
"""A collective notices within this time that its connections were shut."""
WATCH_SECONDS = 0.01
STUCK_SECONDS = 5.0
"""Gloo never ends a wait that lasts this long after the loss of a rank: its connections are shut by then."""
BUSY_SECONDS = 3600.0
"""Longest wait for ranks that are busy in the script after a loss. Their manager ends it earlier."""
CONNECTION_ERRORS = frozenset(
    {errno.EBADF, errno.ENOTCONN, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
"""Numbers of an OSError of a socket; EBADF: another thread has closed it. Others have their own classes."""
CONNECTION_WORDS = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|aborted|timed out)|broken pipe|socket timeout|pair closure"
    r"|operation timed out",
    re.IGNORECASE,
)
"""Words of a RuntimeError of torch.distributed. Gloo's begin with a path: [.../gloo/.../pair.cc:538]."""
_own_world = 0  # identity of the group that the library has made


def start_world(**options: Any) -> None:
    """Initialize torch.distributed, and note that the library has done it."""
    global _own_world
    if VarunaEnvironment.read(os.environ).hot == "1":
        keep_process_after_errors()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed_c10d._world.group_count = 0  # a start that was interrupted has counted: names would differ
    with waiting_in_gloo():
        dist.init_process_group(backend, **options)
    _own_world = id(dist.group.WORLD)


def owns_world() -> bool:
    """Return False if the script has initialized torch.distributed itself."""
    return not dist.is_initialized() or id(dist.group.WORLD) == _own_world


def leave_generation(session: Session) -> None:
    """Say goodbye to the other ranks, and close links, groups and stores."""
    session.close()
    _destroy_groups(session)


def abandon_generation(session: Session, works: Sequence[dist.Work] = ()) -> None:
    """Close links, groups and stores at once: ranks are lost, and all others have abandoned their calls.

    `works`: collectives that this rank has started and not waited for.
    """
    if not abort_nccl(_groups(session)):
        end_stuck_process("NCCL")
    session.abandon()
    disconnect_job_stores()  # a host that is gone does not answer
    shut_gloo_connections()
    if session.waiter is not None and not session.waiter.drain_abandoned(works, SHUT_SECONDS):
        log.info("gloo does not end an operation; its groups stay until this process ends")
        for group in list(distributed_c10d._world.pg_map):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # freeing it would wait for the operation
    _destroy_groups(session)


def _groups(session: Session) -> list[Any]:
    """Return all process groups and the backends of lanes."""
    links = () if session.network is None else session.network.links.values()
    return [*distributed_c10d._world.pg_map, *(backend for link in links for backend in link.lane_backends)]


def _destroy_groups(session: Session) -> None:
    session.group = session.replicas = None
    if dist.is_initialized():
        dist.destroy_process_group()
    close_job_stores()


@contextmanager
def ended_by(has_order: Callable[[], bool]) -> Iterator[None]:
    """Make waits for groups and stores inside the block fail as soon as the manager has lost more ranks."""
    over = threading.Event()

    def watch() -> None:
        noticed = math.inf
        while not over.wait(WATCH_SECONDS):
            if has_order():
                noticed = min(noticed, time.monotonic())
                disconnect_job_stores()
                shut_gloo_connections()
                if min(time.monotonic() - noticed, seconds_in_gloo()) > STUCK_SECONDS:
                    end_stuck_process("gloo")

    thread = threading.Thread(target=watch, name="varuna-orders", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_stuck_process(library: str) -> None:
    """End this process, which gloo or NCCL does not free; the others go on, and its machine joins again."""
    print(
        f"{library} waits for a rank that was lost, and cannot be stopped: this worker ends", file=sys.stderr
    )
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def is_interruption(error: Exception) -> bool:
    """Return whether this error of a morph shows that another rank is gone, or comes from `ended_by`.

    All other errors are this rank's own: of its memory, its device, its disk, or the code of its model.
    """
    if isinstance(error, VarunaError):
        return isinstance(error, PeerLost)
    if isinstance(error, dist.DistError | ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError):
        return error.errno in CONNECTION_ERRORS
    is_own = ran_out_of_memory(error)
    return isinstance(error, RuntimeError) and not is_own and bool(CONNECTION_WORDS.search(str(error)))


class SurvivorStep(msgspec.Struct, frozen=True):
    """The progress of a rank that survives the loss of another one. Ranks of one generation compare."""

    generation: int  # that it has entered; 0: a joiner that has no state yet
    calls: int  # number of finished calls of this generation that all ranks make
    between: bool  # the ranks have agreed on all earlier calls, and are in none that they cannot repeat
    copied: list[int] = []  # steps of which it has whole copies
    joins: bool = False  # it has no state of the job of its own yet, and no copies


def meet(store: distributed_c10d.Store, count: int) -> None:
    """Wait for all ranks that enter a generation after a loss: some end a loop of the script first."""
    store.set_timeout(timedelta(seconds=BUSY_SECONDS))
    if store.add("entered", 1) == count:
        store.set("complete", "")
    store.wait(["complete"])
    store.set_timeout(default_pg_timeout)


def exchange_steps(order: MorphOrder, own: SurvivorStep) -> list[SurvivorStep]:
    """Return the progress of all survivors, through the store of the next generation."""
    timeout = timedelta(seconds=BUSY_SECONDS)
    survivors = sorted({*(rank for rank in order.previous if rank is not None), *order.leaving})
    assert order.old_rank in survivors, "a joiner has no step"
    os.environ.update(MASTER_ADDR=order.master_addr, MASTER_PORT=str(order.master_port))
    found, _, _ = next(iter(rendezvous("env://", order.old_rank, len(survivors), timeout=timeout)))
    store = distributed_c10d.PrefixStore("steps", found)
    store.set(str(order.old_rank), codec.encode(own))
    return [codec.decode(store.get(str(rank)), SurvivorStep, f"step of rank {rank}") for rank in survivors]


def enter_generation(order: MorphOrder, *, timeout_seconds: float) -> Collective:
    """Initialize torch.distributed for the next generation, and return the group that hands tensors over.

    The environment already has the variables of the next generation. The group has all new ranks, and then
    the old ranks that leave. Those do not become ranks of torch.distributed.
    """
    world = order.layout.num_ranks
    if order.rank is None:
        assert order.old_rank is not None, "a joiner has a rank"
        index = world + order.leaving.index(order.old_rank)
    else:
        index = order.rank
    size = world + len(order.leaving)
    store, _, _ = next(iter(rendezvous("env://", index, world)))
    if order.lost:
        meet(store, size)
    if order.rank is not None:
        start_world(store=distributed_c10d.PrefixStore("world", store), rank=order.rank, world_size=world)
    if size == 1:
        return Collective(0, [0])
    key = distributed_c10d.PrefixStore("handover", store)
    with waiting_in_gloo():
        group = ProcessGroupGloo(key, index, size, timedelta(seconds=timeout_seconds))
    close_gloo_listeners()
    if (secret := job_key("groups")) is not None:
        prove_members(group, range(size), secret, index)
    return Collective(index, range(size), cast(dist.ProcessGroup, group))  # it has the same methods
