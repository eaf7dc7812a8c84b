"""Which layout a model gets: as forced, as a file has it, or the fastest that fits; and how that is kept.

A deployment is a plan, in the form in which `varuna plan` writes it.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from pyrannc.configuration import Configuration
from pyrannc.layouts import Layouts, best_unequal, map_of, separable_cuts, spans_for
from pyrannc.profile import MeasureRequest
from varuna.capture import Captured, Source
from varuna.codec import encode
from varuna.errors import PlanError
from varuna.execute.device.facts import device_memory_bytes
from varuna.files import write_atomic
from varuna.measure.draft import ProfileSubject
from varuna.plan.cost.calibrate import calibrate, extended
from varuna.plan.cost.costs import assumed_link
from varuna.plan.cost.estimate import Speed
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.plan_file import PinnedPlan, StageContents, read_plan, write_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.messages import why_slower
from varuna.plan.search.search import cut_layout
from varuna.profile.description import describe
from varuna.profile.estimate import estimate_described
from varuna.train.cache import read_costs, write_costs
from varuna.train.layout import cluster_of
from varuna.train.validate import plan_stages
from varuna.types import (
    Cluster,
    OptimizerCost,
    Plan,
    Profile,
    Proposal,
    ScheduleName,
    StageMap,
    StagePlan,
    spread_evenly,
)
from varuna.units import duration

log = logging.getLogger("pyrannc.plan")

SCHEDULE: ScheduleName = "gpipe"
"""All forwards, then all backwards: in between, the script makes its loss of the outputs."""
# What devices of a kind reach, about: enough to weigh computing against sending.
SPEEDS = {"cpu": (3e10, 8e9, 4e-6), "cuda": (4e13, 1e12, 6e-6)}  # flops, bytes, seconds per operation
LINKS = {"cpu": (6e-5, 2e9), "cuda": (1e-5, 2e10)}  # latency, bytes per second, within a machine
FAR = (5e-5, 3e9)  # between machines
UPDATES = {"cpu": 1e-9, "cuda": 2e-11}  # seconds of an optimizer for each weight
SURE = 1.05
"""Times are known to about so much: what is simpler, and takes no longer than that, is taken."""
EASY = 0.5
"""A share of the memory that is enough, though nothing was measured yet."""


@dataclass(frozen=True)
class Subject:
    """What is to be laid out, and on what."""

    source: Source
    captured: Captured
    batch_size: int
    sample_bytes: int
    machines: Sequence[str]  # of each rank
    device: torch.device
    memory_bytes: int | None = None  # of a device that is not there
    speed: Speed | None = None  # of such a device

    @property
    def world(self) -> int:
        return len(self.machines)

    @cached_property
    def described(self) -> ProfileSubject:
        return describe(
            self.source,
            self.captured,
            sample_bytes=self.sample_bytes,
            device=self.device if self.memory_bytes is None else torch.device("cpu"),
            devices_per_machine=self.neighbours,
        )

    @property
    def neighbours(self) -> int:
        """The ranks of the machine that has most."""
        return max(self.machines.count(machine) for machine in self.machines)


class Costs(NamedTuple):
    """What a plan is made from."""

    profile: Profile
    cluster: Cluster
    basis: str
    speed: Speed


def choose(subject: Subject, configuration: Configuration, measured: Profile | None = None) -> PinnedPlan:
    """By what was measured, or else by estimates. A PlanError says what does not fit, and the way out."""
    layouts = _layouts(subject, configuration)
    costs = look_up(subject, configuration, measured)
    if layouts.forced and configuration.pipeline_num:
        pinned = _as_forced(subject, configuration, layouts.maps[0], costs)
    else:
        pinned = _fastest(subject, configuration, layouts, costs)
    return msgspec.structs.replace(
        pinned,
        contents=_contents(subject, pinned.plan),
        plain=_data_parallel(subject, costs),
        cluster=costs.cluster,
        basis=costs.basis,
        speed=costs.speed,
    )


def _contents(subject: Subject, plan: Plan) -> tuple[StageContents, ...]:
    segments, source = subject.captured.graph.segments, subject.source
    found = []
    for stage in plan.stages:
        own = segments[stage.first : stage.stop]
        names = {name for segment in own for name in segment.parameters}
        found.append(
            StageContents(
                sum(segment.num_operations for segment in own),
                sum(math.prod(source.shape(name)) for name in names),
            )
        )
    return tuple(found)


def _data_parallel(subject: Subject, costs: Costs) -> Proposal:
    """One stage with a replica on every rank, whether it fits or not."""
    plan = Plan(
        stages=(StagePlan(0, subject.captured.num_segments, tuple(range(subject.world))),),
        batch_size=subject.batch_size,
        microbatch_size=-(-subject.batch_size // subject.world),
        schedule=SCHEDULE,
        precision=subject.source.precision,
        fingerprint=subject.captured.graph.fingerprint,
    )
    forecast, _ = forecast_plan(costs.profile, costs.cluster, plan)
    return Proposal(plan, forecast, (), "plain data parallel")


def _fastest(subject: Subject, configuration: Configuration, layouts: Layouts, costs: Costs) -> PinnedPlan:
    found: list[Proposal] = []
    refused: list[str] = []
    for stage_map in layouts.maps:
        depth, widths = len(stage_map), {len(ranks) for ranks in stage_map}
        for size in sorted(set(_microbatch_sizes(subject, configuration, min(widths))), reverse=True):
            try:
                proposal = cut_layout(
                    costs.profile,
                    costs.cluster,
                    stage_map,
                    batch_size=subject.batch_size,
                    microbatch_size=size,
                    schedule=SCHEDULE,
                    recompute=configuration.checkpointing,
                    headroom=configuration.mem_margin,
                    cuts=separable_cuts(subject.captured) if len(widths) > 1 else None,
                    suggest=False,
                )
            except PlanError as error:
                refused.append(f"micro-batches of {size}, {error}")
                continue
            log.info("%d stages, micro-batches of %d: %s", depth, size, duration(proposal.forecast.seconds))
            found.append(proposal)
    if configuration.dp_search_all or not any(_is_plain(proposal.plan, configuration) for proposal in found):
        unequal = best_unequal(
            costs.profile,
            costs.cluster,
            subject.captured,
            configuration,
            depths=layouts.uneven_depths,
            batch_size=subject.batch_size,
            schedule=SCHEDULE,
            than=min((proposal.forecast.seconds for proposal in found), default=math.inf),
        )
        found += [] if unequal is None else [unequal]
    if not found and (layouts.forced or configuration.partition_num):  # is run, whatever it will cost
        even = spread_evenly(subject.world, parts=max(1, configuration.partition_num))
        stage_map = layouts.maps[0] if layouts.forced else map_of(even)
        return _as_forced(subject, configuration, stage_map, costs)
    if not found:
        raise PlanError(
            f"no layout of {subject.world} ranks fits; the one that needs least: {refused[-1]} "
            "(use more ranks or devices with more memory, a smaller batch, or mem_limit_gb and mem_margin as "
            "they are)"
        )
    best = _best(found, configuration)
    others: dict[int, Proposal] = {}
    for proposal in sorted(found, key=lambda proposal: proposal.forecast.seconds):
        if proposal.plan != best.plan:
            faster = proposal.forecast.seconds <= best.forecast.seconds
            why = "as fast, and less simple" if faster else why_slower(proposal.forecast, best.forecast)
            others.setdefault(proposal.plan.depth, msgspec.structs.replace(proposal, reason=why))
    return PinnedPlan(
        best.plan,
        best.forecast,
        best.idle,
        best.reason,
        runners_up=tuple(others.values()),
        refused=tuple(refused),
    )


def _best(found: Sequence[Proposal], configuration: Configuration) -> Proposal:
    """One stage where the model fits without recompute, or else whatever takes least time.

    Of those that are about as fast, the simplest.
    """

    def simplest(proposals: Sequence[Proposal]) -> Proposal:
        shortest = min(proposal.forecast.seconds for proposal in proposals)
        near = [proposal for proposal in proposals if proposal.forecast.seconds <= SURE * shortest]
        return min(near, key=lambda proposal: (proposal.plan.depth, -proposal.plan.microbatch_size))

    fastest = simplest(found)
    whole = [proposal for proposal in found if _is_plain(proposal.plan, configuration)]
    if configuration.dp_search_all or not whole or fastest in whole:
        return fastest
    chosen = simplest(whole)
    log.info(
        "the model fits, so it has one stage; %d stages would take %s, not %s (dp_search_all takes them)",
        fastest.plan.depth,
        duration(fastest.forecast.seconds),
        duration(chosen.forecast.seconds),
    )
    return msgspec.structs.replace(chosen, reason="the model fits: one stage")


def _is_plain(plan: Plan, configuration: Configuration) -> bool:
    """One stage that keeps all, unless it is to recompute: no other layout does less."""
    return plan.depth == 1 and (bool(configuration.checkpointing) or not plan.stages[0].recompute)


def _layouts(subject: Subject, configuration: Configuration) -> Layouts:
    return Layouts(subject.world, subject.captured.num_segments, configuration)


def _microbatch_sizes(subject: Subject, configuration: Configuration, width: int) -> Iterator[int]:
    share = -(-subject.batch_size // width)
    if configuration.pipeline_num:
        yield max(1, -(-share // configuration.pipeline_num))
        return
    count = configuration.min_pipeline
    while count <= min(configuration.max_pipeline, share):
        size = -(-share // count)
        if count == configuration.min_pipeline or size >= configuration.min_pipeline_bs:
            yield size
        count *= 2
    if configuration.min_pipeline > share:
        yield 1


def _every_size(subject: Subject, configuration: Configuration) -> list[int]:
    """Of micro-batches, in any layout."""
    widths = _layouts(subject, configuration).widths
    sizes = {size for width in widths for size in _microbatch_sizes(subject, configuration, width)}
    return sorted(sizes | {-(-subject.batch_size // subject.world)})


def _as_forced(
    subject: Subject, configuration: Configuration, stage_map: StageMap, costs: Costs
) -> PinnedPlan:
    """What is forced is run, whatever it will cost."""
    widths = [len(ranks) for ranks in stage_map]
    plan = Plan(
        stages=plan_stages(
            stage_map,
            subject.captured,
            spans_for(widths, subject.captured) if len(set(widths)) > 1 else None,
            bool(configuration.checkpointing),
            from_cache=False,
        ),
        batch_size=subject.batch_size,
        microbatch_size=next(_microbatch_sizes(subject, configuration, min(widths))),
        schedule=SCHEDULE,
        precision=subject.source.precision,
        fingerprint=subject.captured.graph.fingerprint,
    )
    forecast, _ = forecast_plan(costs.profile, costs.cluster, plan)
    return PinnedPlan(plan, forecast, (), "as forced")


# ---------------------------------------------------------------- what things cost


def look_up(subject: Subject, configuration: Configuration, measured: Profile | None) -> Costs:
    """What was measured, made ready for every layout that may be asked for; or an estimate of all of it."""
    segments = subject.captured.graph.segments
    memory = _memory(subject, configuration)
    cluster = cluster_of(subject.machines, memory)
    sizes = _every_size(subject, configuration)
    # The last micro-batch may be smaller than the others.
    every = range(1, sizes[-1] + 1) if sizes[-1] <= 64 else [1, *sizes]
    state = 4.0 * configuration.opt_param_factor
    if measured is not None:
        speed = calibrate(measured, segments)
        profile = msgspec.structs.replace(
            extended(measured, segments, speed, {every[0], *sizes}),
            device_memory_bytes=memory,
            optimizer=msgspec.structs.replace(measured.optimizer, state_bytes_per_element=state),
        )
        return Costs(profile, cluster, f"measured on {measured.device}", speed)
    kind = subject.device.type
    speed = subject.speed or assumed_speed(kind, memory)
    update = UPDATES.get(kind, UPDATES["cuda"])
    profile = estimate_described(
        subject.described,
        segments,
        every,
        speed=msgspec.structs.replace(speed, memory_bytes=memory),
        within=assumed_link(*LINKS.get(kind, LINKS["cuda"])),
        between=assumed_link(*FAR),
        optimizer=OptimizerCost("by opt_param_factor", 1e-4, update, state),
    )
    by = f"by the speed of {speed.measured_on}" if speed.measured_on else "by what such devices reach"
    return Costs(profile, cluster, f"estimated from the model's shapes, {by}", speed)


def assumed_speed(kind: str, memory: int) -> Speed:
    flops, moved, each = SPEEDS.get(kind, SPEEDS["cuda"])
    return Speed(
        flops_per_second=flops, bytes_per_second=moved, seconds_per_operation=each, memory_bytes=memory
    )


def _memory(subject: Subject, configuration: Configuration) -> int:
    memory = subject.memory_bytes
    if memory is None:
        memory = device_memory_bytes(subject.device)
        if subject.device.type == "cpu":
            memory //= subject.neighbours
    if configuration.mem_limit_gb:
        memory = min(memory, int(configuration.mem_limit_gb * (1 << 30)))
    return max(1, memory)


class Wanted(NamedTuple):
    """What is known of a model's costs before its layout is chosen; else, what is to be measured of them."""

    known: Profile | None = None
    wish: MeasureRequest | None = None
    circumstances: str = ""  # under which what is measured is remembered


