"""Texts about layouts that do not fit, and about layouts that are slower than the best."""

from typing import NamedTuple

from varuna.types import Forecast, Plan
from varuna.units import count, duration, memory

EQUAL = 1e-9
"""Steps whose times differ by less than this share count as equally long."""


class StageNeed(NamedTuple):
    """Memory that a stage needs, and that its device has."""

    stage: int
    num_bytes: float
    device_bytes: int

    @property
    def missing(self) -> float:
        return self.num_bytes - self.device_bytes


def shortage(depth: int, need: StageNeed) -> str:
    return (
        f"{count(depth, 'stage')}: stage {need.stage} needs at least {memory(need.num_bytes)}, but a device "
        f"has {memory(need.device_bytes)}: {memory(need.missing)} too little"
    )


def too_few_devices(depth: int, num_devices: int) -> str:
    return (
        f"no layout fits: at least {count(depth, 'stage')} were requested, each needs a device, and there "
        f"are {num_devices} (use fewer stages, or add devices)"
    )


def nothing_fits(depth: int, need: StageNeed, *, microbatch_size: int, recompute: bool, solution: str) -> str:
    # The layout that needs least memory may fit although it was not requested.
    short = f", {memory(need.missing)} too little" if need.missing > 0 else "; but it was not requested"
    return (
        f"no layout fits: the layout that needs least memory has {count(depth, 'stage')}, micro-batches of "
        f"{microbatch_size} and {'' if recompute else 'no '}recompute; its stage {need.stage} needs "
        f"{memory(need.num_bytes)} and the device has {memory(need.device_bytes)}{short} ({solution})"
    )


def fits_otherwise(plan: Plan) -> str:
    recompute = " with recompute" if any(stage.recompute for stage in plan.stages) else ""
    return (
        f"it fits with {count(plan.depth, 'stage')}, micro-batches of {plan.microbatch_size}, "
        f"{plan.schedule}{recompute}"
    )


def fits_with_more(depth: int, num_devices: int) -> str:
    return f"with {count(depth - num_devices, 'more device')}, {count(depth, 'stage')} would fit"


def needs_larger_devices(need: StageNeed, *, shards_optimizer: bool) -> str:
    shard = "" if shards_optimizer else ", shard the optimizer state over the replicas"
    return f"use devices with {memory(need.num_bytes)}{shard}, or cut the model into more segments"


def why_slower(forecast: Forecast, best: Forecast) -> str:
    """Name the part of the step on which a layout loses most against the best one."""

    def mean(of: Forecast, part: str) -> float:
        parts: list[float] = [getattr(stage, part) for stage in of.stages]
        return sum(parts) / len(parts)

    slower = forecast.seconds / best.seconds - 1
    if slower <= EQUAL:
        return "as fast, with more devices or more memory"
    parts = {
        "compute_seconds": "computing",
        "waiting_seconds": "waiting for other stages",
        "reduce_seconds": "the all-reduce",
        "optimizer_seconds": "the optimizer",
    }
    part = max(parts, key=lambda part: mean(forecast, part) - mean(best, part))
    return (
        f"{slower:.1%} slower: {duration(mean(forecast, part))} a step for {parts[part]}, "
        f"not {duration(mean(best, part))}"
    )
