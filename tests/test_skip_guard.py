"""CI's own guard: a test that is skipped for want of something does not pass unnoticed."""

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
