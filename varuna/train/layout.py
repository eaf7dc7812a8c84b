"""What a worker makes of what the planner has told it: a plan, a profile, and what is to be expected."""

import logging
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from varuna.codec import decode
from varuna.environment import variable_name
from varuna.errors import PlanError
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.search import HEADROOM, cut_layout
from varuna.types import (
    Cluster,
    Forecast,
    Machine,
    Plan,
    PrecisionName,
    Profile,
    Proposal,
    ScheduleName,
    StageMap,
    Timeline,
    format_stage_map,
)

log = logging.getLogger("varuna")

Anything = TypeVar("Anything")


class Subject(NamedTuple):
    """What is wrapped, as far as a plan or a profile may be another's."""

    fingerprint: str
    precision: PrecisionName
    device: str  # as a profile names it
    stage_map: StageMap
    machines: Sequence[str]  # of each rank, in the order of ranks
    shard_optimizer: bool


class Asked(NamedTuple):
    """What the script gives; None: it leaves that open."""

    batch_size: int
    microbatch_size: int
    schedule: ScheduleName | None
    recompute: bool | Sequence[bool] | None
    spans: Sequence[tuple[int, int]] | None


class Settled(NamedTuple):
    schedule: ScheduleName
    recompute: bool | Sequence[bool]
    spans: Sequence[tuple[int, int]] | None  # None: by the estimate of each segment's work


class Outlook(NamedTuple):
    """What to expect of a step."""

    forecast: Forecast
    timeline: Callable[[], Timeline] | None  # of the first replica; None where no profile is at hand


# ---------------------------------------------------------------- a plan


def plan_told(text: str | None, subject: Subject) -> Proposal | None:
    """The plan that the launcher has handed to all workers, where it has; refused where it is another's."""
    if text is None:
        return None
    proposal = decode(text, Proposal, variable_name("plan"))
    plan = proposal.plan
    if plan.fingerprint not in ("", subject.fingerprint):
        raise PlanError(
            f"the plan is for the model {plan.fingerprint}, but this one is {subject.fingerprint} "
            "(profile this model again and plan from that, or start without --plan and --profile-folder)"
        )
    if plan.precision != subject.precision:
        raise PlanError(
            f"the plan is for {plan.precision}, but the model is wrapped in {subject.precision} "
            f"(profile it in {subject.precision}, or wrap it with precision={plan.precision!r})"
        )
    if tuple(stage.ranks for stage in plan.stages) != subject.stage_map:
        raise PlanError(
            f"the plan places ranks as {format_stage_map(stage.ranks for stage in plan.stages)!r}, but the "
            f"model is wrapped with the map {format_stage_map(subject.stage_map)!r} (pass the launcher's own "
            f"map, {variable_name('stage_to_rank_map')}, or start without --plan and --profile-folder)"
        )
    return proposal


def settle(asked: Asked, planned: Plan | None) -> Settled:
    """What the script gives wins; what it leaves open is the plan's, where there is one."""
    if planned is None:
        recompute = False if asked.recompute is None else asked.recompute
        return Settled(asked.schedule or "varuna", recompute, asked.spans)
    flags, spans = asked.recompute, asked.spans
    if isinstance(flags, bool):
        flags = (flags,) * planned.depth
    return Settled(
        _prefer("schedule", asked.schedule, planned.schedule),
        _prefer("recompute", flags and tuple(flags), tuple(s.recompute for s in planned.stages)),
        _prefer(
            "spans",
            spans and tuple((first, stop) for first, stop in spans),
            tuple((s.first, s.stop) for s in planned.stages),
        ),
    )


def _prefer(what: str, given: Anything | None, planned: Anything) -> Anything:
    if given is None:
        return planned
    if given != planned:
        log.info("%s is the script's, %s, not the plan's, %s", what, given, planned)
    return given


# ---------------------------------------------------------------- a profile


def profile_at_hand(
    folder: str | os.PathLike[str] | None, subject: Subject, *, needed: bool
) -> Profile | None:
    """The profile of this very model on this kind of device. Where a plan is there too, it may be missing."""
    if not folder:
        return None
    try:
        profile = read_profile(folder)
    except OSError:
        if needed:
            raise
        log.info("the profile %s cannot be read here; the plan's own forecast is used", folder)
        return None
    for what, measured, here, way_out in (
        ("model", profile.fingerprint, subject.fingerprint, "profile this model"),
        ("precision", profile.precision, subject.precision, "profile it in that precision"),
        ("device", _kind(profile.device), _kind(subject.device), "profile on that device"),
    ):
        if measured != here:
            raise PlanError(
                f"the profile {os.fspath(folder)} is of another {what}: {measured}, but here it is {here} "
                f"({way_out}, or leave the profile out)"
            )
    if profile.device != subject.device:
        log.warning("the profile was measured on %s, this is %s", profile.device, subject.device)
    return profile


def _kind(device: str) -> str:
    """All processors are one kind: how fast each is, the report of the first steps tells."""
    return "cpu" if device.startswith("cpu") else device


def cluster_of(machines: Sequence[str], memory_bytes: int) -> Cluster:
    """Of ranks that are neighbours on one machine."""
    runs = [len(list(run)) for _, run in groupby(machines)]
    return Cluster(tuple(Machine(f"machine{i}", devices, memory_bytes) for i, devices in enumerate(runs)))


def cut_by_time(profile: Profile, subject: Subject, asked: Asked) -> Plan | None:
    """Stages cut for the shortest step, as measured, in a device's memory; None where the script cuts."""
    if asked.spans is not None:
        return None
    given = asked.recompute
    flags = set() if given is None else {given} if isinstance(given, bool) else set(given)
    return cut_layout(
        profile,
        cluster_of(subject.machines, profile.device_memory_bytes),
        subject.stage_map,
        batch_size=asked.batch_size,
        microbatch_size=asked.microbatch_size,
        schedule=asked.schedule or "varuna",
        recompute=flags.pop() if len(flags) == 1 else None,
        shard_optimizer=subject.shard_optimizer,
        headroom=HEADROOM,
    ).plan


# ---------------------------------------------------------------- what to expect


def look_ahead(
    plan: Plan, profile: Profile | None, told: Proposal | None, subject: Subject
) -> Outlook | None:
    """By the profile, for what is really run; else the plan's own forecast, where it is run as it stands."""
    if profile is not None:
        try:
            forecast, simulation = forecast_plan(
                profile,
                cluster_of(subject.machines, profile.device_memory_bytes),
                plan,
                shard_optimizer=subject.shard_optimizer,
            )
        except PlanError as error:  # a size that is not in the profile, say: no reason not to train
            log.info("no forecast: %s", error)
            return None
        firsts = {stage.ranks[0] for stage in plan.stages}

        def timeline() -> Timeline:
            whole = simulation.timeline([stage.ranks for stage in plan.stages])
            return Timeline(tuple(i for i in whole.intervals if i.rank in firsts))

        return Outlook(forecast, timeline)
    if told is not None and msgspec.structs.replace(told.plan, fingerprint=plan.fingerprint) == plan:
        return Outlook(told.forecast, None)
    return None
