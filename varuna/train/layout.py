"""The layout of a wrapped model: from the script, a plan or a profile; and its predicted step time."""

import logging
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

import msgspec

from varuna.codec import decode
from varuna.environment import variable_name
from varuna.errors import PlanError
from varuna.execute.device.facts import device_name
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.profile_file import read_profile
from varuna.plan.search.search import HEADROOM, cut_layout
from varuna.train.programs import CapturedModel
from varuna.train.validate import WrapOptions
from varuna.types import (
    Cluster,
    Forecast,
    Machine,
    Plan,
    Profile,
    Proposal,
    ScheduleName,
    Timeline,
    format_stage_map,
)

log = logging.getLogger("varuna")

Setting = TypeVar("Setting")


class Prediction(NamedTuple):
    """The predicted step."""

    forecast: Forecast
    timeline: Callable[[], Timeline] | None  # of the first replica; None without a profile


def parse_plan(text: str | None, sampled: CapturedModel, options: WrapOptions) -> Proposal | None:
    """Parse the launcher's plan, if there is one. Refuses a plan for another model or map."""
    if text is None:
        return None
    proposal = decode(text, Proposal, variable_name("plan"))
    plan, fingerprint = proposal.plan, sampled.captured.graph.fingerprint
    if plan.fingerprint not in ("", fingerprint):
        raise PlanError(
            f"the plan is for the model {plan.fingerprint}, but this one is {fingerprint} "
            "(profile and plan this model again, or start without --plan and --profile-folder)"
        )
    if plan.precision != options.precision:
        raise PlanError(
            f"the plan is for {plan.precision}, but the model is wrapped in {options.precision} "
            f"(profile it in {options.precision}, or wrap it with precision={plan.precision!r})"
        )
    if tuple(stage.ranks for stage in plan.stages) != options.stage_map:
        raise PlanError(
            f"the plan places ranks as {format_stage_map(stage.ranks for stage in plan.stages)!r}, but the "
            f"model is wrapped with the map {format_stage_map(options.stage_map)!r} (pass the launcher's own "
            f"map, {variable_name('stage_to_rank_map')}, or start without --plan and --profile-folder)"
        )
    return proposal


def choose_layout(
    request: WrapOptions, planned: Plan | None
) -> tuple[ScheduleName, bool | Sequence[bool], Sequence[tuple[int, int]] | None]:
    """Return schedule, recompute and spans of the script, or else of the plan. No spans: equal work."""
    if planned is None:
        recompute = False if request.recompute is None else request.recompute
        return request.schedule or "varuna", recompute, request.spans
    flags, spans = request.recompute, request.spans
    if isinstance(flags, bool):
        flags = (flags,) * planned.depth
    return (
        _prefer("schedule", request.schedule, planned.schedule),
        _prefer("recompute", flags and tuple(flags), tuple(s.recompute for s in planned.stages)),
        _prefer(
            "spans",
            spans and tuple((first, stop) for first, stop in spans),
            tuple((s.first, s.stop) for s in planned.stages),
        ),
    )


def _prefer(name: str, given: Setting | None, planned: Setting) -> Setting:
    if given is None:
        return planned
    if given != planned:
        log.info("using %s=%s of the script instead of %s of the plan", name, given, planned)
    return given


def find_profile(
    folder: str | os.PathLike[str] | None, sampled: CapturedModel, options: WrapOptions, *, required: bool
) -> Profile | None:
    """Read the profile and check that it fits this model and device. It may be missing unless `required`."""
    if not folder:
        return None
    try:
        profile = read_profile(folder)
    except OSError:
        if required:
            raise
        log.info("the profile %s cannot be read here; using the prediction of the plan", folder)
        return None
    device = device_name(options.device)
    for what, measured, here, advice in (
        ("model", profile.fingerprint, sampled.captured.graph.fingerprint, "profile this model"),
        ("precision", profile.precision, options.precision, "profile it in that precision"),
        ("device", _kind(profile.device), _kind(device), "profile on that device"),
    ):
        if measured != here:
            raise PlanError(
                f"the profile {os.fspath(folder)} is for another {what}: {measured}, but here it is {here} "
                f"({advice}, or start without the profile)"
            )
    if profile.device != device:
        log.warning("the profile was measured on %s, this is %s", profile.device, device)
    return profile


def _kind(device: str) -> str:
    """Return the device, or "cpu" for all CPUs: the step report shows differences in speed."""
    return "cpu" if device.startswith("cpu") else device


def cluster_of(machines: Sequence[str], memory_bytes: int) -> Cluster:
    """Describe the machines: consecutive ranks on one machine are its devices."""
    runs = [len(list(run)) for _, run in groupby(machines)]
    return Cluster(tuple(Machine(f"machine{i}", devices, memory_bytes) for i, devices in enumerate(runs)))


def plan_stages_by_time(profile: Profile, sampled: CapturedModel, options: WrapOptions) -> Plan | None:
    """Choose the stages with the shortest predicted step that fit in memory; None if spans are given."""
    if options.spans is not None:
        return None
    given = options.recompute
    flags = set() if given is None else {given} if isinstance(given, bool) else set(given)
    return cut_layout(
        profile,
        cluster_of(sampled.machines, profile.device_memory_bytes),
        options.stage_map,
        batch_size=options.batch_size,
        microbatch_size=options.microbatch_size,
        schedule=options.schedule or "varuna",
        recompute=flags.pop() if len(flags) == 1 else None,
        shard_optimizer=options.shard_optimizer,
        headroom=HEADROOM,
    ).plan


def predict(
    plan: Plan, profile: Profile | None, given: Proposal | None, sampled: CapturedModel, options: WrapOptions
) -> Prediction | None:
    """Predict the step from the profile; else use the prediction of the given plan, if it is unchanged."""
    if profile is not None:
        try:
            forecast, simulation = forecast_plan(
                profile,
                cluster_of(sampled.machines, profile.device_memory_bytes),
                plan,
                shard_optimizer=options.shard_optimizer,
            )
        except PlanError as error:  # such as a size that is not in the profile: training works without
            log.info("no prediction: %s", error)
            return None
        firsts = {stage.ranks[0] for stage in plan.stages}

        def timeline() -> Timeline:
            whole = simulation.timeline([stage.ranks for stage in plan.stages])
            return Timeline(tuple(i for i in whole.intervals if i.rank in firsts))

        return Prediction(forecast, timeline)
    if given is not None and msgspec.structs.replace(given.plan, fingerprint=plan.fingerprint) == plan:
        return Prediction(given.forecast, None)
    return None
