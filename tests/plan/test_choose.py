"""The layout of a job: from given sizes, a profile or a plan file; refused if nothing fits."""

from math import ceil

import msgspec
import pytest

from tests.plan.profiles import GB, profile, segment
from varuna.errors import PlanError
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.plan.cluster_file import equal_machines
from varuna.plan.plan_file import PinnedPlan
from varuna.plan.search.choose import LayoutRequest, choose, lay_out, lay_out_as_typed
from varuna.plan.search.search import HEADROOM, search
from varuna.types import Layout, Profile, Proposal, format_stage_map

EIGHT = profile([segment(1e-3, fixed=1e-4)], [0] * 8)
TIGHT = profile([segment(1e-3, parameter_bytes=2 * GB)], [0] * 8, device_memory_bytes=20 * GB)


def pinned(found: Profile = EIGHT, devices: int = 4, **asked: object) -> Proposal:
    cluster = equal_machines(devices, 4, memory_bytes=found.device_memory_bytes)
    return search(found, cluster, batch_size=32, **asked).best  # type: ignore[arg-type]


# ---------------------------------------------------------------- chosen by the planner


def test_the_planner_chooses_sizes_that_are_not_given() -> None:
    """V27"""
    choice = choose(LayoutRequest(batch_size=32, profile=EIGHT), num_machines=1, devices_per_machine=4)
    best = pinned()
    assert choice.proposal == best
    assert choice.layout.stage_map == tuple(stage.ranks for stage in best.plan.stages)
    assert (choice.layout.batch_size, choice.layout.microbatch_size) == (32, best.plan.microbatch_size)
    assert choice.reasons[0].startswith("planned: ") and "the shortest step" in choice.reasons[0]
    assert choice.reasons[1].startswith("the runner-up: ") and "slower" in choice.reasons[1]


@pytest.mark.parametrize(("stages", "size"), [(2, None), (None, 1), (3, None)])
def test_given_sizes_restrict_the_planner(stages: int | None, size: int | None) -> None:
    """V27"""
    wanted = LayoutRequest(batch_size=32, profile=EIGHT, num_stages=stages, microbatch_size=size)
    layout = choose(wanted, num_machines=1, devices_per_machine=4).layout
    assert (stages or layout.depth, size or layout.microbatch_size) == (layout.depth, layout.microbatch_size)


def test_the_layout_depends_on_the_number_of_machines() -> None:
    """V27: every morph plans again for its machines."""
    wanted = LayoutRequest(batch_size=32, profile=TIGHT)
    many, few = (choose(wanted, num_machines=n, devices_per_machine=4).layout for n in (4, 1))
    assert (many.num_ranks + len(many.idle), few.num_ranks + len(few.idle)) == (16, 4)
    assert few.depth >= 2  # one device cannot hold the model
    with pytest.raises(PlanError, match=r"no layout fits.*GiB too little"):
        choose(wanted, num_machines=1, devices_per_machine=1)


def test_with_both_sizes_given_the_profile_decides_the_cuts() -> None:
    """V26, V27"""
    uneven = profile([segment(6e-3), segment(1e-3)], [0, *[1] * 6])
    wanted = LayoutRequest(batch_size=32, profile=uneven, num_stages=2, microbatch_size=2)
    choice = choose(wanted, num_machines=1, devices_per_machine=5)
    assert format_stage_map(choice.layout.stage_map) == "0,2;1,3;" and choice.layout.idle == (4,)
    assert choice.proposal is not None
    assert [(s.first, s.stop) for s in choice.proposal.plan.stages] == [(0, 1), (1, 7)]
    assert choice.proposal.plan.microbatch_size == 2 and choice.proposal.plan.schedule == "varuna"


def test_without_a_profile_both_sizes_are_required() -> None:
    with pytest.raises(ValueError, match=r"--chunk-size missing .*--profile-folder"):
        choose(LayoutRequest(batch_size=32, num_stages=2), num_machines=1, devices_per_machine=4)


def test_devices_that_a_plan_leaves_idle_have_no_rank() -> None:
    """V27, V32: three stages on machines of four devices leave one of each idle."""
    slow_network = profile([segment(1e-3)], [0] * 3, cut_bytes=1 << 30)
    wanted = LayoutRequest(batch_size=32, profile=slow_network, num_stages=3)
    layout = choose(wanted, num_machines=2, devices_per_machine=4).layout
    assert layout.idle == (3, 7)
    ranks = [ranks_of_machine(layout, machine, devices_per_machine=4) for machine in (0, 1)]
    assert ranks == [(0, 1, 2), (3, 4, 5)]


