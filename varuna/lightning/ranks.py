"""Ranks for Lightning, by the variables of `varuna run`, torchrun, mpirun or srun, and their messages."""

import os
from pathlib import PurePath
from typing import Any

import torch.distributed as dist

from varuna.execute.comm.collective import Collective
from varuna.execute.comm.values import PlainValue
from varuna.train.process_rank import ProcessRank, find_local_size, find_rank


def started_process() -> ProcessRank | None:
    """Return the rank of this process; None if no launcher started it."""
    process = find_rank(os.environ)
    return process if process.world > 1 and process.local_rank >= 0 else None


class Messages:
    """Broadcasts plain values and tensors to all ranks. Lightning's own broadcast would send pickles."""

    def __init__(self) -> None:
        self._world: Any = None  # the process group for which the ranks were joined
        self._ranks: Collective | None = None

    def broadcast(self, value: Any, source: int) -> Any:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        sent = str(value) if isinstance(value, PurePath) else value
        return self.gather(sent if dist.get_rank() == source else None)[source]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [value]
        if self._ranks is None or self._world is not dist.group.WORLD:
            group = dist.new_group(backend="gloo")
            self._ranks = Collective(dist.get_rank(), range(dist.get_world_size()), group)
            self._world = dist.group.WORLD
        return [found.value for found in self._ranks.gather(PlainValue(value), PlainValue)]


def environment_class(base: Any) -> Any:
    """Return a ClusterEnvironment of Lightning for processes that a launcher started.

    `base` is the class of the Lightning package that asks.
    """
    return type("VarunaEnvironment", (StartedProcesses, base), {"__module__": __name__})


class StartedProcesses:
    """Rank and address of processes that a launcher started; Lightning cannot change them."""

    creates_processes_externally = True

    def __init__(self, process: ProcessRank) -> None:
        super().__init__()
        self._process = process

    @property
    def main_address(self) -> str:
        return self._process.address

    @property
    def main_port(self) -> int:
        return self._process.port

    @staticmethod
    def detect() -> bool:
        return started_process() is not None

    def world_size(self) -> int:
        return self._process.world

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return self._process.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return self._process.local_rank

    def node_rank(self) -> int:
        first = self._process.rank - self._process.local_rank  # of this machine
        return first // find_local_size(os.environ)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self._process.world:
            raise ValueError(
                f"devices={num_devices} and num_nodes={num_nodes} of Lightning are "
                f"{num_devices * num_nodes} processes, but the launcher started {self._process.world} (pass "
                "the number of processes of each machine as devices=, and of machines as num_nodes=)"
            )
