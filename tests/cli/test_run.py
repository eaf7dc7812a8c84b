"""The options of `varuna run`: checked and saved before anything starts, and resumed."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from tests.cli.commands import parse_options
from tests.plan.profiles import profile, segment
from tests.plan.test_choose import EIGHT, pinned
from varuna.cli.run import PreparedRun, RunOptions, main, planned_environment, prepare
from varuna.codec import decode, encode
from varuna.morph.run.job_folder import saved_path
from varuna.plan.plan_file import PinnedPlan, write_plan
from varuna.plan.search.choose import LayoutRequest, choose
from varuna.types import Proposal


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


def test_workers_receive_the_plan_and_the_profile_as_environment_variables(folder: Path) -> None:
    """V27"""
    job = typed(folder, "--batch_size", "32", "--profile_folder", "profiles")
    assert decode(job.planned["VARUNA_PLAN"], Proposal) == pinned()
    assert job.planned["VARUNA_PROFILE"] == str(folder / "profiles")
    assert typed(folder, "--plan", "plan.json").planned == {"VARUNA_PLAN": job.planned["VARUNA_PLAN"]}
    by_hand = typed(folder, "--batch_size", "32", "--nstages", "2", "--chunk_size", "1")
    assert by_hand.planned == {}


def test_resume_uses_the_same_profile_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_options_without_a_possible_plan_are_refused_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    complaint: str,
) -> None:
    """V27: exit status 2, and the message of the planner."""
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


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf"])
def test_a_time_that_no_hang_can_reach_is_refused(folder: Path, seconds: str) -> None:
    """SEE-6: NaN would switch off the search for hangs."""
    options = parse_options(
        RunOptions, [*COMMON, "--batch-size", "8", "--hang-seconds", seconds, "script.py"]
    )
    with pytest.raises(ValueError, match="--hang-seconds must be a number of seconds above 0, not"):
        prepare(options, home=folder / "home")


def test_the_plan_of_a_large_job_fits_into_an_environment_variable() -> None:
    """Linux limits a variable to 128 KiB."""
    large = profile([segment(1e-3)], [0] * 96)
    choice = choose(
        LayoutRequest(batch_size=8192, profile=large, num_stages=16, microbatch_size=1),
        num_machines=512,
        devices_per_machine=8,
    )
    assert all(len(text) < 1 << 17 for text in planned_environment(choice, "profiles").values())
