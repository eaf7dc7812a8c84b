"""What the planner says of layouts that do not fit, and of those that lost."""

from typing import NamedTuple

from varuna.types import Forecast, Plan
from varuna.units import count, duration, memory

EQUAL = 1e-9
"""Steps whose times differ by less than this share take equally long."""


class Need(NamedTuple):
    """The memory of a stage."""

    stage: int
    num_bytes: float
    device_bytes: int  # what its device has

    @property
    def missing(self) -> float:
        return self.num_bytes - self.device_bytes


def shortage(depth: int, need: Need) -> str:
    return (
        f"{count(depth, 'stage')}: stage {need.stage} needs {memory(need.num_bytes)} at least, a device has "
        f"{memory(need.device_bytes)}: {memory(need.missing)} too little"
    )


def too_few_devices(depth: int, num_devices: int) -> str:
    return (
        f"no layout fits: {count(depth, 'stage')} asked for at least, each needs a "
        f"device, and there are {num_devices} (try fewer stages, or add devices)"
    )


def nothing_fits(depth: int, need: Need, *, microbatch_size: int, recompute: bool, way_out: str) -> str:
    # Where the layout that needs least is none of those asked for, it may fit.
    short = (
        f", {memory(need.missing)} too little" if need.missing > 0 else "; but that is not what was asked for"
    )
    return (
        f"no layout fits: with {count(depth, 'stage')}, micro-batches of {microbatch_size} and "
        f"{'with' if recompute else 'without'} recompute, which needs least, stage {need.stage} takes "
        f"{memory(need.num_bytes)} and its device has {memory(need.device_bytes)}{short} ({way_out})"
    )


def fits_otherwise(plan: Plan) -> str:
    recompute = " with recompute" if any(stage.recompute for stage in plan.stages) else ""
    return (
        f"it fits with {count(plan.depth, 'stage')}, micro-batches of {plan.microbatch_size}, "
        f"{plan.schedule}{recompute}"
    )


def fits_with_more(depth: int, num_devices: int) -> str:
    return f"with {count(depth - num_devices, 'device')} more, {count(depth, 'stage')} would fit"


def needs_larger_devices(need: Need, *, spreads_already: bool) -> str:
    ways = f"take devices with {memory(need.num_bytes)}"
    if not spreads_already:
        ways += ", or spread the optimizer's state over replicas"
    return ways + ", or cut the model finer"


def why_slower(forecast: Forecast, best: Forecast) -> str:
    """Where the time goes that the best one does not need."""

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
