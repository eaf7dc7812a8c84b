"""Process groups of a plan, and the choice of backends and channels.

Only the members of a group take part in making it.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.slots import device_uuid, reachable_gpus
from varuna.types import ChannelName, Plan, StageMap

GLOO_TIMEOUT_FACTOR = 20
"""Gloo times out this much later than the waiter, so that the waiter's error, which names the cause, comes
first."""


class RankDevice(NamedTuple):
    """The device of a rank, as other ranks need to know it."""

    machine: str
    gpu: str | None  # UUID; None: the rank computes on a CPU
    reachable: tuple[str, ...]  # UUIDs of the GPUs whose memory it can write, its own included


def describe_device(device: torch.device) -> RankDevice:
    if device.type != "cuda":
        return RankDevice(machine_identity(), None, ())
    return RankDevice(machine_identity(), device_uuid(device), reachable_gpus(device))


def choose_channel(one: RankDevice, other: RankDevice, *, nccl: bool) -> ChannelName:
    """Return how tensors travel between two ranks; the same at both ends.

    `nccl`: NCCL works for the ranks of this job. Shared memory is preferred: a copy engine fills it, while
    NCCL takes multiprocessors from the computation.
    """
    if one.machine == other.machine and one.gpu in other.reachable and other.gpu in one.reachable:
        return "shared"
    return "group" if nccl else "host"


def reduce_backend(gpus: Sequence[str | None]) -> str:
    """Return the backend that reduces gradients, given every rank's GPU.

    NCCL refuses two ranks on one GPU. Gloo accepts GPU tensors and copies them through host memory. CPU
    tensors are reduced in the same groups.
    """
    separate = None not in gpus and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if separate else "gloo"


def make_group(
    ranks: Sequence[int], *, timeout_seconds: float, backend: str | None = None
) -> dist.ProcessGroup | None:
    """Make a group of these ranks; None if there is only one."""
    if len(ranks) < 2:
        return None
    group = dist.new_group(
        list(ranks),
        timeout=timedelta(seconds=timeout_seconds * GLOO_TIMEOUT_FACTOR),
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def make_placeholder_group(rank: int) -> None:
    """Make a group of one rank in place of a group that only other ranks make.

    Torch names a group by the number of groups that the process has made. Ranks with unequal counts would
    wait for each other forever.
    """
    dist.new_group([rank], backend="gloo", use_local_synchronization=True)


def have_equal_widths(stage_map: StageMap, stages: Sequence[int]) -> bool:
    return len({len(stage_map[stage]) for stage in stages}) == 1


def stages_of_ties(plan: Plan, holders: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the stages of every parameter that several stages use, given the segments that use it."""

    def stages_with(segments: Sequence[int]) -> tuple[int, ...]:
        spans = enumerate(range(stage.first, stage.stop) for stage in plan.stages)
        return tuple(number for number, span in spans if any(segment in span for segment in segments))

    found = {name: stages_with(segments) for name, segments in holders.items()}
    return {name: stages for name, stages in found.items() if len(stages) > 1}
