"""The processes that measure together: what one finds all get, and an error of one is an error of all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from varuna.errors import WorkerError
from varuna.execute.comm.collective import Collective, RankFailure
from varuna.measure.reductions import group_sizes

Anything = TypeVar("Anything")

PATIENCE = timedelta(hours=2)
"""For a rank that measures, while the others have nothing to do."""


class Team(Collective):
    """This rank and the others of the job; one alone needs no torch.distributed."""

    def __init__(self) -> None:
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        super().__init__(
            dist.get_rank() if self.size > 1 else 0,
            range(self.size),
            dist.new_group(backend="gloo", timeout=PATIENCE) if self.size > 1 else None,
        )

    def together(self, work: Callable[[], Anything]) -> list[Anything]:
        """Return the result of the work on every rank. If it fails on one rank, all ranks raise."""
        return self.agree(work, _profiling_error)

    def on_first(self, work: Callable[[], Anything]) -> Anything:
        """Run the work on the first rank and return its result on all."""
        found = self.together(lambda: work() if self.rank == 0 else None)[0]
        return found  # type: ignore[return-value]


def _profiling_error(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
    first = failures[0]
    return own or WorkerError(f"rank {first.rank} failed while profiling: {first.kind}: {first.message}")


class Place(NamedTuple):
    """Where a rank runs."""

    machine: str
    device: str
    cores: int  # of the machine, for as many computing threads as this rank uses


@dataclass(frozen=True)
class Places:
    """Where all ranks run, by rank."""

    of: Sequence[Place]

    @property
    def machines(self) -> list[list[int]]:
        """The ranks of each machine."""
        found: dict[str, list[int]] = {}
        for rank, place in enumerate(self.of):
            found.setdefault(place.machine, []).append(rank)
        return list(found.values())

    @property
    def far_pair(self) -> tuple[int, int] | None:
        """Two ranks on two machines."""
        machines = self.machines
        return (machines[0][0], machines[1][0]) if len(machines) > 1 else None

    def beside(self, rank: int) -> int:
        """How many ranks share the machine of one, itself included."""
        return sum(place.machine == self.of[rank].machine for place in self.of)

    def workers(self) -> list[int]:
        """The ranks that can measure at the same time without taking turns on one device or core."""
        if self.of[0].device != "cpu":
            first: dict[tuple[str, str], int] = {}
            for rank, place in enumerate(self.of):
                first.setdefault((place.machine, place.device), rank)
            return sorted(first.values())
        return sorted(rank for ranks in self.machines for rank in ranks[: max(1, self.of[ranks[0]].cores)])

    def share_a_device(self, ranks: Sequence[int]) -> bool:
        devices = [(self.of[rank].machine, self.of[rank].device) for rank in ranks]
        return self.of[0].device != "cpu" and len(set(devices)) < len(devices)

    def groups(self) -> list[tuple[tuple[int, ...], bool]]:
        """Groups of growing size to reduce over: within a machine, and with one rank of each of several."""
        machines = self.machines
        near = max(machines, key=len)
        far = [ranks[0] for ranks in machines]
        return [(tuple(near[:size]), False) for size in group_sizes(len(near))] + [
            (tuple(far[:size]), True) for size in group_sizes(len(far))
        ]
