"""Choose the layout of a job for the machines that are available: as typed, as pinned, or as planned.

`choose` depends only on its arguments, so it can be called again whenever the machines change.
"""

import re

import msgspec

from varuna.errors import PlanError
from varuna.plan.cluster_file import equal_machines
from varuna.plan.search.search import HEADROOM, cut_layout, search
from varuna.plan.search.space import FEW_DEVICES
from varuna.types import Cluster, Layout, Plan, Profile, Proposal, StageMap
from varuna.units import count, duration


class LayoutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements for a layout, independent of the machines. None: to be chosen."""

    batch_size: int | None = None
    num_stages: int | None = None
    microbatch_size: int | None = None
    profile: Profile | None = None
    pinned: Proposal | None = None


class Choice(msgspec.Struct, frozen=True):
    """A layout. With a profile or a pinned plan, also the whole plan and the reasons for it."""

    layout: Layout
    proposal: Proposal | None = None
    reasons: tuple[str, ...] = ()


def choose(request: LayoutRequest, *, num_machines: int, devices_per_machine: int) -> Choice:
    """Return the layout of a job; raise ValueError or PlanError if the request cannot be met."""
    if request.pinned is not None:
        return _as_pinned(request, request.pinned, num_machines, devices_per_machine)
    if request.profile is None or (request.num_stages and request.microbatch_size):
        layout = lay_out_as_typed(request, num_machines * devices_per_machine)
        if request.profile is None:
            return Choice(layout)
        return _cut(layout, request.profile, devices_per_machine)
    return _as_planned(request, request.profile, num_machines, devices_per_machine)


def _as_planned(
    request: LayoutRequest, profile: Profile, num_machines: int, devices_per_machine: int
) -> Choice:
    cluster = _cluster(profile, num_machines * devices_per_machine, devices_per_machine)
    ranking = search(
        profile,
        cluster,
        batch_size=_checked_batch_size(request.batch_size),
        depths=None if request.num_stages is None else [request.num_stages],
        microbatch_sizes=None if request.microbatch_size is None else [request.microbatch_size],
        headroom=HEADROOM,
        every_depth=cluster.num_devices <= FEW_DEVICES,
    )
    best, *others = ranking.proposals
    reasons = (
        f"planned: {_describe(best)}",
        *(f"the runner-up: {_describe(other)}" for other in others[:1]),
        *(f"refused: {reason}" for reason in ranking.refused[:1]),
        *(f"estimated: {note}" for note in best.forecast.estimates if note not in profile.notes),
    )
    return Choice(_layout(best, num_machines, devices_per_machine), best, reasons)


def _cut(layout: Layout, profile: Profile, devices_per_machine: int) -> Choice:
    """Keep the typed depth and micro-batch; choose cuts and recompute flags from the profile."""
    proposal = cut_layout(
        profile,
        _cluster(profile, layout.num_ranks, devices_per_machine),
        layout.stage_map,
        batch_size=layout.batch_size,
        microbatch_size=layout.microbatch_size,
        schedule="varuna",
        headroom=HEADROOM,
    )
    proposal = msgspec.structs.replace(proposal, reason="stages and micro-batch as typed, cut by the profile")
    return Choice(layout, proposal, (f"planned: {_describe(proposal)}",))


def _cluster(profile: Profile, num_devices: int, devices_per_machine: int) -> Cluster:
    if num_devices < 1:
        raise ValueError(f"devices must be 1 or more, not {num_devices}")
    return equal_machines(num_devices, devices_per_machine, memory_bytes=profile.device_memory_bytes)


def _layout(proposal: Proposal, num_machines: int, devices_per_machine: int) -> Layout:
    """Return the layout with the plan's idle devices; with the last ones, if it is for other machines."""
    plan = proposal.plan
    num_devices, num_ranks = num_machines * devices_per_machine, len(plan.ranks)
    named = [re.fullmatch(r"vm(\d+):(\d+)", name) for name in proposal.idle]  # names from `equal_machines`
    places = [(int(found[1]), int(found[2])) for found in named if found is not None]
    idle = tuple(machine * devices_per_machine + device for machine, device in places)
    fits = all(machine < num_machines and device < devices_per_machine for machine, device in places)
    if not fits or num_ranks + len(idle) != num_devices:
        idle = tuple(range(num_ranks, num_devices))
    return Layout(_stage_map(plan), plan.batch_size, plan.microbatch_size, idle)


def _stage_map(plan: Plan) -> StageMap:
    return tuple(stage.ranks for stage in plan.stages)


