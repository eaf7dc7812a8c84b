"""Which layout a model gets: as forced, as a file has it, or the fastest that fits; and how that is kept.

A deployment is a plan, in the form in which `varuna plan` writes it.
"""

import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from pyrannc.configuration import Configuration
from pyrannc.layouts import Layouts, best_unequal, map_of, spans_for
from varuna.capture import Captured, Source
from varuna.errors import PlanError
from varuna.estimating import estimate_captured
from varuna.plan.costs import assumed_link
from varuna.plan.estimate import Speed
from varuna.plan.forecast import forecast_plan
from varuna.plan.search import cut_layout
from varuna.plan_file import PinnedPlan, StageContents, read_plan, write_plan
from varuna.planned import cluster_of
from varuna.profiling import device_memory_bytes
from varuna.types import OptimizerCost, Plan, Profile, Proposal, ScheduleName, StageMap, spread_evenly
from varuna.units import duration
from varuna.wrapping import plan_stages

log = logging.getLogger("pyrannc.plan")

SCHEDULE: ScheduleName = "gpipe"
"""All forwards, then all backwards: in between, the script makes its loss of the outputs."""
# What devices of a kind reach, about: enough to weigh computing against sending.
SPEEDS = {"cpu": (3e10, 8e9, 4e-6), "cuda": (4e13, 1e12, 6e-6)}  # flops, bytes, seconds per operation
LINKS = {"cpu": (6e-5, 2e9), "cuda": (1e-5, 2e10)}  # latency, bytes per second, within a machine
FAR = (5e-5, 3e9)  # between machines


class Subject(NamedTuple):
    """What is to be laid out, and on what."""

    source: Source
    captured: Captured
    batch_size: int
    sample_bytes: int
    machines: Sequence[str]  # of each rank
    device: torch.device

    @property
    def world(self) -> int:
        return len(self.machines)


def choose(subject: Subject, configuration: Configuration) -> PinnedPlan:
    """A PlanError says what does not fit, and the way out."""
    pinned = _choose(subject, configuration)
    return msgspec.structs.replace(pinned, contents=_contents(subject, pinned.plan))


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


def _choose(subject: Subject, configuration: Configuration) -> PinnedPlan:
    layouts = _layouts(subject, configuration)
    if layouts.forced:
        return _with_forecast(_forced(subject, configuration, layouts.maps[0]), subject, configuration)
    profile = estimated_profile(subject, configuration)
    cluster = cluster_of(subject.machines, profile.device_memory_bytes)
    found: list[Proposal] = []
    refused: list[str] = []
    for stage_map in layouts.maps:
        depth = len(stage_map)
        for size in sorted(set(_microbatch_sizes(subject, configuration, len(stage_map[0]))), reverse=True):
            try:
                proposal = cut_layout(
                    profile,
                    cluster,
                    stage_map,
                    batch_size=subject.batch_size,
                    microbatch_size=size,
                    schedule=SCHEDULE,
                    recompute=configuration.checkpointing,
                    headroom=configuration.mem_margin,
                )
            except PlanError as error:
                refused.append(f"{depth} stages, micro-batches of {size}: {error}")
                continue
            log.info("%d stages, micro-batches of %d: %s", depth, size, duration(proposal.forecast.seconds))
            found.append(proposal)
    if not any(_is_plain(proposal.plan) for proposal in found):
        unequal = best_unequal(
            profile,
            cluster,
            subject.captured,
            configuration,
            depths=layouts.uneven_depths,
            batch_size=subject.batch_size,
            schedule=SCHEDULE,
            than=min((proposal.forecast.seconds for proposal in found), default=math.inf),
        )
        found += [] if unequal is None else [unequal]
    if not found and configuration.partition_num:  # what is forced is run, whatever it will cost
        stage_map = map_of(spread_evenly(subject.world, parts=configuration.partition_num))
        return _with_forecast(_forced(subject, configuration, stage_map), subject, configuration)
    if not found:
        raise PlanError(
            f"no layout of {subject.world} ranks fits; the one that needs least: {refused[-1]} "
            "(use more ranks or devices with more memory, a smaller batch, or mem_limit_gb and mem_margin as "
            "they are)"
        )
    ranked = sorted(found, key=lambda proposal: (proposal.forecast.seconds, proposal.plan.depth))
    best = ranked[0]
    others = {proposal.plan.depth: proposal for proposal in reversed(ranked[1:])}
    return PinnedPlan(
        best.plan,
        best.forecast,
        best.idle,
        best.reason,
        runners_up=tuple(others.values()),
        refused=tuple(refused),
        cluster=cluster,
    )


def _is_plain(plan: Plan) -> bool:
    """One stage that keeps all: no other layout does less."""
    return plan.depth == 1 and not plan.stages[0].recompute


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


def _forced(subject: Subject, configuration: Configuration, stage_map: StageMap) -> Plan:
    widths = [len(ranks) for ranks in stage_map]
    return Plan(
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


def _with_forecast(plan: Plan, subject: Subject, configuration: Configuration) -> PinnedPlan:
    """What is forced is run, whatever it will cost."""
    sizes = {-(-plan.microbatch_size * plan.width // width) for width in plan.widths}
    profile = estimated_profile(subject, configuration, sizes=sorted(sizes))
    cluster = cluster_of(subject.machines, profile.device_memory_bytes)
    forecast, _ = forecast_plan(profile, cluster, plan)
    return PinnedPlan(plan, forecast, (), "as forced", cluster=cluster)


def estimated_profile(
    subject: Subject, configuration: Configuration, sizes: Sequence[int] | None = None
) -> Profile:
    kind = subject.device.type
    flops, moved, each = SPEEDS.get(kind, SPEEDS["cuda"])
    memory = device_memory_bytes(subject.device)
    if kind == "cpu":
        memory //= max(subject.machines.count(machine) for machine in subject.machines)
    if configuration.mem_limit_gb:
        memory = min(memory, int(configuration.mem_limit_gb * (1 << 30)))
    if sizes is None:
        widths = _layouts(subject, configuration).widths
        sizes = [size for width in widths for size in _microbatch_sizes(subject, configuration, width)]
    # The last micro-batch may be smaller than the others.
    every = sorted({part for size in sizes for part in range(1, size + 1)}) if max(sizes) <= 64 else sizes
    return estimate_captured(
        subject.source,
        subject.captured,
        every,
        sample_bytes=subject.sample_bytes,
        speed=Speed(
            flops_per_second=flops,
            bytes_per_second=moved,
            seconds_per_operation=each,
            memory_bytes=max(1, memory),
        ),
        within=assumed_link(*LINKS.get(kind, LINKS["cuda"])),
        between=assumed_link(*FAR),
        optimizer=OptimizerCost("by opt_param_factor", 1e-4, 2e-11, 4.0 * configuration.opt_param_factor),
    )


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
