"""Every layout of a small case, enumerated without the search: what its results are compared with."""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil

import msgspec

from tests.plan.profiles import GB, MB, machines, profile, segment
from varuna.errors import PlanError
from varuna.plan.cost.costs import CostTable
from varuna.plan.cost.uneven import forecast_uneven
from varuna.plan.cut.partition import all_cuts
from varuna.plan.cut.place import ClusterMap
from varuna.types import Cluster, CutCost, Dim, Forecast, Plan, Profile, ScheduleName, StagePlan


def random_case(
    seed: int, *, most_segments: int = 8, most_devices: int = 6
) -> tuple[Profile, Cluster, int, list[int]]:
    """Return a profile, a cluster, a batch size and two numbers of micro-batches."""
    draw = random.Random(seed)
    segments = draw.randint(1, most_segments)
    kinds = [
        segment(
            draw.uniform(1e-4, 1e-2),
            sizes=(1, 2, 4, 8, 16),
            fixed=draw.choice([0.0, 1e-3]),
            parameter_bytes=draw.randint(1, 64) * MB,
            activation_bytes=draw.randint(1, 32) * MB,
        )
        for _ in range(segments)
    ]
    cuts = tuple(
        CutCost(Dim(draw.randint(1, 64) << 14, 0), Dim(draw.randint(1, 64) << 14, 0)) for _ in kinds[1:]
    )
    devices = draw.randint(1, most_devices)
    memory = draw.choice([80 * GB, draw.randint(300, 1500) * MB])
    cluster = machines(1, devices, memory_bytes=memory)
    if devices % 2 == 0 and draw.random() < 0.5:
        cluster = machines(2, devices // 2, memory_bytes=memory)
    batch = draw.randint(1, 16)
    return profile(kinds, range(segments), cuts=cuts), cluster, batch, draw.sample([1, 2, 3, 4, 8], 2)


def all_widths(devices: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All numbers of replicas of `depth` stages that need at most so many devices."""
    return (widths for widths in product(range(1, devices + 1), repeat=depth) if sum(widths) <= devices)


def every_uneven_plan(
    costs: CostTable,
    cluster_map: ClusterMap,
    batch_size: int,
    microbatch_counts: Sequence[int],
    schedule: ScheduleName = "1f1b",
) -> Iterator[tuple[Plan, Forecast]]:
    """All plans with unequal replicas on the last devices that fit, recomputing only where they must."""
    number, made = cluster_map.num_devices, costs.profile
    for depth in range(2, min(costs.num_segments, number) + 1):
        unequal = [widths for widths in all_widths(number, depth) if len(set(widths)) > 1]
        for spans, widths, count in product(all_cuts(costs.num_segments, depth), unequal, microbatch_counts):
            ranks = iter(range(sum(widths)))
            stages = tuple(
                StagePlan(*span, tuple(next(ranks) for _ in range(width)))
                for span, width in zip(spans, widths, strict=True)
            )
            size = ceil(ceil(batch_size / min(widths)) / count)
            plan = Plan(stages, batch_size, size, schedule, made.precision, made.fingerprint)
            try:
                found = _fitting(costs, cluster_map, plan)
            except PlanError:  # a micro-batch larger than any that was measured
                continue
            if found is not None:
                yield found


def _fitting(costs: CostTable, cluster_map: ClusterMap, plan: Plan) -> tuple[Plan, Forecast] | None:
    devices = range(cluster_map.num_devices - len(plan.ranks), cluster_map.num_devices)
    limits = [
        min(
            cluster_map.cluster.machines[cluster_map.machine_of[devices[rank]]].memory_bytes
            for rank in stage.ranks
        )
        for stage in plan.stages
    ]
    for _ in range(2):
        forecast, _ = forecast_uneven(costs, cluster_map, plan, devices)
        short = [stage.memory.total > limit for stage, limit in zip(forecast.stages, limits, strict=True)]
        if not any(short):
            return plan, forecast
        stages = tuple(
            msgspec.structs.replace(stage, recompute=flag)
            for stage, flag in zip(plan.stages, short, strict=True)
        )
        plan = msgspec.structs.replace(plan, stages=stages)
    return None
