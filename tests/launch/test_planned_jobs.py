"""Real jobs planned from a real profile: their losses equal those of one process, and they report."""

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.launch import planned_net
from tests.launch.jobs import environment, log
from varuna.codec import decode
from varuna.plan.plan_file import read_plan, write_plan
from varuna.types import StepReport


def job(folder: Path, *arguments: str, devices: int = 2) -> str:
    (folder / "machines").write_text("127.0.0.1\n")
    common = ["--machine_list", "machines", "--gpus_per_node", str(devices), "--log_dir", "logs"]
    ran = subprocess.run(
        [sys.executable, "-m", "varuna.run_varuna", *common, *arguments, planned_net.__file__],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def losses(told: str) -> list[float]:
    return [float(line.split()[-1]) for line in told.splitlines() if line.startswith("[rank 0] loss ")]


def test_a_job_without_stages_and_micro_batch_is_planned_and_trains_as_one_process(
    tmp_path: Path, profile_folder: Path
) -> None:
    """V27, V28: step 10 reports predicted and measured times, on the terminal and in the log folder."""
    told = job(tmp_path, "--batch_size", "8", "--profile_folder", str(profile_folder))
    planned = next(line for line in told.splitlines() if line.startswith("varuna: planned: "))
    assert "the shortest step of all layouts" in planned and "varuna: the runner-up: " in told
    assert losses(told) == pytest.approx(planned_net.train_plainly(), rel=1e-5)
    ran = next(line for line in told.splitlines() if line.startswith("[rank 0] ran ")).split()
    depth, width, microbatch_size = map(int, ran[3:6])
    assert f"planned: {depth} stage" in planned and f" x {width} replica" in planned
    assert f"micro-batches of {microbatch_size}, schedule {ran[6]}" in planned
    assert "[rank 0] step 10: " in told and " predicted (" in told
    report = decode(log(tmp_path, "report.json"), StepReport)
    assert report.step == 10 and report.forecast is not None
    assert len(report.stages) == len(report.forecast.stages) == depth
    assert log(tmp_path, "timeline.svg").startswith("<svg")
    assert '"traceEvents"' in log(tmp_path, "timeline.perfetto.json")


def test_a_plan_file_is_run_unchanged(tmp_path: Path, profile_folder: Path) -> None:
    """V27, B3: workers run what `varuna plan` wrote, here with one more replica of a stage."""
    asked = [
        "--devices",
        "2",
        "--batch-size",
        "8",
        "--stages",
        "2",
        "--chunk-size",
        "1",
        "--schedule",
        "gpipe",
    ]
    plan = [sys.executable, "-m", "varuna", "plan", str(profile_folder), *asked, "--out", "plan.json"]
    subprocess.run(plan, cwd=tmp_path, env=environment(tmp_path), check=True, capture_output=True)
    pinned = read_plan(tmp_path / "plan.json")
    stages = (replace(pinned.plan.stages[0], ranks=(0, 1)), replace(pinned.plan.stages[1], ranks=(2,)))
    write_plan(tmp_path / "plan.json", replace(pinned, plan=replace(pinned.plan, stages=stages)))
    told = job(tmp_path, "--plan", "plan.json", devices=3)
    assert "pinned: 2 stages x 2+1 replicas, " in told
    stops = [stage.stop for stage in stages]
    assert f"[rank 0] ran 2 1 1 gpipe {stops}" in told
    assert losses(told) == pytest.approx(planned_net.train_plainly(), rel=1e-5)
    report = decode(log(tmp_path, "report.json"), StepReport)
    assert report.forecast == read_plan(tmp_path / "plan.json").forecast