def what_is_wanted(subject: Subject, configuration: Configuration, optimizer: type) -> Wanted:
    wish = what_to_measure(subject, configuration)
    circumstances = str((wish, subject.described.device, subject.machines, optimizer))
    known = known_costs(subject, configuration, circumstances)
    return Wanted(known, None if known is not None else wish, circumstances)


def known_costs(subject: Subject, configuration: Configuration, circumstances: str) -> Profile | None:
    """What an earlier run has measured: from the file that was named, or as it is remembered."""
    if configuration.load_graph_profile:
        file = configuration.graph_profile_file
        profile = read_profile(file)
        for what, theirs, ours in (
            ("model", profile.fingerprint[:16], subject.captured.graph.fingerprint[:16]),
            ("precision", profile.precision, subject.source.precision),
        ):
            if theirs != ours:
                raise PlanError(
                    f"the graph_profile_file {file} is of another {what}: {theirs}, here it is {ours} "
                    "(measure this one: leave load_graph_profile out)"
                )
        return profile
    if not configuration.measure or not circumstances:
        return None
    return read_costs(subject.captured.graph.fingerprint, circumstances)


def keep_costs(measured: Profile, configuration: Configuration, circumstances: str) -> None:
    write_costs(measured, circumstances)
    if configuration.save_graph_profile:
        write_atomic(Path(configuration.graph_profile_file), encode(measured))


