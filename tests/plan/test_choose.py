"""The layout of a job: from given sizes, a profile or a plan file; refused if nothing fits."""

import msgspec
import pytest

from tests.plan.profiles import GB, profile, segment
from varuna.errors import PlanError
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.plan.search.choose import LayoutRequest, choose
from varuna.plan.search.search import search
from varuna.types import Layout, Profile, Proposal, format_stage_map

EIGHT = profile([segment(1e-3, fixed=1e-4)], [0] * 8)
TIGHT = profile([segment(1e-3, parameter_bytes=2 * GB)], [0] * 8, device_memory_bytes=20 * GB)


def pinned(found: Profile = EIGHT, devices: int = 4, **asked: object) -> Proposal:
    from varuna.plan.cluster_file import equal_machines

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
