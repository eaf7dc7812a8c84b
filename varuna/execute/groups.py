"""The process groups that a plan needs, made once by exactly the ranks in each."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from varuna.types import Plan, StageMap

GLOO_PATIENCE = 20
"""How much longer gloo waits than we do: it is the waiter that gives up first, and names the culprit."""


def device_identity(device: torch.device) -> str | None:
    """Of a GPU, the same in every process; None of a processor."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


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
