"""Rank of this process, by torch.distributed, torchrun, mpirun or srun; its switches; lost ranks."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from varuna.errors import PeerHangs, PeerLost
from varuna.execute.comm.session import Session
from varuna.plan.plan_file import read_plan
from varuna.plan.tables import console, show_plan
from varuna.train.process_rank import ProcessRank, find_rank

AFTER_A_LOSS = (
    "(the model cannot go on without this rank: let the script end. torchrun with --max-restarts, or varuna "
    "run, starts all ranks again, and the script loads its last checkpoint)"
)


class RankLost(PeerLost):
    """Another rank was killed, or does not answer. All later calls of the model raise this error, too."""


@contextmanager
def reporting_losses(session: Session) -> Iterator[None]:
    """Raise RankLost in this block, and at once in later blocks, if another rank of the session is lost."""
    waiter = session.waiter
    known = None if waiter is None else waiter.failure
    try:
        if isinstance(known, PeerLost | PeerHangs):
            raise known
        yield
    except (PeerLost, PeerHangs) as error:
        message = str(error)
        lost = RankLost(message if AFTER_A_LOSS in message else f"{message}\n{AFTER_A_LOSS}")
        if waiter is not None:
            waiter.fail(lost)
        raise lost from error


def join(environment: Mapping[str, str] = os.environ) -> ProcessRank:
    """Return the rank of this process; make the process group if the script has not."""
    process = find_rank(environment)
    if dist.is_initialized():
        return process._replace(rank=dist.get_rank(), world=dist.get_world_size())
    if process.world > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{process.address}:{process.port}",
            rank=process.rank,
            world_size=process.world,
        )
    return process


def get_rank() -> int:
    """Return the rank of this process; 0 if there is only one."""
    return dist.get_rank() if dist.is_initialized() else find_rank(os.environ).rank


def get_world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else find_rank(os.environ).world


def barrier() -> None:
    """Wait until all ranks have called it."""
    if join().world > 1:
        dist.barrier()


class Deployed(Protocol):
    """A wrapped model of this process."""

    def undeploy(self) -> None: ...


live_modules: WeakSet[Deployed] = WeakSet()


def clear() -> None:
    """Undeploy all wrapped models of this process; all ranks call it."""
    barrier()  # no rank closes a connection that another one still uses
    for module in list(live_modules):
        module.undeploy()
    live_modules.clear()


def show_deployment(path: str | os.PathLike[str], batch_size: int | None = None) -> None:
    """Print a saved deployment: its stages and their costs, and the alternatives.

    `batch_size`, an argument of RaNNC, changes nothing: the deployment contains its batch size.
    """
    show_plan(console(), read_plan(path))


@dataclass
class Switches:
    """Settings of this process that RaNNC's functions change."""

    delays_allreduce: bool = False
    keeps_graph: bool = False
    syncs_parameters: bool = True


switches = Switches()


def delay_grad_allreduce(enable: bool) -> None:
    """With `True`, backwards add up gradients without reducing them, until `model.allreduce_grads()`."""
    switches.delays_allreduce = bool(enable)


def keep_graph(enable: bool) -> None:
    """With `True`, several backwards may follow one forward."""
    switches.keeps_graph = bool(enable)


def sync_params_on_init(enable: bool) -> None:
    """With `True`, the default, all ranks start with the values of rank 0."""
    switches.syncs_parameters = bool(enable)
