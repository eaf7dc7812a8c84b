"""The process groups that a plan needs, made once by exactly the ranks in each."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.slots import device_uuid, gpus_in_reach
from varuna.types import ChannelName, Plan, StageMap

GLOO_PATIENCE = 20
"""How much longer gloo waits than we do: it is the waiter that gives up first, and names the culprit."""


class Seat(NamedTuple):
    """Where a rank computes, as the others need to know it."""

    machine: str
    gpu: str | None  # its name, the same in every process; None of a processor
    in_reach: tuple[str, ...]  # the GPUs whose memory it can write, its own among them


def seat_at(device: torch.device) -> Seat:
    if device.type != "cuda":
        return Seat(machine_identity(), None, ())
    return Seat(machine_identity(), device_uuid(device), gpus_in_reach(device))


def choose_channel(one: Seat, other: Seat, *, nccl: bool) -> ChannelName:
    """How tensors go between two ranks: the same at both ends. `nccl`: whether it takes the job's ranks.

    Shared memory comes first: a copy engine fills it, where NCCL would take processors from the computing.
    """
    together = one.machine == other.machine and one.gpu in other.in_reach and other.gpu in one.in_reach
    if together:
        return "shared"
    return "group" if nccl else "host"


def reduce_backend(devices: Sequence[str | None]) -> str:
    """What reduces gradients, given every rank's device.

    NCCL refuses two ranks on one GPU; gloo takes what is on a GPU too, through the host. Numbers of the host
    travel in the same groups.
    """
    alone = None not in devices and len(set(devices)) == len(devices)
    return "cpu:gloo,cuda:nccl" if alone else "gloo"


def make_group(
    ranks: Sequence[int], *, timeout_seconds: float, backend: str | None = None
) -> dist.ProcessGroup | None:
    """None where one rank is all: nothing to reduce."""
    if len(ranks) < 2:
        return None
    # Only members take part, so idle ranks of the job need not know of the group.
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_seconds * GLOO_PATIENCE),
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def stand_in(rank: int) -> None:
    """For a group that others make and this rank has no part in: torch names a group by how many a rank has
    made before, so that ranks of unequal counts would wait for each other for ever."""
    dist.new_group([rank], backend="gloo", use_local_synchronization=True)


def have_equal_widths(stage_map: StageMap, stages: Sequence[int]) -> bool:
    return len({len(stage_map[stage]) for stage in stages}) == 1


def stages_of_ties(plan: Plan, holders: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """For each parameter used by segments of several stages, those stages."""
    found = {}
    for name, segments in holders.items():
        stages = tuple(
            number
            for number, stage in enumerate(plan.stages)
            if any(stage.first <= segment < stage.stop for segment in segments)
        )
        if len(stages) > 1:
            found[name] = stages
    return found
