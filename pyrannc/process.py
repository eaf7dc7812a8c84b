"""Rank of this process, by torch.distributed, torchrun, mpirun or srun; and the switches of this process."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from varuna.plan.plan_file import read_plan
from varuna.plan.tables import console, show_plan

FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    # Slurm. SLURM_PROCID is also set in a batch script, which is not started by srun; the number of tasks of
    # a step is not. Last, because an mpirun under Slurm runs in a step, but its processes are not Slurm's.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
PORT = 29500


class ProcessRank(NamedTuple):
    """Rank of this process, and the address at which all processes meet."""

    rank: int
    world: int
    local_rank: int  # -1: unknown
    address: str
    port: int


def find_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Read the rank from the environment; without any variables, the process is alone."""
    for rank, world, local in FAMILIES:
        if rank in environment and world in environment:
            number, size = int(environment[rank]), int(environment[world])
            local_rank = int(environment.get(local, -1))
            address, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", PORT))
            if not address and size > 1 and _spans_machines(environment, size):
                raise RuntimeError(
                    f"the {size} processes run on several machines, but MASTER_ADDR, the address of the "
                    "first one, is not set (mpirun -x MASTER_ADDR=first.host -x MASTER_PORT=29500 ..., "
                    "or export both before srun)"
                )
            return ProcessRank(number, size, local_rank, address or "127.0.0.1", port)
    return ProcessRank(0, 1, -1, "127.0.0.1", PORT)


def _spans_machines(environment: Mapping[str, str], size: int) -> bool:
    here = [int(environment[name]) for name in LOCAL_SIZES if name in environment]
    return min(here) < size if here else int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1


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
    return dist.get_rank() if dist.is_initialized() else find_rank(os.environ).rank


def get_world_size() -> int:
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