def test_only_used_devices_have_ranks() -> None:
    layout = Layout(((0, 1), (2, 3)), 8, 1, idle=(0, 1, 2, 4))
    assert [ranks_of_machine(layout, m, devices_per_machine=4) for m in (0, 1)] == [(0,), (1, 2, 3)]


# ---------------------------------------------------------------- from a plan file


def test_a_plan_file_is_used_unchanged() -> None:
    """V27, B3"""
    plan = pinned(depths=[2], microbatch_sizes=[1])
    choice = choose(LayoutRequest(pinned=plan), num_machines=1, devices_per_machine=5)
    assert choice.proposal == plan
    assert (choice.layout.depth, choice.layout.batch_size, choice.layout.microbatch_size) == (2, 32, 1)
    assert choice.layout.idle == (4,)
    assert choice.reasons[0].startswith("pinned: 2 stages")


@pytest.mark.parametrize(
    ("typed", "devices", "complaint"),
    [
        ({}, 3, "the plan needs 4 devices, there are 3 "),
        ({"batch_size": 64}, 4, "the plan has --batch-size 32, but 64 was typed"),
        ({"num_stages": 4}, 4, "the plan has --nstages 2, but 4 was typed"),
        ({"microbatch_size": 2}, 4, "the plan has --chunk-size 1, but 2 was typed"),
        (
            {"profile": msgspec.structs.replace(EIGHT, fingerprint="other")},
            4,
            "by hand, the profile is of other",
        ),
    ],
)
def test_a_plan_file_that_does_not_fit_is_refused(
    typed: dict[str, object], devices: int, complaint: str
) -> None:
    """V27"""
    plan = pinned(depths=[2], microbatch_sizes=[1])
    assert plan.plan.width == 2
    with pytest.raises(PlanError, match=complaint):
        choose(LayoutRequest(pinned=plan, **typed), num_machines=1, devices_per_machine=devices)  # type: ignore[arg-type]


def test_a_plan_for_other_machines_leaves_the_last_devices_idle() -> None:
    """Its own idle devices are named after the machines it was made for."""
    plan = msgspec.structs.replace(pinned(depths=[2], microbatch_sizes=[1]), idle=("vm9:0", "elsewhere:3"))
    layout = choose(LayoutRequest(pinned=plan), num_machines=3, devices_per_machine=2).layout
    assert layout.idle == (4, 5)


def test_a_plan_file_is_reduced_to_its_proposal() -> None:
    """Workers get only what they need, whatever else the file has."""
    plan = pinned()
    file = PinnedPlan(*msgspec.structs.astuple(plan), runners_up=(plan,), basis="measured")
    choice = choose(LayoutRequest(pinned=file), num_machines=1, devices_per_machine=4)
    assert type(choice.proposal) is Proposal and choice.proposal == plan


def test_a_pinned_plan_wins_over_a_profile_of_the_same_model() -> None:
    plan = pinned(depths=[2], microbatch_sizes=[1])
    choice = choose(LayoutRequest(pinned=plan, profile=EIGHT), num_machines=1, devices_per_machine=4)
    assert choice.proposal == plan and choice.reasons[0].startswith("pinned: ")


def test_a_pinned_plan_with_more_replicas_than_samples_is_refused() -> None:
    plan = pinned(depths=[2], microbatch_sizes=[1])
    few = msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, batch_size=1))
    with pytest.raises(PlanError, match="batch of 1 leaves some of its 2 replicas idle"):
        choose(LayoutRequest(pinned=few), num_machines=1, devices_per_machine=4)


# ---------------------------------------------------------------- in every case


