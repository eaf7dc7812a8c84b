"""Depth and micro-batch that nobody typed: chosen from a profile, or pinned; refused where nothing fits."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from tests.cli.commands import parse_options
from tests.plan.profiles import GB, profile, segment
from varuna.cli.run import PreparedRun, RunOptions, main, planned_environment, prepare
from varuna.codec import decode, encode
from varuna.errors import PlanError
from varuna.morph.run.job_folder import saved_path
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.plan.plan_file import PinnedPlan, write_plan
from varuna.plan.search.choose import LayoutRequest, choose
from varuna.plan.search.search import search
from varuna.types import Layout, Profile, Proposal, format_stage_map

EIGHT = profile([segment(1e-3, fixed=1e-4)], [0] * 8)
TIGHT = profile([segment(1e-3, parameter_bytes=2 * GB)], [0] * 8, device_memory_bytes=20 * GB)


def pinned(found: Profile = EIGHT, devices: int = 4, **asked: object) -> Proposal:
    from varuna.plan.cluster_file import equal_machines

    cluster = equal_machines(devices, 4, memory_bytes=found.device_memory_bytes)
    return search(found, cluster, batch_size=32, **asked).best  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is chosen


def test_what_is_not_typed_is_the_planners_choice() -> None:
    """V27"""
    choice = choose(LayoutRequest(batch_size=32, profile=EIGHT), num_machines=1, devices_per_machine=4)
    best = pinned()
    assert choice.proposal == best
    assert choice.layout.stage_map == tuple(stage.ranks for stage in best.plan.stages)
    assert (choice.layout.batch_size, choice.layout.microbatch_size) == (32, best.plan.microbatch_size)
    assert choice.reasons[0].startswith("planned: ") and "the shortest step" in choice.reasons[0]
    assert choice.reasons[1].startswith("the runner-up: ") and "slower" in choice.reasons[1]


@pytest.mark.parametrize(("stages", "size"), [(2, None), (None, 1), (3, None)])
def test_what_is_typed_binds_the_planner(stages: int | None, size: int | None) -> None:
    """V27"""
    wanted = LayoutRequest(batch_size=32, profile=EIGHT, num_stages=stages, microbatch_size=size)
    layout = choose(wanted, num_machines=1, devices_per_machine=4).layout
    assert (stages or layout.depth, size or layout.microbatch_size) == (layout.depth, layout.microbatch_size)


def test_other_machines_get_another_layout() -> None:
    """V27: at every morph the same question, with the machines of then."""
    wanted = LayoutRequest(batch_size=32, profile=TIGHT)
    many, few = (choose(wanted, num_machines=n, devices_per_machine=4).layout for n in (4, 1))
    assert (many.num_ranks + len(many.idle), few.num_ranks + len(few.idle)) == (16, 4)
    assert few.depth >= 2  # one device cannot hold the model
    with pytest.raises(PlanError, match=r"no layout fits.*GiB too little"):
        choose(wanted, num_machines=1, devices_per_machine=1)


def test_both_typed_are_kept_and_the_profile_tells_where_to_cut() -> None:
    """V26, V27"""
    uneven = profile([segment(6e-3), segment(1e-3)], [0, *[1] * 6])
    wanted = LayoutRequest(batch_size=32, profile=uneven, num_stages=2, microbatch_size=2)
    choice = choose(wanted, num_machines=1, devices_per_machine=5)
    assert format_stage_map(choice.layout.stage_map) == "0,2;1,3;" and choice.layout.idle == (4,)
    assert choice.proposal is not None
    assert [(s.first, s.stop) for s in choice.proposal.plan.stages] == [(0, 1), (1, 7)]
    assert choice.proposal.plan.microbatch_size == 2 and choice.proposal.plan.schedule == "varuna"


def test_without_a_profile_both_must_be_typed() -> None:
    with pytest.raises(ValueError, match=r"--chunk-size missing .*--profile-folder"):
        choose(LayoutRequest(batch_size=32, num_stages=2), num_machines=1, devices_per_machine=4)


def test_devices_that_the_plan_leaves_idle_have_no_rank_on_any_machine() -> None:
    """V27, V32: three stages on machines of four devices leave one of each idle."""
    slow_network = profile([segment(1e-3)], [0] * 3, cut_bytes=1 << 30)
    wanted = LayoutRequest(batch_size=32, profile=slow_network, num_stages=3)
    layout = choose(wanted, num_machines=2, devices_per_machine=4).layout
    assert layout.idle == (3, 7)
    ranks = [ranks_of_machine(layout, machine, devices_per_machine=4) for machine in (0, 1)]
    assert ranks == [(0, 1, 2), (3, 4, 5)]


def test_ranks_are_where_devices_are_used() -> None:
    layout = Layout(((0, 1), (2, 3)), 8, 1, idle=(0, 1, 2, 4))
    assert [ranks_of_machine(layout, m, devices_per_machine=4) for m in (0, 1)] == [(0,), (1, 2, 3)]


# ---------------------------------------------------------------- what is pinned


def test_a_pinned_plan_is_used_as_it_is() -> None:
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
def test_a_pinned_plan_that_does_not_fit_is_refused(
    typed: dict[str, object], devices: int, complaint: str
) -> None:
    """V27"""
    plan = pinned(depths=[2], microbatch_sizes=[1])
    assert plan.plan.width == 2
    with pytest.raises(PlanError, match=complaint):
        choose(LayoutRequest(pinned=plan, **typed), num_machines=1, devices_per_machine=devices)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is typed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "machines").write_text("127.0.0.1\n")
    (tmp_path / "script.py").write_text("")
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "profile.json").write_text(encode(EIGHT))
    write_plan(tmp_path / "plan.json", PinnedPlan(*msgspec.structs.astuple(pinned())))
    return tmp_path


COMMON = ("--machine_list", "machines", "--gpus_per_node", "4")


def typed(folder: Path, *arguments: str) -> PreparedRun:
    options = parse_options(RunOptions, [*COMMON, *arguments, "script.py"])
    return prepare(options, home=folder / "home")


def test_the_plan_and_the_profile_reach_the_workers_by_environment(folder: Path) -> None:
    """V27"""
    job = typed(folder, "--batch_size", "32", "--profile_folder", "profiles")
    assert decode(job.planned["VARUNA_PLAN"], Proposal) == pinned()
    assert job.planned["VARUNA_PROFILE"] == str(folder / "profiles")
    assert typed(folder, "--plan", "plan.json").planned == {"VARUNA_PLAN": job.planned["VARUNA_PLAN"]}
    by_hand = typed(folder, "--batch_size", "32", "--nstages", "2", "--chunk_size", "1")
    assert by_hand.planned == {}


def test_resuming_asks_the_same_profile_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V27, V31"""
    first = typed(folder, "--batch_size", "32", "--profile_folder", "profiles")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    options = parse_options(RunOptions, ["--resume", "--code_dir", str(folder)])
    again = prepare(options, home=folder / "home")
    assert again.planned == first.planned and again.choice.layout == first.choice.layout


