"""Rank of this process, by the variables of torchrun, `varuna run`, mpirun or srun."""

import re
from collections.abc import Mapping
from typing import NamedTuple

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
    for rank, world, _ in FAMILIES:
        if rank in environment and world in environment:
            number, size = int(environment[rank]), int(environment[world])
            address, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", PORT))
            if not address and size > 1 and _spans_machines(environment, size):
                raise RuntimeError(
                    f"the {size} processes run on several machines, but MASTER_ADDR, the address of the "
                    "first one, is not set (mpirun -x MASTER_ADDR=first.host -x MASTER_PORT=29500 ..., "
                    "or export both before srun)"
                )
            local_rank = find_local_rank(environment)
            return ProcessRank(number, size, local_rank, address or "127.0.0.1", port)
    return ProcessRank(0, 1, -1, "127.0.0.1", PORT)


def find_local_rank(environment: Mapping[str, str]) -> int:
    """Read the number of this process on its machine; -1 if it is unknown."""
    for rank, world, local in FAMILIES:
        if rank in environment and world in environment:
            return int(environment.get(local, -1))
    return -1


def find_local_size(environment: Mapping[str, str]) -> int:
    """Read the number of processes on this machine; 1 if it is unknown."""
    for name in ("LOCAL_WORLD_SIZE", *LOCAL_SIZES):
        if name in environment:
            return int(environment[name])
    tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "4(x2),3"
    return int(tasks[0]) if tasks else 1


def _spans_machines(environment: Mapping[str, str], size: int) -> bool:
    here = [int(environment[name]) for name in LOCAL_SIZES if name in environment]
    return min(here) < size if here else int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1
