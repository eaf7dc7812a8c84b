"""Plan files: one JSON file with a plan, its forecast, and the layouts that were slower. Imports no torch."""

import os
from pathlib import Path

import msgspec

from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.files import write_atomic
from varuna.plan.cost.estimate import Speed
from varuna.types import Cluster, Plan, Proposal


class AssumedNetwork(msgspec.Struct, frozen=True):
    """Bandwidth and latency between machines that were given in place of measured ones."""

    bytes_per_second: float
    latency_seconds: float


class StageContents(msgspec.Struct, frozen=True):
    num_operations: int
    num_parameters: int  # elements


class PinnedPlan(Proposal, frozen=True):
    """A proposal and its origin. To run it, only `plan` is needed."""

    runners_up: tuple[Proposal, ...] = ()
    refused: tuple[str, ...] = ()
    cluster: Cluster | None = None
    network: AssumedNetwork | None = None  # None: as measured
    shard_optimizer: bool = False
    contents: tuple[StageContents, ...] = ()  # by stage, if known
    plain: Proposal | None = None  # one stage with a replica on every rank, even if it does not fit
    basis: str = ""  # source of its times
    speed: Speed | None = None  # of the device, derived from these times: to plan other models without it


def read_plan(file: str | os.PathLike[str]) -> PinnedPlan:
    """Read and check a plan that `varuna plan --out` wrote."""
    path = Path(file)
    try:
        pinned = decode(path.read_bytes(), PinnedPlan, str(path))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"there is no plan {path} (`varuna plan --out` writes one, as does save_deployment of pyrannc)"
        ) from None
    except IsADirectoryError:
        raise ValueError(f"{path} is a folder (a plan is a file that `varuna plan --out` wrote)") from None
    check_plan(pinned.plan, str(path))
    if len(pinned.forecast.stages) != pinned.plan.depth:
        raise PlanError(
            f"{path} has {pinned.plan.depth} stages and a forecast of {len(pinned.forecast.stages)} "
            "(make a new plan)"
        )
    return pinned


def write_plan(file: Path, pinned: PinnedPlan) -> None:
    write_atomic(file, encode(pinned))


def check_plan(plan: Plan, source: str) -> None:
    """Raise PlanError if an edited plan is not valid; `source` names it in the message."""

    def refuse(key: str, expected: str, found: object) -> None:
        raise PlanError(
            f"{source}: `plan.{key}` must {expected}, not {found} (correct it, or make a new plan)"
        )

    if not plan.stages:
        refuse("stages", "have at least one stage", "none")
    for key in ("batch_size", "microbatch_size"):
        if getattr(plan, key) < 1:
            refuse(key, "be 1 or more", getattr(plan, key))
    first = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != first or stage.stop <= stage.first:
            refuse(
                f"stages[{index}]",
                f"start with segment {first} and have at least one segment",
                f"{stage.first} to {stage.stop - 1}",
            )
        if not stage.ranks:
            refuse(f"stages[{index}].ranks", "have at least one rank", stage.ranks)
        first = stage.stop
    ranks = sorted(rank for stage in plan.stages for rank in stage.ranks)
    if ranks != list(range(len(ranks))):
        wrong = next(rank for place, rank in enumerate(ranks) if rank != place)
        refuse("stages", f"name each of the ranks 0 to {len(ranks) - 1} once", f"rank {wrong} as they do")
