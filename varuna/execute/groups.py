"""The process groups that a plan needs, made once by exactly the ranks in each."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from varuna.types import Plan

GLOO_PATIENCE = 20
"""How much longer gloo waits than we do: it is the waiter that gives up first, and names the culprit."""


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
