"""`varuna chaos` with real jobs: its report is right, for a job that survives and for ones that do not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import ROOT, environment
from varuna.chaos.leftovers import processes_with
from varuna.simulate.costs import Costs

SCRIPT = str(ROOT / "examples/chaos.py")
LEAVES = """
import os, runpy, subprocess, sys, tempfile
from pathlib import Path
from varuna.environment import VarunaEnvironment
if VarunaEnvironment.read(os.environ).generation is not None and os.environ["RANK"] == "0":
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    Path(tempfile.mkstemp(prefix="forgotten-")[1]).write_text("a file")
sys.argv = ["chaos.py", "--wrong", "--sample-seconds", "0.001"]
runpy.run_path(sys.argv_script, run_name="__main__")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "varuna", "chaos", *arguments]


def chaos(folder: Path, *arguments: str) -> tuple[int, Any, str]:
    """Run the command in an own folder; return its exit status, its report, and what it wrote to stderr."""
    code = folder / "code"
    code.mkdir(exist_ok=True)
    done = subprocess.run(
        command("--json", *arguments),
        cwd=code,
        env=chaos_environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.stdout, done.stderr
    assert list((folder / "tmp").iterdir()) == [], "the folder of the run is removed"
    assert processes_with(f"{folder}/tmp/".encode()) == []
    return done.returncode, json.loads(done.stdout), done.stderr


def chaos_environment(folder: Path) -> dict[str, str]:
    (folder / "tmp").mkdir(exist_ok=True)
    return environment(folder, TMPDIR=str(folder / "tmp"))


def write_faults(folder: Path, *kinds: str) -> str:
    path = folder / "faults.toml"
    path.write_text("".join(f"[[fault]]\nkind = {kind!r}\n" for kind in kinds))
    return str(path)


@pytest.mark.timeout(300)
def test_a_job_on_hosts_survives_every_fault_with_the_losses_of_an_undisturbed_run(tmp_path: Path) -> None:
    """B5, PRO-2: each fault has its seconds; the losses are equal; nothing is left; the code stays."""
    kinds = ("kill-worker", "cut-link", "join", "kill-manager", "slow-link")
    script = write_faults(tmp_path, *kinds)
    code, report, progress = chaos(tmp_path, SCRIPT, "--hosts", "--machines", "3", "--script", script)
    assert (code, report["outcome"], report["problem"]) == (0, "stopped", ""), report
    assert [fault["fault"] for fault in report["faults"]] == list(kinds)
    assert all(fault["seconds"] > 0 for fault in report["faults"])
    assert all(kind in progress for kind in kinds)
    assert report["losses"]["steps"] == report["steps"] > 20
    assert report["losses"]["first_different"] is None and report["losses"]["missing"] == []
    assert report["left_behind"] == {"processes": [], "sockets": [], "shared_memory": [], "files": []}
    assert list((tmp_path / "code").iterdir()) == []


@pytest.mark.timeout(200)
def test_wrong_losses_and_everything_that_is_left_behind_are_reported(tmp_path: Path) -> None:
    """B5, PRO-2: a script that takes data by rank differs; a process and a file that it leaves are named.

    The faults are random: with this seed, the first one kills a worker, and the time is over then.
    """
    wrong = tmp_path / "wrong.py"
    wrong.write_text(LEAVES.replace("sys.argv_script", repr(SCRIPT)))
    code, report, _ = chaos(tmp_path, str(wrong), "--machines", "2", "--minutes", "0.0001", "--seed", "14")
    assert code == 1 and report["outcome"] == "stopped", report
    assert [fault["fault"] for fault in report["faults"]] == ["kill-worker"] and report["seed"] == 14
    assert report["faults"][0]["seconds"] > 0
    assert report["losses"]["first_different"] == 0
    assert report["losses"]["worst"] > report["losses"]["tolerance"]
    left = report["left_behind"]
    assert any(line.endswith(": sleep 1234") for line in left["processes"])
    assert any(name.startswith("forgotten-") for name in left["files"])


@pytest.mark.timeout(200)
def test_a_trace_adds_and_takes_machines_and_can_be_simulated_afterwards(tmp_path: Path) -> None:
    """B5, PRO-2, PRO-3: the report counts every change; the played trace and the ledger are kept."""
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "seconds,event,machine\n0,add,a\n0,add,b\n600,add,c\n900,remove,a\n960,notice,b\n1080,remove,b\n1200,end,\n"
    )
    out = tmp_path / "out"
    code, report, _ = chaos(
        tmp_path, SCRIPT, "--trace", str(trace), "--speedup", "30", "--machines", "3", "--out", str(out)
    )
    assert code == 0, report
    assert [fault["fault"] for fault in report["faults"]] == ["add", "remove", "notice", "remove"]
    assert 0 < report["ledger"]["goodput"] < 1
    played = (out / "played.csv").read_text().splitlines()
    assert played[0] == "seconds,event,machine" and played[-1].endswith(",end,")
    assert [line.split(",")[1] for line in played[1:-1]] == [
        "add",
        "add",
        "add",
        "remove",
        "notice",
        "remove",
    ]
    simulated = subprocess.run(
        [sys.executable, "-m", "varuna", "simulate", "--calibrate", str(next((out / "logs").iterdir()))],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert simulated.returncode == 0, simulated.stderr
    assert json.loads(simulated.stdout)["detect_seconds"] != Costs().detect_seconds, "it is measured"


@pytest.mark.timeout(120)
def test_a_script_that_ends_before_its_trace_leaves_its_ledger_and_what_was_played(tmp_path: Path) -> None:
    """B5, PRO-2, PRO-3: the notice is longer than the machine's life, so it comes with the machine."""
    trace = tmp_path / "trace.csv"
    trace.write_text("seconds,event,machine\n0,add,a\n0,add,b\n500,remove,b\n900,end,\n")
    out = tmp_path / "out"
    options = ["--trace", str(trace), "--notice", "600", "--machines", "2", "--out", str(out)]
    code, report, _ = chaos(tmp_path, SCRIPT, *options, "--", "--steps", "60")
    assert (code, report["outcome"]) == (0, "finished"), report
    assert [fault["fault"] for fault in report["faults"]] == ["notice"]
    assert report["ledger"]["steps"] == report["steps"] == 60
    *_, notice, end = (out / "played.csv").read_text().splitlines()
    assert notice.endswith(",notice,127.0.0.2")
    assert float(notice.split(",")[0]) < float(end.removesuffix(",end,")) < 900


@pytest.mark.timeout(120)
def test_ctrl_c_ends_all_processes_and_removes_all_files(tmp_path: Path) -> None:
    running = subprocess.Popen(
        command(SCRIPT, "--machines", "2", "--minutes", "5"),
        cwd=tmp_path,
        env=chaos_environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    assert running.stderr.readline(), "the first fault is over"
    running.send_signal(signal.SIGINT)
    running.communicate()
    assert running.returncode != 0
    assert list((tmp_path / "tmp").iterdir()) == []
    assert processes_with(f"{tmp_path}/tmp/".encode()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no training script"),
        (["missing.py"], "no script 'missing.py'"),
        ([SCRIPT, "--machines", "0"], "--machines must be 1 to 64, not 0"),
        ([SCRIPT, "--minutes", "0"], "--minutes must be above 0, not 0"),
        ([SCRIPT, "--script", "a.toml", "--trace", "b.csv"], "--script and --trace exclude each other"),
        ([SCRIPT, "--script", "missing.toml"], "cannot read the script 'missing.toml'"),
        ([SCRIPT, "--save-every", "soon"], "--save-every must be auto, off, or a number of seconds"),
    ],
)
def test_invalid_input_ends_with_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = subprocess.run(
        command(*arguments), cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.timeout(60)
def test_a_script_that_trains_nothing_is_invalid_input(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("print('nothing to do')\n")
    done = subprocess.run(
        command("empty.py", "--machines", "1"),
        cwd=tmp_path,
        env=chaos_environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stdout
    assert "has trained no step" in done.stderr and "nothing to do" in done.stderr
