"""Costs that a layout is chosen by: measured now, measured earlier, or estimated from the shapes."""

from pathlib import Path
from typing import NamedTuple

import msgspec

from pyrannc.configuration import Configuration
from pyrannc.layouts import SCHEDULE, DeploymentTask, LayoutChoices, all_microbatch_sizes
from pyrannc.profile import MeasureRequest
from varuna.codec import encode
from varuna.errors import PlanError
from varuna.execute.device.facts import device_memory_bytes
from varuna.files import write_atomic
from varuna.plan.cost.calibrate import calibrate, extended
from varuna.plan.cost.costs import assumed_link
from varuna.plan.cost.estimate import Speed
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.profile_file import read_profile
from varuna.profile.estimate import estimate_described
from varuna.train.cache import read_costs, write_costs
from varuna.train.layout import cluster_of
from varuna.types import Cluster, OptimizerCost, Plan, Profile, Proposal, StagePlan

# Typical values of a device type, good enough to compare computing with sending.
SPEEDS = {
    "cpu": Speed(flops_per_second=3e10, bytes_per_second=8e9, seconds_per_operation=4e-6, memory_bytes=1),
    "cuda": Speed(flops_per_second=4e13, bytes_per_second=1e12, seconds_per_operation=6e-6, memory_bytes=1),
}
LINKS = {"cpu": (6e-5, 2e9), "cuda": (1e-5, 2e10)}  # latency, bytes per second, within a machine
FAR = (5e-5, 3e9)  # between machines
UPDATES = {"cpu": 1e-9, "cuda": 2e-11}  # seconds of an optimizer for each weight
EASY = 0.5
"""A model that needs at most this share of the memory fits, even by an estimate."""


class DeploymentCosts(NamedTuple):
    """Costs and devices that a layout is chosen by."""

    profile: Profile
    cluster: Cluster
    basis: str
    speed: Speed


def deployment_costs(
    task: DeploymentTask, configuration: Configuration, measured: Profile | None
) -> DeploymentCosts:
    """Extend a measured profile to the sizes of all layouts; without one, estimate everything."""
    segments = task.captured.graph.segments
    memory = _memory_bytes(task, configuration)
    cluster = cluster_of(task.machines, memory)
    sizes = all_microbatch_sizes(task, configuration)
    # The last micro-batch of a batch may be smaller than the others.
    every = range(1, sizes[-1] + 1) if sizes[-1] <= 64 else [1, *sizes]
    state_bytes = 4.0 * configuration.opt_param_factor
    if measured is not None:
        speed = calibrate(measured, segments)
        profile = msgspec.structs.replace(
            extended(measured, segments, speed, {every[0], *sizes}),
            device_memory_bytes=memory,
            optimizer=msgspec.structs.replace(measured.optimizer, state_bytes_per_element=state_bytes),
        )
        return DeploymentCosts(profile, cluster, f"measured on {measured.device}", speed)
    kind = task.device.type
    speed = task.speed or assumed_speed(kind, memory)
    update = UPDATES.get(kind, UPDATES["cuda"])
    profile = estimate_described(
        task.subject,
        segments,
        every,
        speed=msgspec.structs.replace(speed, memory_bytes=memory),
        within=assumed_link(*LINKS.get(kind, LINKS["cuda"])),
        between=assumed_link(*FAR),
        optimizer=OptimizerCost("by opt_param_factor", 1e-4, update, state_bytes),
    )
    source = f"the speed of {speed.measured_on}" if speed.measured_on else "typical speeds of such devices"
    return DeploymentCosts(profile, cluster, f"estimated from the model's shapes, with {source}", speed)


def assumed_speed(kind: str, memory: int) -> Speed:
    return msgspec.structs.replace(SPEEDS.get(kind, SPEEDS["cuda"]), memory_bytes=memory)


def _memory_bytes(task: DeploymentTask, configuration: Configuration) -> int:
    """Return the memory that one device may use."""
    memory = task.memory_bytes
    if memory is None:
        memory = device_memory_bytes(task.device)
        if task.device.type == "cpu":
            memory //= task.ranks_per_machine
    if configuration.mem_limit_gb:
        memory = min(memory, int(configuration.mem_limit_gb * (1 << 30)))
    return max(1, memory)


def data_parallel(task: DeploymentTask, costs: DeploymentCosts) -> Proposal:
    """Return plain data parallel: one stage with a replica on every rank, whether it fits or not."""
    plan = Plan(
        stages=(StagePlan(0, task.captured.num_segments, tuple(range(task.world))),),
        batch_size=task.batch_size,
        microbatch_size=-(-task.batch_size // task.world),
        schedule=SCHEDULE,
        precision=task.source.precision,
        fingerprint=task.captured.graph.fingerprint,
    )
    forecast, _ = forecast_plan(costs.profile, costs.cluster, plan)
    return Proposal(plan, forecast, (), "plain data parallel")


def read_known_costs(
    task: DeploymentTask, configuration: Configuration, circumstances: str
) -> Profile | None:
    """Return what an earlier run measured: from `graph_profile_file`, or from the cache."""
    if configuration.load_graph_profile:
        file = configuration.graph_profile_file
        profile = read_profile(file)
        for what, found, expected in (
            ("model", profile.fingerprint[:16], task.captured.graph.fingerprint[:16]),
            ("precision", profile.precision, task.source.precision),
        ):
            if found != expected:
                raise PlanError(
                    f"the graph_profile_file {file} is of another {what}: expected {expected}, found {found} "
                    "(measure this model: leave out load_graph_profile)"
                )
        return profile
    if not configuration.measure or not circumstances:
        return None
    return read_costs(task.captured.graph.fingerprint, circumstances)


def keep_costs(measured: Profile, configuration: Configuration, circumstances: str) -> None:
    write_costs(measured, circumstances)
    if configuration.save_graph_profile:
        write_atomic(Path(configuration.graph_profile_file), encode(measured))


def measure_request(task: DeploymentTask, configuration: Configuration) -> MeasureRequest | None:
    """Return what to measure; None if times decide nothing, or `measure` is off."""
    layouts = LayoutChoices(task.world, task.captured.num_segments, configuration)
    if not configuration.measure or (layouts.forced and configuration.pipeline_num):
        return None
    depths = {*map(len, layouts.maps), *layouts.uneven_depths}
    if depths == {1}:
        costs = deployment_costs(task, configuration, None)
        (stage,) = data_parallel(task, costs).forecast.stages
        if stage.memory.total <= EASY * costs.profile.device_memory_bytes:
            return None
    sizes = [max(2, size) for size in all_microbatch_sizes(task, configuration)]
    kind = task.device.type
    return MeasureRequest(
        microbatch_sizes=tuple(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})),
        seconds=configuration.measure_seconds,
        iterations=configuration.profiling_iter,
        speed=assumed_speed(kind, 1),
        within=LINKS.get(kind, LINKS["cuda"]),
        between=FAR,
    )
