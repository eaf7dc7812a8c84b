"""Which layout a job gets on the machines that there are: as typed, as pinned, or as the planner has it.

`choose` reads nothing but its arguments, so that it can be asked again whenever the machines change.
"""

import re

import msgspec

from varuna.errors import PlanError
from varuna.plan.search.auto_config import equal_machines
from varuna.plan.search.search import HEADROOM, Ranking, cut_layout, search
from varuna.types import Cluster, Layout, Plan, Profile, Proposal, StageMap
from varuna.units import count, duration

FEW_DEVICES = 64
"""On up to so many a runner-up is looked for, where none came near enough to be met on the way."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a layout, whatever machines there are. None: to be chosen."""

    batch_size: int | None = None
    num_stages: int | None = None
    microbatch_size: int | None = None
    profile: Profile | None = None
    pinned: Proposal | None = None


class Choice(msgspec.Struct, frozen=True):
    """A layout; where a profile or a pinned plan tells more, the whole plan too, and why it is taken."""

    layout: Layout
    proposal: Proposal | None = None
    reasons: tuple[str, ...] = ()


def choose(wanted: Wanted, *, num_machines: int, devices_per_machine: int) -> Choice:
    """A ValueError (a PlanError, where it is the planner's) says what does not fit, and the way out."""
    if wanted.pinned is not None:
        return _as_pinned(wanted, wanted.pinned, num_machines, devices_per_machine)
    if wanted.profile is None or (wanted.num_stages and wanted.microbatch_size):
        layout = lay_out_as_typed(
            wanted.num_stages,
            batch_size=wanted.batch_size,
            microbatch_size=wanted.microbatch_size,
            num_machines=num_machines,
            devices_per_machine=devices_per_machine,
        )
        return Choice(layout) if wanted.profile is None else _cut(layout, wanted.profile, devices_per_machine)
    return _as_planned(wanted, wanted.profile, num_machines, devices_per_machine)


# ---------------------------------------------------------------- as the planner has it


def _as_planned(wanted: Wanted, profile: Profile, num_machines: int, devices_per_machine: int) -> Choice:
    if wanted.batch_size is None:
        raise ValueError("--batch_size is missing: the samples per step of the whole job")
    cluster = _cluster(profile, num_machines * devices_per_machine, devices_per_machine)
    ranking = search(
        profile,
        cluster,
        batch_size=wanted.batch_size,
        depths=None if wanted.num_stages is None else [wanted.num_stages],
        microbatch_sizes=None if wanted.microbatch_size is None else [wanted.microbatch_size],
        headroom=HEADROOM,
        every_depth=cluster.num_devices <= FEW_DEVICES,
    )
    layout = _layout(ranking.best, num_machines, devices_per_machine)
    return Choice(layout, ranking.best, _reasons(ranking, profile.notes))


def _cut(layout: Layout, profile: Profile, devices_per_machine: int) -> Choice:
    """Where depth and micro-batch are typed, the profile still tells where to cut, and what to recompute."""
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
    return Choice(layout, proposal, (f"planned: {_in_words(proposal)}",))


def _cluster(profile: Profile, num_devices: int, devices_per_machine: int) -> Cluster:
    if num_devices < 1:
        raise ValueError(f"devices must be 1 or more, not {num_devices}")
    return equal_machines(num_devices, devices_per_machine, memory_bytes=profile.device_memory_bytes)


def _layout(proposal: Proposal, num_machines: int, devices_per_machine: int) -> Layout:
    """Idle are the devices that the plan names; the last ones, where it was made for other machines."""
    plan = proposal.plan
    num_devices, num_ranks = num_machines * devices_per_machine, len(plan.ranks)
    named = [re.fullmatch(r"vm(\d+):(\d+)", name) for name in proposal.idle]  # as `equal_machines` names them
    places = [(int(found[1]), int(found[2])) for found in named if found is not None]
    idle = tuple(machine * devices_per_machine + device for machine, device in places)
    fits = all(machine < num_machines and device < devices_per_machine for machine, device in places)
    if not fits or num_ranks + len(idle) != num_devices:
        idle = tuple(range(num_ranks, num_devices))
    return Layout(_stage_map(plan), plan.batch_size, plan.microbatch_size, idle)


def _stage_map(plan: Plan) -> StageMap:
    return tuple(stage.ranks for stage in plan.stages)


def _reasons(ranking: Ranking, notes: tuple[str, ...]) -> tuple[str, ...]:
    best, *others = ranking.proposals
    return (
        f"planned: {_in_words(best)}",
        *(f"the runner-up: {_in_words(other)}" for other in others[:1]),
        *(f"refused: {what}" for what in ranking.refused[:1]),
        *(f"estimated: {what}" for what in best.forecast.estimates if what not in notes),
    )


