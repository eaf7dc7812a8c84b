"""Explanation of why layouts do not fit, and the nearest layout that does."""

from contextlib import suppress

import msgspec

from varuna.errors import PlanError
from varuna.plan.cost.forecast import Draft, plan_of
from varuna.plan.cut.place import Ground, Placement
from varuna.plan.search.messages import (
    StageNeed,
    fits_otherwise,
    fits_with_more,
    needs_larger_devices,
    nothing_fits,
    too_few_devices,
)
from varuna.plan.search.queue import LayoutSearch
from varuna.plan.search.request import PREFERENCE, check_depths
from varuna.plan.search.space import LayoutSpace
from varuna.types import Cluster


def least_need(space: LayoutSpace, depth: int) -> StageNeed:
    """Return the memory need of the layout of a depth that needs least."""
    width = max(1, space.most_replicas(depth)) if space.request.shard_optimizer else 1
    return need_of_placement(space, space.ground.place(depth, width, "stages together"))


def need_of_placement(space: LayoutSpace, placement: Placement) -> StageNeed:
    """Return the need of the stage that lacks most memory, with the cut that needs least."""
    request = space.request
    draft = Draft(
        (),
        (),
        "1f1b" if "1f1b" in request.schedules else request.schedules[0],
        request.microbatch_sizes[0],
        request.batch_size,
        placement,
        request.shard_optimizer,
    )
    (cutter,) = space.cutters(draft, request.modes[-1:])
    need, stage = cutter.least_need()
    return StageNeed(stage, need, cutter.memory_bytes[stage])


def why_nothing_fits(space: LayoutSpace) -> str:
    request = space.request
    possible = [depth for depth in request.depths if depth <= space.num_devices]
    if not possible:
        return too_few_devices(min(request.depths), space.num_devices)
    needs = {depth: least_need(space, depth) for depth in possible}
    depth = min(possible, key=lambda depth: needs[depth].num_bytes / needs[depth].device_bytes)
    return nothing_fits(
        depth,
        needs[depth],
        microbatch_size=request.microbatch_sizes[0],
        recompute=request.modes[-1] == "everywhere",
        solution=_solution(space, needs[depth]),
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
        search = LayoutSearch(LayoutSpace(costs, space.ground, everything))
        with suppress(PlanError):
            search.run()
            if search.found:
                return fits_otherwise(plan_of(search.ranked()[0].draft, costs.profile))
    machine = max(space.ground.cluster.machines, key=lambda machine: machine.memory_bytes)
    for depth in range(space.num_devices + 1, costs.num_segments + 1):
        larger = Ground(Cluster((msgspec.structs.replace(machine, devices=depth),)))
        if least_need(LayoutSpace(costs, larger, everything), depth).missing <= 0:
            return fits_with_more(depth, space.num_devices)
    return needs_larger_devices(need, shards_optimizer=request.shard_optimizer)