def _describe(proposal: Proposal) -> str:
    plan = proposal.plan
    cuts = ", ".join(str(stage.stop) for stage in plan.stages[:-1])
    num_recomputing = sum(stage.recompute for stage in plan.stages)
    where = f"recompute in {num_recomputing} of {plan.depth} stages" if num_recomputing else "no recompute"
    return (
        f"{Layout(_stage_map(plan), plan.batch_size, plan.microbatch_size)}, schedule {plan.schedule}, "
        + (f"cut before segments {cuts}, " if cuts else "")
        + f"{where}, {duration(proposal.forecast.seconds)} a step ({proposal.reason})"
    )


def _as_pinned(
    request: LayoutRequest, pinned: Proposal, num_machines: int, devices_per_machine: int
) -> Choice:
    plan, num_devices = pinned.plan, num_machines * devices_per_machine
    for option, typed, planned in (
        ("--batch-size", request.batch_size, plan.batch_size),
        ("--nstages", request.num_stages, plan.depth),
        ("--chunk-size", request.microbatch_size, plan.microbatch_size),
    ):
        if typed is not None and typed != planned:
            raise PlanError(
                f"the plan has {option} {planned}, but {typed} was typed (leave it out, or make a new plan)"
            )
    num_ranks = len(plan.ranks)
    if num_ranks > num_devices:
        raise PlanError(
            f"the plan needs {count(num_ranks, 'device')}, there are {num_devices} "
            f"(make a new plan for {num_devices}, or add machines)"
        )
    if plan.batch_size < max(plan.widths):
        raise PlanError(
            f"the plan's batch of {plan.batch_size} leaves some of its {max(plan.widths)} replicas idle"
        )
    profile = request.profile
    if profile is not None and plan.fingerprint not in ("", profile.fingerprint):
        raise PlanError(
            f"the plan is for the model {plan.fingerprint}, the profile is of {profile.fingerprint} "
            "(give the profile from which the plan was made, or make a new plan)"
        )
    layout = _layout(pinned, num_machines, devices_per_machine)
    proposal = Proposal(plan, pinned.forecast, pinned.idle, pinned.reason)  # a plan file has more fields
    return Choice(layout, proposal, (f"pinned: {_describe(proposal)}",))


def lay_out(
    num_devices: int, num_stages: int, *, batch_size: int, microbatch_size: int, num_replicas: int = 0
) -> Layout:
    """Return a layout in which rank r runs stage r mod P of replica r div P, for P stages.

    So the stages of a replica are on adjacent ranks. `num_replicas=0`: as many as the devices allow.
    """
    for name, number in [
        ("devices", num_devices),
        ("stages", num_stages),
        ("the batch size", batch_size),
        ("the micro-batch size", microbatch_size),
    ]:
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
    if num_replicas < 0:
        raise ValueError(
            f"replicas of each stage must be 1 or more (0: as many as the devices allow), not {num_replicas}"
        )
    width = num_replicas or num_devices // num_stages
    if not width or width * num_stages > num_devices:
        wanted = f"{count(num_stages, 'stage')} x {count(max(width, 1), 'replica')}"
        raise ValueError(
            f"too few devices: {wanted} need {max(width, 1) * num_stages}, there are {num_devices} "
            "(use fewer stages or replicas, or more devices)"
        )
    if batch_size < width:
        raise ValueError(
            f"a batch of {batch_size} leaves some of the {width} replicas without a sample "
            f"(use a batch of at least {width}, or at most {batch_size} devices for each stage)"
        )
    stage_map = tuple(tuple(range(stage, width * num_stages, num_stages)) for stage in range(num_stages))
    return Layout(stage_map, batch_size, microbatch_size, tuple(range(width * num_stages, num_devices)))


def lay_out_as_typed(request: LayoutRequest, num_devices: int, *, num_replicas: int = 0) -> Layout:
    """Return the layout that the command line describes; raise ValueError if an option is missing."""
    batch_size = _checked_batch_size(request.batch_size)
    num_stages, microbatch_size = request.num_stages, request.microbatch_size
    if num_stages is None or microbatch_size is None:
        typed = {"--nstages": num_stages, "--chunk-size": microbatch_size}
        missing = [name for name, value in typed.items() if value is None]
        raise ValueError(
            f"{' and '.join(missing)} missing (give them, or a profile made by varuna.Profiler from which to "
            "choose them: `varuna run --profile-folder DIR`)"
        )
    return lay_out(
        num_devices,
        num_stages,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        num_replicas=num_replicas,
    )


def _checked_batch_size(batch_size: int | None) -> int:
    if batch_size is None:
        raise ValueError("--batch-size is missing: the samples per step of the whole job")
    return batch_size
