"""The functions of the package that belong to no module: who this process is, and what a deployment says."""

import os

import torch.distributed as dist

from pyrannc.joining import find_place, join
from varuna.plan_file import read_plan
from varuna.tables import console, show_plan


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
