"""Where a plan is pinned: one JSON file with the plan, what it will cost, and what it was chosen over.

Imports no torch.
"""

import os
from pathlib import Path

import msgspec

from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.files import write_atomic
from varuna.plan.cost.estimate import Speed
from varuna.types import Cluster, Plan, Proposal


class Network(msgspec.Struct, frozen=True):
    """What was assumed of the way between machines."""

    bytes_per_second: float
    latency_seconds: float


class StageContents(msgspec.Struct, frozen=True):
    """What a stage is made of."""

    num_operations: int
    num_parameters: int  # elements


class PinnedPlan(Proposal, frozen=True):
    """A proposal, and what it was made from. Whoever runs it needs but the `plan`."""

    runners_up: tuple[Proposal, ...] = ()
    refused: tuple[str, ...] = ()
    cluster: Cluster | None = None
    network: Network | None = None  # None: as it was measured
    shard_optimizer: bool = False
    contents: tuple[StageContents, ...] = ()  # of each stage, where it is known
    plain: Proposal | None = None  # one stage with a replica on every rank, whether it fits or not
    basis: str = ""  # what its times rest on
    speed: Speed | None = None  # of its device, as those times tell it: for planning other models without it


def read_plan(file: str | os.PathLike[str]) -> PinnedPlan:
    """What `varuna plan --out` wrote, with a plan that can be run."""
    path = Path(file)
    try:
        pinned = decode(path.read_bytes(), PinnedPlan, str(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no plan {path} (`varuna plan --out` makes one, or save_deployment of pyrannc)"
        ) from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder (a plan is a file that `varuna plan --out` wrote)") from None
    check_plan(pinned.plan, str(path))
    if len(pinned.forecast.stages) != pinned.plan.depth:
        raise PlanError(
            f"{path} has {pinned.plan.depth} stages and a forecast of {len(pinned.forecast.stages)} "
            "(plan anew)"
        )
    return pinned


def write_plan(file: Path, pinned: PinnedPlan) -> None:
    write_atomic(file, encode(pinned))


def check_plan(plan: Plan, source: str) -> None:
    """A plan that somebody has edited may say anything; what it says must be one."""

    def refuse(key: str, expected: str, found: object) -> None:
        raise PlanError(f"{source}: `plan.{key}` must {expected}, not {found} (mend it, or plan anew)")

    if not plan.stages:
        refuse("stages", "hold at least one stage", "none")
    if plan.batch_size < 1:
        refuse("batch_size", "be 1 or more", plan.batch_size)
    if plan.microbatch_size < 1:
        refuse("microbatch_size", "be 1 or more", plan.microbatch_size)
    first = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != first or stage.stop <= stage.first:
            refuse(
                f"stages[{index}]",
                f"begin with segment {first} and hold one at least",
                f"{stage.first} to {stage.stop - 1}",
            )
        if not stage.ranks:
            refuse(f"stages[{index}].ranks", "hold one at least", stage.ranks)
        first = stage.stop
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    if ranks != list(range(len(ranks))):
        wrong = next(rank for place, rank in enumerate(ranks) if rank != place)
        refuse("stages", f"name each of the ranks 0 to {len(ranks) - 1} once", f"rank {wrong} as they do")
