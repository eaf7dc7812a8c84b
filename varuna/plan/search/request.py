"""Requirements of a search, checked against the profile."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cut.cuts import RecomputeMode
from varuna.types import ScheduleName

PREFERENCE: tuple[ScheduleName, ...] = ("varuna", "1f1b", "zero-bubble", "zero-bubble-2x", "gpipe")
"""Order of preference among equally fast schedules: the one least sensitive to jitter, then by memory."""


class SearchRequest(NamedTuple):
    """Batch, and all depths, sizes, schedules and recompute modes that a search may choose from."""

    batch_size: int
    depths: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[ScheduleName, ...]
    modes: tuple[RecomputeMode, ...]
    shard_optimizer: bool
    headroom: float


def check_depths(costs: CostTable, depths: Sequence[int] | None) -> tuple[int, ...]:
    """Return the depths in ascending order; None stands for all."""
    possible = range(1, costs.num_segments + 1)
    for depth in depths or ():
        if depth not in possible:
            raise PlanError(
                f"{depth} stages were requested, but the model has {costs.num_segments} segments and so "
                f"allows 1 to {costs.num_segments}"
            )
    return tuple(sorted(set(possible if depths is None else depths)))


def check_microbatch_sizes(costs: CostTable, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sizes in ascending order; None stands for all measured ones."""
    measured = costs.microbatch_sizes()
    for size in sizes or ():
        if not 1 <= size <= measured[-1]:
            raise PlanError(
                f"micro-batches of {size} were requested, but the profile covers 1 to {measured[-1]} "
                "(profile that size, or choose one in this range)"
            )
    return tuple(sorted(set(measured if sizes is None else sizes)))


def check_schedules(names: Sequence[ScheduleName] | None) -> tuple[ScheduleName, ...]:
    """Return the schedules in order of preference; None stands for all."""
    for name in names or ():
        if name not in get_args(ScheduleName):
            known = ", ".join(get_args(ScheduleName))
            raise PlanError(f"there is no schedule {name!r} (choose one of {known})")
    return tuple(name for name in PREFERENCE if names is None or name in names)
