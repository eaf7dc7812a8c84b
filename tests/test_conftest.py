"""Runs of tests: a skipped test does not pass unnoticed in CI, and tests of one group share a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


def run_pytest(folder: Path, test: str, *, ci: str) -> int:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "test_it.py").write_text(f"import pytest\n{test}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "VARUNA_CI": ci}, stdout=subprocess.DEVNULL
    ).returncode


@pytest.mark.parametrize(
    "skipping",
    ["pytest.importorskip('no_such_module')", "def test_it(): pytest.skip('no tool')"],
    ids=["whole file", "one test"],
)
def test_in_ci_a_skipped_test_is_a_failure(tmp_path: Path, skipping: str) -> None:
    passing = "def test_other(): pass"
    assert run_pytest(tmp_path, f"{passing}\n{skipping}", ci="1") == pytest.ExitCode.TESTS_FAILED


def test_outside_ci_a_skipped_test_is_none(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, "def test_it(): pytest.skip('no tool')", ci="0") == pytest.ExitCode.OK


def test_only_a_gpu_test_may_be_skipped_in_ci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as on a machine without one
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a CUDA device\n")
    passing, gpu = "def test_other(): pass", "@pytest.mark.gpu\ndef test_it(): raise AssertionError"
    assert run_pytest(tmp_path, f"{passing}\n{gpu}", ci="1") == pytest.ExitCode.OK


def test_tests_of_one_group_run_in_one_process_whatever_the_number_of_workers(tmp_path: Path) -> None:
    """Side by side, whole jobs miss deadlines, and each process makes the fixtures of each module."""
    write = "import os\nfrom pathlib import Path\n" + "\n".join(
        f"def test_{number}(): Path('{{name}} {number}').write_text(os.environ['PYTEST_XDIST_WORKER'])"
        for number in range(8)
    )
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(write.format(name=name))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    workers = [{path.read_text() for path in tmp_path.glob(f"{name} *")} for name in "ab"]
    assert sorted(workers, key=sorted) == [{"gw0"}, {"gw1"}]
