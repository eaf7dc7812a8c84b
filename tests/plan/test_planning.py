"""`varuna plan`, `explain` and `simulate`, on a profile made by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.plan.profiles import profile, segment
from varuna.codec import encode
from varuna.planning import register

app = typer.Typer()
register(app)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "profile.json").write_text(encode(profile([segment(1e-3)], [0] * 4)))
    return tmp_path


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_plan_is_told_pinned_drawn_explained_and_played(folder: Path) -> None:
    """B3, B4"""
    pinned, picture = folder / "plan.json", folder / "plan.svg"
    asked = [folder, "--devices", 4, "--per-machine", 2, "--batch-size", 32]
    told = run("plan", *asked, "--out", pinned, "--svg", picture)
    assert "the shortest step of all layouts" in told and "bubble" in told
    assert picture.read_text().startswith("<svg")
    explained = run("explain", pinned)
    assert "compute ms" in explained and "0 to " in explained
    on_less = ["simulate", folder, pinned, "--devices", 4, "--per-machine", 2]
    assert "s a step" in run(*on_less)
    slow = json.loads(run(*on_less, "--network", "1Mbit", "--latency", "1ms", "--json"))
    quick = json.loads(run(*on_less, "--network", "400Gbit", "--json"))
    assert slow["seconds"] >= quick["seconds"]
    assert any("assumed: 0.001 Gbit/s" in what for what in slow["estimates"])
    run(*on_less, "--trace", folder / "trace.json")
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_two_plans_are_told_apart(folder: Path) -> None:
    """B3: JSON, with a diff."""
    one, other = folder / "one.json", folder / "other.json"
    asked = ["plan", folder, "--devices", 4, "--batch-size", 32, "--schedule", "1f1b"]
    run(*asked, "--stages", 2, "--out", one)
    run(*asked, "--stages", 4, "--out", other)
    difference = run("explain", one, "--diff", other)
    assert "stages: 2 -> 4" in difference and "schedule" not in difference
    assert run("explain", one, "--diff", one).strip() == "the plans are the same"


def test_for_programs_there_is_json(folder: Path) -> None:
    ranking = json.loads(run("plan", folder, "--devices", 3, "--batch-size", 32, "--json"))
    assert ranking["proposals"][0]["forecast"]["seconds"] > 0


def test_nonsense_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="--memory '80 apples' is no number with a unit"):
        run("plan", folder, "--devices", 2, "--batch-size", 8, "--memory", "80 apples")


def test_planning_on_the_command_line_imports_no_torch(folder: Path) -> None:
    code = (
        "import sys; from varuna.cli import main; "
        f"sys.argv = ['varuna', 'plan', {str(folder)!r}, '--devices', '4', '--batch-size', '16']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
