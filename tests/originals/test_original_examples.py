"""Scripts like the original Varuna's three examples: launched as documented, equal to one process."""

import io
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.launch.jobs import environment

HERE = Path(__file__).parent
NUMBER = re.compile(r"(?<= )-?\d+\.\d+")
SIZES = {
    "workers": "--gpus_per_node",
    "batch": "--batch-size",
    "stages": "--nstages",
    "chunk": "--chunk_size",
}


def numbers(output: str) -> list[float]:
    """Return the losses and norms that rank 0 has printed; the manager's status names a loss, too."""
    lines = [line for line in output.splitlines() if " loss " in line and not line.startswith("varuna: ")]
    return [float(number) for line in lines for number in NUMBER.findall(line)]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def plain(monkeypatch: pytest.MonkeyPatch, folder: Path, script: Path, *arguments: str) -> list[float]:
    """Run the script in this process, without `--varuna`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.syspath_prepend(str(script.parent))
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(script), run_name="__main__")
    return numbers(output.getvalue())


def launched(folder: Path, script: Path, *arguments: str, **sizes: int) -> list[float]:
    (folder / "machines").write_text("127.0.0.1\n")
    given = [part for name, value in sizes.items() for part in (SIZES[name], str(value))]
    where = ["--machine_list", "machines", "--code_dir", str(folder)]
    command = [sys.executable, "-m", "varuna.run_varuna", *where, *given, str(script), "--varuna", *arguments]
    return numbers(run(command, folder))


@pytest.mark.timeout(300)
def test_bert_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V9, V13, V30: two stages and two replicas; three values of a step, weights shared by name."""
    script = HERE / "bert_pretraining.py"
    found = launched(tmp_path, script, workers=4, batch=8, stages=2, chunk=2)
    assert len(found) == 8
    assert found == pytest.approx(plain(monkeypatch, tmp_path, script), rel=2e-4)


@pytest.mark.timeout(300)
def test_gpt2_with_arguments_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V13, V18, V30, V35: flags whose names are built; clipping, evaluation, a checkpoint."""
    script = HERE / "gpt2" / "pretrain.py"
    expected = plain(monkeypatch, tmp_path, script)
    found = launched(tmp_path, script, "--save", "store", workers=2, batch=8, stages=2, chunk=2)
    assert found == pytest.approx(expected, rel=2e-4)
    assert (tmp_path / "store" / "latest_checkpointed_iteration.txt").read_text() == "2"
    again = launched(
        tmp_path, script, "--load", "store", "--resume_step", "2", workers=2, batch=8, stages=1, chunk=4
    )
    assert again == pytest.approx(expected[4:], rel=2e-4)


@pytest.mark.timeout(300)
def test_image_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V17, V18, V30: CutPoints in a plain list, BatchNorm, evaluation under no_grad."""
    script = HERE / "imagenet.py"
    found = launched(tmp_path, script, "store", "--cpu", workers=2, batch=8, stages=2, chunk=8)
    (tmp_path / "data").mkdir()
    assert found == pytest.approx(plain(monkeypatch, tmp_path, script, "data", "-b", "8"), rel=2e-4)