def what_to_measure(subject: Subject, configuration: Configuration) -> MeasureRequest | None:
    """None where nothing is to be decided by times, or they are not to be measured."""
    layouts = _layouts(subject, configuration)
    if not configuration.measure or (layouts.forced and configuration.pipeline_num):
        return None
    depths = {*map(len, layouts.maps), *layouts.uneven_depths}
    if depths == {1} and _fits_easily(subject, configuration):
        return None
    sizes = [max(2, size) for size in _every_size(subject, configuration)]
    kind = subject.device.type
    return MeasureRequest(
        microbatch_sizes=tuple(sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]})),
        seconds=configuration.measure_seconds,
        iterations=configuration.profiling_iter,
        speed=assumed_speed(kind, 1),
        within=LINKS.get(kind, LINKS["cuda"]),
        between=FAR,
    )


def _fits_easily(subject: Subject, configuration: Configuration) -> bool:
    costs = look_up(subject, configuration, None)
    (stage,) = _data_parallel(subject, costs).forecast.stages
    return stage.memory.total <= EASY * costs.profile.device_memory_bytes


# ---------------------------------------------------------------- kept in a file


def save(file: str | os.PathLike[str], pinned: PinnedPlan) -> None:
    write_plan(Path(file), pinned)


def load(file: str | os.PathLike[str], subject: Subject) -> PinnedPlan:
    """Refused where it is another model's, or made for another number of ranks."""
    pinned = read_plan(file)
    plan = pinned.plan
    if plan.fingerprint != subject.captured.graph.fingerprint:
        raise PlanError(
            f"the deployment {os.fspath(file)} is of another model: its fingerprint is "
            f"{plan.fingerprint[:16]}, this one's is {subject.captured.graph.fingerprint[:16]} "
            "(deploy this model anew, and save that)"
        )
    if len(plan.ranks) != subject.world:
        raise PlanError(
            f"the deployment {os.fspath(file)} is for {len(plan.ranks)} ranks, but there are {subject.world} "
            "(start as many, or deploy anew)"
        )
    if plan.precision != subject.source.precision:
        raise PlanError(
            f"the deployment {os.fspath(file)} runs in {plan.precision}, the model in "
            f"{subject.source.precision} (wrap it in the same precision, or deploy anew)"
        )
    return pinned