def _in_words(proposal: Proposal) -> str:
    plan = proposal.plan
    cuts = ", ".join(str(stage.stop) for stage in plan.stages[:-1])
    recompute = [str(index) for index, stage in enumerate(plan.stages) if stage.recompute]
    return (
        f"{Layout(_stage_map(plan), plan.batch_size, plan.microbatch_size)}, schedule {plan.schedule}, "
        + (f"cut before segments {cuts}, " if cuts else "")
        + (f"recompute in {len(recompute)} of {plan.depth} stages, " if recompute else "no recompute, ")
        + f"{duration(proposal.forecast.seconds)} a step ({proposal.reason})"
    )


# ---------------------------------------------------------------- as pinned


def _as_pinned(wanted: Wanted, pinned: Proposal, num_machines: int, devices_per_machine: int) -> Choice:
    plan, num_devices = pinned.plan, num_machines * devices_per_machine
    for option, typed, has in (
        ("--batch_size", wanted.batch_size, plan.batch_size),
        ("--nstages", wanted.num_stages, plan.depth),
        ("--chunk_size", wanted.microbatch_size, plan.microbatch_size),
    ):
        if typed is not None and typed != has:
            raise PlanError(
                f"the plan has {option} {has}, but {typed} was typed (leave it out, or plan anew)"
            )
    num_ranks = len(plan.ranks)
    if num_ranks > num_devices:
        raise PlanError(
            f"the plan needs {count(num_ranks, 'device')}, there are {num_devices} "
            f"(plan anew for {num_devices}, or add machines)"
        )
    if plan.batch_size < max(plan.widths):
        raise PlanError(
            f"the plan's batch of {plan.batch_size} leaves some of its {max(plan.widths)} replicas idle"
        )
    profile = wanted.profile
    if profile is not None and plan.fingerprint not in ("", profile.fingerprint):
        raise PlanError(
            f"the plan is for the model {plan.fingerprint}, the profile is of {profile.fingerprint} "
            "(give the profile that the plan was made from, or plan anew)"
        )
    layout = _layout(pinned, num_machines, devices_per_machine)
    bare = Proposal(plan, pinned.forecast, pinned.idle, pinned.reason)  # the file may tell more
    return Choice(layout, bare, (f"pinned: {_in_words(bare)}",))


def lay_out(
    num_devices: int, num_stages: int, *, batch_size: int, microbatch_size: int, num_replicas: int = 0
) -> Layout:
    """Rank r gets stage r mod P of replica r div P, so that a replica's stages are neighbours.

    Without `num_replicas`, as many as the devices allow.
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
            f"replicas of each stage must be 1 or more (or 0: all there is room for), not {num_replicas}"
        )
    width = num_replicas or num_devices // num_stages
    if not width or width * num_stages > num_devices:
        wanted = f"{count(num_stages, 'stage')} x {count(max(width, 1), 'replica')}"
        raise ValueError(
            f"too few devices: {wanted} need {max(width, 1) * num_stages}, there are {num_devices} "
            "(try fewer stages or replicas, or more devices)"
        )
    if batch_size < width:
        raise ValueError(
            f"a batch of {batch_size} leaves some of the {width} replicas without a sample "
            f"(try a batch of at least {width}, or no more than {batch_size} devices for each stage)"
        )
    stage_map = tuple(tuple(range(stage, width * num_stages, num_stages)) for stage in range(num_stages))
    return Layout(stage_map, batch_size, microbatch_size, tuple(range(width * num_stages, num_devices)))


def lay_out_as_typed(
    num_stages: int | None,
    *,
    batch_size: int | None,
    microbatch_size: int | None,
    num_machines: int,
    devices_per_machine: int,
    num_replicas: int = 0,
) -> Layout:
    if batch_size is None:
        raise ValueError("--batch_size is missing: the samples per step of the whole job")
    if num_stages is None or microbatch_size is None:
        missing = [
            name
            for name, value in [("--nstages", num_stages), ("--chunk_size", microbatch_size)]
            if value is None
        ]
        raise ValueError(
            f"{' and '.join(missing)} missing (give them; or a profile to choose them from, "
            "`varuna.run_varuna --profile_folder DIR`, which varuna.Profiler makes)"
        )
    for name, number in [("machines", num_machines), ("devices on each machine", devices_per_machine)]:
        if number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
    return lay_out(
        num_machines * devices_per_machine,
        num_stages,
        batch_size=batch_size,
        microbatch_size=microbatch_size,
        num_replicas=num_replicas,
    )