@pytest.mark.parametrize("num_machines", [1, 2, 3])
@pytest.mark.parametrize(
    "request_",
    [
        LayoutRequest(batch_size=32, profile=EIGHT),
        LayoutRequest(batch_size=32, profile=EIGHT, num_stages=3),
        LayoutRequest(batch_size=32, profile=EIGHT, microbatch_size=2),
        LayoutRequest(batch_size=32, profile=EIGHT, num_stages=2, microbatch_size=4),
        LayoutRequest(batch_size=32, num_stages=4, microbatch_size=8),
        LayoutRequest(batch_size=32, profile=TIGHT),
        LayoutRequest(pinned=pinned(depths=[2])),
    ],
    ids=["planned", "depth", "size", "both", "typed", "tight", "pinned"],
)
def test_every_layout_uses_each_device_once_or_leaves_it_idle(
    request_: LayoutRequest, num_machines: int
) -> None:
    """V27: and the layout agrees with the plan that the workers get."""
    choice = choose(request_, num_machines=num_machines, devices_per_machine=4)
    layout = choice.layout
    ranks = sorted(rank for stage in layout.stage_map for rank in stage)
    assert ranks == list(range(layout.num_ranks))
    assert layout.num_ranks + len(layout.idle) == 4 * num_machines
    assert len(set(layout.idle)) == len(layout.idle) and all(0 <= d < 4 * num_machines for d in layout.idle)
    assert layout.batch_size == 32
    assert request_.num_stages in (None, layout.depth)
    assert request_.microbatch_size in (None, layout.microbatch_size)
    if choice.proposal is None:
        assert request_.profile is None and choice.reasons == ()
        return
    plan = choice.proposal.plan
    assert layout.stage_map == tuple(stage.ranks for stage in plan.stages)
    assert (layout.batch_size, layout.microbatch_size) == (plan.batch_size, plan.microbatch_size)
    if request_.profile is not None:
        limit = request_.profile.device_memory_bytes * (1 - HEADROOM)
        assert all(stage.memory.total <= limit for stage in choice.proposal.forecast.stages)


def test_a_choice_says_what_was_refused_and_what_was_estimated() -> None:
    """V27: but not the notes of the profile, which every plan would repeat."""
    model = msgspec.structs.replace(TIGHT, notes=("a note of the profile",))
    request = LayoutRequest(batch_size=24, profile=model)
    reasons = choose(request, num_machines=2, devices_per_machine=8).reasons
    assert [reason.split(":")[0] for reason in reasons[:3]] == ["planned", "the runner-up", "refused"]
    assert "1 stage: stage 0 needs at least" in reasons[2]
    assert not any("a note of the profile" in reason for reason in reasons)


# ---------------------------------------------------------------- as typed


@pytest.mark.parametrize(("devices", "stages", "replicas"), [(8, 2, 0), (8, 3, 0), (8, 2, 3), (1, 1, 0)])
def test_a_typed_layout_puts_the_stages_of_a_replica_on_adjacent_ranks(
    devices: int, stages: int, replicas: int
) -> None:
    layout = lay_out(devices, stages, batch_size=16, microbatch_size=2, num_replicas=replicas)
    width = replicas or devices // stages
    assert layout.widths == (width,) * stages
    for rank in range(layout.num_ranks):
        assert layout.place(rank) == (rank % stages, rank // stages)
    assert layout.idle == tuple(range(width * stages, devices))
    assert sum(layout.replica_batch(stage_ranks) for stage_ranks in layout.stage_map[0]) == 16
    assert layout.replica_batch(0) in (16 // width, ceil(16 / width))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_devices": 0}, "devices must be 1 or more, not 0"),
        ({"num_stages": 0}, "stages must be 1 or more, not 0"),
        ({"batch_size": 0}, "the batch size must be 1 or more, not 0"),
        ({"microbatch_size": -1}, "the micro-batch size must be 1 or more, not -1"),
        ({"num_replicas": -1}, r"replicas of each stage must be 1 or more \(0: as many"),
        ({"num_stages": 5}, "too few devices: 5 stages x 1 replica need 5, there are 4"),
        ({"num_replicas": 3}, "too few devices: 2 stages x 3 replicas need 6, there are 4"),
        ({"batch_size": 1}, "a batch of 1 leaves some of the 2 replicas without a sample"),
    ],
)
def test_an_impossible_typed_layout_is_refused_with_the_limit(change: dict[str, int], message: str) -> None:
    options = {"num_devices": 4, "num_stages": 2, "batch_size": 8, "microbatch_size": 2} | change
    with pytest.raises(ValueError, match=message):
        lay_out(options.pop("num_devices"), options.pop("num_stages"), **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((None, None, 8), "--nstages and --chunk-size missing"),
        ((2, None, 8), "^--chunk-size missing"),
        ((None, 4, 8), "^--nstages missing"),
        ((2, 4, None), "--batch-size is missing: the samples per step of the whole job"),
    ],
)
def test_a_missing_option_is_named(given: tuple[int | None, int | None, int | None], message: str) -> None:
    stages, size, batch = given
    request = LayoutRequest(batch_size=batch, num_stages=stages, microbatch_size=size)
    with pytest.raises(ValueError, match=message):
        lay_out_as_typed(request, 4)
