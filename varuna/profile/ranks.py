"""The ranks that measure together, and where each of them runs."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from varuna.errors import WorkerError
from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.collective import Collective, RankFailure
from varuna.execute.comm.groups import secure_group
from varuna.measure.reductions import group_sizes

T = TypeVar("T")

WAIT_LIMIT = timedelta(hours=2)
"""Longest wait for a rank that measures while the others have nothing to do."""


def join_ranks() -> Collective:
    """Return the ranks of torch.distributed; a process alone needs no torch.distributed."""
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size == 1:
        return Collective(0, [0])
    group = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)
    assert isinstance(group, dist.ProcessGroup)
    secure_group(group)
    return Collective(dist.get_rank(), range(size), group)


def on_all(ranks: Collective, work: Callable[[], T], kind: Any) -> list[T]:
    """Run `work` on every rank and return all results, of type `kind`; an error on one raises on all."""

    def error(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
        first = failures[0]
        return own or WorkerError(f"rank {first.rank} failed while profiling: {first.kind}: {first.message}")

    return ranks.agree(work, error, kind)


def on_first(ranks: Collective, work: Callable[[], T], kind: Any) -> T:
    """Run `work` on rank 0 and return its result, of type `kind`, on all ranks."""
    result = on_all(ranks, lambda: work() if ranks.rank == 0 else None, kind)[0]
    return result  # type: ignore[return-value]


class RankPlace(NamedTuple):
    """Machine and device of a rank."""

    machine: str
    device: str
    cores: int  # number of ranks with this many threads for which the machine has cores


@dataclass(frozen=True)
class RankPlaces:
    """Machines and devices of all ranks, by rank."""

    of: Sequence[RankPlace]

    @property
    def machines(self) -> list[list[int]]:
        """Ranks of each machine."""
        by_name: dict[str, list[int]] = {}
        for rank, place in enumerate(self.of):
            by_name.setdefault(place.machine, []).append(rank)
        return list(by_name.values())

    @property
    def near_pair(self) -> tuple[int, int] | None:
        """Two ranks on one machine."""
        return next(((ranks[0], ranks[1]) for ranks in self.machines if len(ranks) > 1), None)

    @property
    def far_pair(self) -> tuple[int, int] | None:
        """Two ranks on two machines."""
        machines = self.machines
        return (machines[0][0], machines[1][0]) if len(machines) > 1 else None

    def num_on_machine(self, rank: int) -> int:
        """Return the number of ranks on a rank's machine, itself included."""
        return sum(place.machine == self.of[rank].machine for place in self.of)

    def workers(self) -> list[int]:
        """Return the ranks that can measure at once without sharing a device or a core."""
        if self.of[0].device != "cpu":
            devices = [(place.machine, place.device) for place in self.of]
            return sorted(map(devices.index, set(devices)))
        return sorted(rank for ranks in self.machines for rank in ranks[: max(1, self.of[ranks[0]].cores)])

    def share_a_device(self, ranks: Sequence[int]) -> bool:
        devices = [(self.of[rank].machine, self.of[rank].device) for rank in ranks]
        return self.of[0].device != "cpu" and len(set(devices)) < len(devices)

    def groups(self) -> list[tuple[tuple[int, ...], bool]]:
        """Return groups of growing size within one machine, and of one rank of each machine (True)."""
        machines = self.machines
        near = max(machines, key=len)
        far = [ranks[0] for ranks in machines]
        return [(tuple(near[:size]), False) for size in group_sizes(len(near))] + [
            (tuple(far[:size]), True) for size in group_sizes(len(far))
        ]


def find_places(ranks: Collective, device: torch.device) -> RankPlaces:
    """Return the places of all ranks; every rank calls it."""
    cores = len(os.sched_getaffinity(0)) // torch.get_num_threads()
    return RankPlaces(ranks.gather(RankPlace(machine_identity(), str(device), cores), RankPlace))
