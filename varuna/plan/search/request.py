"""What a search is about, held against what the profile tells of."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from varuna.errors import PlanError
from varuna.plan.cost.costs import Costs
from varuna.plan.cut.cuts import Mode
from varuna.types import ScheduleName

PREFERENCE: tuple[ScheduleName, ...] = ("varuna", "1f1b", "zero-bubble", "zero-bubble-2x", "gpipe")
"""Among equally fast ones: the one that bears jitter best, then those that hold least."""


class Asked(NamedTuple):
    """What the search is about."""

    batch_size: int
    depths: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[ScheduleName, ...]
    modes: tuple[Mode, ...]
    shard_optimizer: bool
    headroom: float


def depths_of(costs: Costs, asked: Sequence[int] | None) -> tuple[int, ...]:
    every = range(1, costs.num_segments + 1)
    for depth in asked or ():
        if depth not in every:
            raise PlanError(
                f"{depth} stages asked for, but the model has {costs.num_segments} segments and so allows "
                f"1 to {costs.num_segments}"
            )
    return tuple(sorted(set(every if asked is None else asked)))


def microbatch_sizes_of(costs: Costs, asked: Sequence[int] | None) -> tuple[int, ...]:
    measured = costs.microbatch_sizes()
    for size in asked or ():
        if not 1 <= size <= measured[-1]:
            raise PlanError(
                f"micro-batches of {size} asked for, but the profile tells of 1 to {measured[-1]} "
                "(profile that size, or choose one of these)"
            )
    return tuple(sorted(set(measured if asked is None else asked)))


def schedules_of(asked: Sequence[ScheduleName] | None) -> tuple[ScheduleName, ...]:
    for name in asked or ():
        if name not in get_args(ScheduleName):
            known = ", ".join(get_args(ScheduleName))
            raise PlanError(f"there is no schedule {name!r} (choose among {known})")
    return tuple(name for name in PREFERENCE if asked is None or name in asked)
