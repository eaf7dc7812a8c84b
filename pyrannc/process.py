"""Who this process is: by torch.distributed, or by what torchrun, mpirun or srun put into the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from varuna.plan.plan_file import read_plan
from varuna.plan.tables import console, show_plan

FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),  # torchrun
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH, Intel MPI
    # Slurm. A batch script has a SLURM_PROCID too, but is no step of srun's. An mpirun that Slurm started is
    # one step too, whose processes are not Slurm's: hence the last.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
PORT = 29500


class Place(NamedTuple):
    rank: int
    world: int
    local_rank: int  # -1: not told
    address: str
    port: int


def find_place(environment: Mapping[str, str]) -> Place:
    """One process alone where nothing says otherwise."""
    for rank, world, local in FAMILIES:
        if rank in environment and world in environment:
            number, size = int(environment[rank]), int(environment[world])
            local_rank = int(environment.get(local, -1))
            address = environment.get("MASTER_ADDR", "")
            if not address:
                if size > 1 and _are_elsewhere(environment, size):
                    raise RuntimeError(
                        f"some of {size} processes are on other machines, and MASTER_ADDR does not say where "
                        "the first one is (mpirun -x MASTER_ADDR=the.first.host -x MASTER_PORT=29500 ..., or "
                        "export both before srun)"
                    )
                address = "127.0.0.1"
            return Place(number, size, local_rank, address, int(environment.get("MASTER_PORT", PORT)))
    return Place(0, 1, -1, "127.0.0.1", PORT)


def _are_elsewhere(environment: Mapping[str, str], size: int) -> bool:
    here = [int(environment[name]) for name in LOCAL_SIZES if name in environment]
    return min(here) < size if here else int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1


def join(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place; makes the process group where the script has not."""
    place = find_place(environment)
    if dist.is_initialized():
        return place._replace(rank=dist.get_rank(), world=dist.get_world_size())
    if place.world > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"tcp://{place.address}:{place.port}",
            rank=place.rank,
            world_size=place.world,
        )
    return place


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else find_place(os.environ).rank


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else find_place(os.environ).world


def barrier() -> None:
    """Returns when all ranks have called it."""
    if join().world > 1:
        dist.barrier()


def show_deployment(path: str | os.PathLike[str]) -> None:
    """Prints a saved deployment: its stages, what each costs, and what was not chosen."""
    show_plan(console(), read_plan(path))


@dataclass
class Switches:
    delays_allreduce: bool = False
    keeps_graph: bool = False
    syncs_parameters: bool = True


switches = Switches()


def delay_grad_allreduce(enable: bool) -> None:
    """`True`: backwards add to gradients without reducing them, until `allreduce_grads()` of the module."""
    switches.delays_allreduce = bool(enable)


def keep_graph(enable: bool) -> None:
    """`True`: several backwards may follow one forward."""
    switches.keeps_graph = bool(enable)


def sync_params_on_init(enable: bool) -> None:
    """`True`, as it is at first: all ranks begin with rank 0's values."""
    switches.syncs_parameters = bool(enable)