def test_options_that_an_earlier_version_saved_are_resumed(folder: Path) -> None:
    """Version 0.1.0 wrote null for each option that was not given."""
    saved = {
        **dict.fromkeys(["manager_ip", "no_morphing", "exclude_slow", "hang_seconds", "starter", "ssh"]),
        **dict.fromkeys(["starter_options", "python", "cloud", "cloud_url", "env_file", "profile_folder"]),
        **dict.fromkeys(["plan", "worker_args"]),
        **{"machine_list": str(folder / "machines"), "gpus_per_node": 2, "save_every": "off"},
        **{"nstages": 2, "batch_size": 8, "chunk_size": 1, "command": ["script.py", "--lr", "0.1"]},
    }
    path = saved_path(folder / "home", folder)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(saved))
    options = parse_options(RunOptions, ["--resume", "--batch-size", "16"])
    job = prepare(options, home=folder / "home")
    assert (job.job.arguments, job.job.save_every_seconds, job.job.morphing) == (("--lr", "0.1"), 0.0, True)
    assert (job.choice.layout.depth, job.choice.layout.batch_size) == (2, 16)


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--batch_size", "32", "--profile_folder", "nowhere"], "nowhere (make one with varuna.Profiler"),
        (["--batch_size", "32", "--profile_folder", "old"], "version is 0, this library reads 1"),
        (["--batch_size", "32", "--profile_folder", "broken"], "is not a valid Profile"),
        (["--profile_folder", "profiles"], "--batch-size is missing"),
        (
            ["--batch_size", "32", "--profile_folder", "profiles", "--nstages", "9"],
            "the model has 8 segments",
        ),
        (
            ["--batch_size", "32", "--profile_folder", "profiles", "--nstages", "5"],
            "no layout fits: at least 5 stages",
        ),
        (
            ["--batch_size", "32", "--profile_folder", "profiles", "--nstages", "2", "--chunk_size", "64"],
            "the profile covers 1 to 4",
        ),
        (["--batch_size", "32", "--profile_folder", "small"], "too little"),
        (["--plan", "nowhere.json"], "nowhere.json (`varuna plan --out` writes one"),
        (["--plan", "machines"], "is not a valid PinnedPlan"),
        (["--plan", "plan.json", "--gpus_per_node", "2"], "the plan needs 4 devices, there are 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_planned_is_refused_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    """V27: exit code 2, and the planner's own words."""
    for name, changes in {
        "old": {"version": 0},
        "small": {"device_memory_bytes": 1000},
        "broken": {},
    }.items():
        (folder / name).mkdir()
        (folder / name / "profile.json").write_text(encode(EIGHT) if changes else "{ half")
        if changes:
            change(folder / name / "profile.json", **changes)
    monkeypatch.setenv("VARUNA_HOME", str(folder / "home"))
    monkeypatch.setattr(sys, "argv", ["run_varuna", *COMMON, *arguments, "script.py"])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert complaint in capsys.readouterr().err


def test_what_the_workers_are_told_fits_an_environment() -> None:
    """A variable may hold 128 KiB."""
    large = profile([segment(1e-3)], [0] * 96)
    choice = choose(
        LayoutRequest(batch_size=8192, profile=large, num_stages=16, microbatch_size=1),
        num_machines=512,
        devices_per_machine=8,
    )
    assert all(len(text) < 1 << 17 for text in planned_environment(choice, "profiles").values())
