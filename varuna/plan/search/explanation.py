"""Explanation of why layouts do not fit, or are slower than the best, and the nearest layout that fits."""

from contextlib import suppress
from statistics import fmean
from typing import NamedTuple

import msgspec

from varuna.errors import PlanError
from varuna.plan.cost.forecast import plan_of
from varuna.plan.cut.place import ClusterMap, Placement
from varuna.plan.search.queue import EQUAL, LayoutSearch
from varuna.plan.search.request import PREFERENCE, check_depths
from varuna.plan.search.space import LayoutSpace, Node
from varuna.schedule import splits
from varuna.types import Cluster, Forecast
from varuna.units import count, duration, memory

PARTS = {
    "compute_seconds": "computing",
    "waiting_seconds": "waiting for other stages",
    "reduce_seconds": "the all-reduce",
    "optimizer_seconds": "the optimizer",
}
"""Parts of a step that a forecast has for each stage."""


class StageNeed(NamedTuple):
    """Memory that a stage needs, and that its device has."""

    depth: int
    stage: int
    num_bytes: float
    device_bytes: int

    @property
    def missing(self) -> float:
        return self.num_bytes - self.device_bytes

    def __str__(self) -> str:
        return (
            f"{count(self.depth, 'stage')}: stage {self.stage} needs at least {memory(self.num_bytes)}, but "
            f"a device has {memory(self.device_bytes)}: {memory(self.missing)} too little"
        )


def least_need(space: LayoutSpace, depth: int) -> StageNeed:
    """Return the memory need of the layout of a depth that needs least."""
    width = max(1, space.most_replicas(depth)) if space.request.shard_optimizer else 1
    return need_of_placement(space, space.cluster_map.place(depth, width, "stages together"))


def need_of_placement(space: LayoutSpace, placement: Placement) -> StageNeed:
    """Return the need of the stage that lacks most memory, with the cut that needs least."""
    request = space.request
    schedule = "1f1b" if "1f1b" in request.schedules else request.schedules[0]
    node = Node(placement.depth, request.microbatch_sizes[0], splits(schedule), placement.width)
    placed, needs = space.place(node, placement), space.memory_totals(node)
    cutter = space.cutter(placed, needs, schedule, request.modes[-1])
    need, stage = cutter.least_need()
    return StageNeed(placement.depth, stage, need, cutter.memory_bytes[stage])


def why_nothing_fits(space: LayoutSpace) -> str:
    request = space.request
    possible = [depth for depth in request.depths if depth <= space.num_devices]
    if not possible:
        return (
            f"no layout fits: at least {count(min(request.depths), 'stage')} were requested, each needs a "
            f"device, and there are {space.num_devices} (use fewer stages, or add devices)"
        )
    needs = [least_need(space, depth) for depth in possible]
    need = min(needs, key=lambda need: need.num_bytes / need.device_bytes)
    recompute = "" if request.modes[-1] == "everywhere" else "no "
    # The layout that needs least memory may fit although it was not requested.
    short = f", {memory(need.missing)} too little" if need.missing > 0 else "; but it was not requested"
    return (
        f"no layout fits: the layout that needs least memory has {count(need.depth, 'stage')}, micro-batches "
        f"of {request.microbatch_sizes[0]} and {recompute}recompute; its stage {need.stage} needs "
        f"{memory(need.num_bytes)} and the device has {memory(need.device_bytes)}{short} "
        f"({_solution(space, need)})"
    )


def _solution(space: LayoutSpace, need: StageNeed) -> str:
    """Return the nearest layout that fits: with fewer requirements, or with more devices."""
    costs, request = space.costs, space.request
    everything = request._replace(
        depths=check_depths(costs, None),
        microbatch_sizes=costs.microbatch_sizes(),
        schedules=PREFERENCE,
        modes=("where needed", "everywhere"),
    )
    if everything != request:
        search = LayoutSearch(LayoutSpace(costs, space.cluster_map, everything))
        with suppress(PlanError):
            search.run()
            if search.found:
                plan = plan_of(search.ranked()[0].candidate, costs.profile)
                recompute = " with recompute" if any(stage.recompute for stage in plan.stages) else ""
                return (
                    f"it fits with {count(plan.depth, 'stage')}, micro-batches of {plan.microbatch_size}, "
                    f"{plan.schedule}{recompute}"
                )
    machine = max(space.cluster_map.cluster.machines, key=lambda machine: machine.memory_bytes)
    for depth in range(space.num_devices + 1, costs.num_segments + 1):
        larger = ClusterMap(Cluster((msgspec.structs.replace(machine, devices=depth),)))
        if least_need(LayoutSpace(costs, larger, everything), depth).missing <= 0:
            more = count(depth - space.num_devices, "more device")
            return f"with {more}, {count(depth, 'stage')} would fit"
    shard = "" if request.shard_optimizer else ", shard the optimizer state over the replicas"
    return f"use devices with {memory(need.num_bytes)}{shard}, or cut the model into more segments"


def why_slower(forecast: Forecast, best: Forecast) -> str:
    """Name the part of the step on which a layout loses most against the best one."""
    slower = forecast.seconds / best.seconds - 1
    if slower <= EQUAL:
        return "as fast, with more devices or more memory"

    def mean(of: Forecast, part: str) -> float:
        return fmean(getattr(stage, part) for stage in of.stages)

    part = max(PARTS, key=lambda part: mean(forecast, part) - mean(best, part))
    return (
        f"{slower:.1%} slower: {duration(mean(forecast, part))} a step for {PARTS[part]}, "
        f"not {duration(mean(best, part))}"
    )
