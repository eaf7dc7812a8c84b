"""Real jobs of `varuna run`: refused input, variables of the workers, and --resume."""

import json
import sys
from pathlib import Path

import pytest

from tests.launch.jobs import SHOW, run

RUN = [sys.executable, "-m", "varuna.run_varuna"]
SIZES = ["--gpus_per_node", "1", "--batch-size", "4", "--nstages", "1", "--chunk_size", "2"]


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    (tmp_path / "machines").write_text("127.0.0.1\n")
    return ["--machine_list", "machines"]


def test_a_job_runs_once_with_the_variables_of_the_env_file(tmp_path: Path, here: list[str]) -> None:
    """V29, V31, V34"""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(SHOW + "print('here', file=open('starts', 'a'))")
    (tmp_path / "env").write_text("A=1\nB='two words'\nRANK=77\n")
    given = ["--code_dir", "code", "--env_file", "env", "--manager_ip", "10.1.1.1", "--no_morphing"]
    job = run([*RUN, *here, *SIZES, *given, "train.py", "--epochs", "3"], tmp_path)
    assert job.returncode == 0, job.stderr
    assert "finished: every worker" in job.stdout
    arguments, environment, cwd = json.loads((tmp_path / "code" / "seen_0.json").read_text())
    assert (arguments, cwd) == (["--epochs", "3"], str(tmp_path / "code"))
    expected = {"A": "1", "B": "two words", "RANK": "0", "VARUNA_MANAGER_IP": "10.1.1.1"}
    assert {name: environment[name] for name in expected} == expected
    assert (tmp_path / "code" / "starts").read_text() == "here\n"


def test_resume_restarts_the_last_job_of_the_folder(tmp_path: Path, here: list[str]) -> None:
    """V31"""
    first = run([*RUN, *here, *SIZES, "script.py", "--epochs", "3"], tmp_path, SHOW)
    (tmp_path / "seen_0.json").unlink()
    again = run([*RUN, "--resume", "--resume_step", "12", "--chunk_size", "1"], tmp_path, SHOW)
    assert (first.returncode, again.returncode) == (0, 0), again.stderr
    arguments, environment, _ = json.loads((tmp_path / "seen_0.json").read_text())
    assert arguments == ["--epochs", "3"]
    assert environment["VARUNA_RESUME_STEP"] == "12"
    assert (environment["VARUNA_BATCH_SIZE"], environment["VARUNA_CHUNK_SIZE"]) == ("4", "1")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([*SIZES, "script.py"], "cannot read the machine list"),
        (["--machine_list", "typo", *SIZES, "script.py"], "typo, line 2: '127.0.0' is not an IPv4 address"),
        (["--machine_list", "empty", *SIZES, "script.py"], "the machine list is empty"),
        (["--machine_list", "machines", *SIZES], "no training script"),
        (["--machine_list", "machines", *SIZES, "nowhere.py"], "no script 'nowhere.py'"),
        (
            ["--machine_list", "machines", *SIZES, "--nstages", "two", "script.py"],
            "for '--nstages'",
        ),
        (["--machine_list", "machines", *SIZES, "--nstages", "5", "script.py"], "need 5, there are 1"),
        (["--machine_list", "machines", *SIZES, "--gpus_per_node", "0", "script.py"], "not 0"),
        (
            ["--machine_list", "machines", "--batch_size", "4", "script.py"],
            "--nstages and --chunk-size missing",
        ),
        (["--machine_list", "machines", "--nstages", "1", "script.py"], "--batch-size is missing"),
        (
            ["--machine_list", "machines", *SIZES, "--env_file", "nowhere", "script.py"],
            "the env file",
        ),
        (["--machine_list", "machines", *SIZES, "--code_dir", "nowhere", "script.py"], "is not a folder"),
        (["--resume"], "--resume found no earlier job"),
        (["--machine_list", "machines", "--stages", "1", "script.py"], "No such option: --stages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_input_is_refused_before_anything_starts(
    tmp_path: Path, here: list[str], arguments: list[str], complaint: str
) -> None:
    """V29, V32: exit status 2, and a message that says what to do."""
    (tmp_path / "empty").write_text("# nobody\n")
    (tmp_path / "typo").write_text("127.0.0.1\n127.0.0\n")
    job = run([*RUN, *arguments], tmp_path, SHOW)
    assert job.returncode == 2
    assert complaint in job.stderr
    assert not (tmp_path / "varuna_logs").exists()
