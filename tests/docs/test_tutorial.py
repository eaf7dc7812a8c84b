"""The tutorial works as written: scripts are saved, commands run, each loss is that of the plain script."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:as `(?P<file>\w+\.py)`:\n\n)?^```(?P<kind>python|bash)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL
)
LOSS = re.compile(r"step (\d+) loss ([\d.]+)")


class Block(NamedTuple):
    file: str | None
    kind: str
    code: str


def blocks() -> list[Block]:
    text = (ROOT / "docs/tutorial.md").read_text()
    return [Block(found["file"], found["kind"], found["code"]) for found in BLOCK.finditer(text)]


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(output)}


class Shell:
    """A user's terminal in an empty folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        home = {"PATH": path, "HOME": str(folder / "home"), "VARUNA_HOME": str(folder / "home")}
        self.environment = {**os.environ, **home, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(self, code: str) -> str:
        script = ["bash", "-euc", code]
        done = subprocess.run(script, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def wait_for(self, file: str, text: str) -> None:
        """Read a log as it grows, until a line has the text."""
        follow = ["tail", "-n", "+1", "-F", str(self.folder / file)]
        with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as tail:
            assert tail.stdout is not None
            lines = []
            for line in tail.stdout:
                lines.append(line)
                if text in line:
                    break
                assert "varuna: failed" not in line, "".join(lines)
            tail.kill()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    stop = ["varuna", "stop", "--now"]  # a test that failed leaves its job running
    subprocess.run(stop, cwd=tmp_path, env=shell.environment, capture_output=True)


@pytest.mark.timeout(600)  # eight jobs, one after the other
def test_each_part_of_the_tutorial_has_the_losses_of_the_plain_script(shell: Shell) -> None:
    """SEE-5"""
    parts = blocks()
    for block in (one for one in parts if one.kind == "python"):
        assert block.file is not None, f"no file name before:\n{block.code}"
        (shell.folder / block.file).write_text(block.code)
    commands = [one.code for one in parts if one.kind == "bash"]
    plain_run, one_process, pipeline, checkpoint, plan, start, join, leave = commands
    plain = losses(shell.run(plain_run))
    assert len(plain) == 20

    assert losses(shell.run(one_process)) == pytest.approx(plain, abs=2e-4)
    assert losses(shell.run(pipeline)) == pytest.approx(plain, abs=2e-4)
    output = shell.run(checkpoint)
    assert losses(output) == pytest.approx(plain, abs=2e-4)
    assert "complete, newest" in output
    output = shell.run(plan)
    assert "the shortest step of all layouts" in output
    assert losses(output) == pytest.approx(plain, abs=2e-4)

    shell.run(start)
    shell.wait_for("long.log", "step 10 loss")
    shell.run(join)
    shell.wait_for("long.log", "morphed: 2")
    assert "replicas, batch 24 in micro-batches of 3" in shell.run(leave)
    shell.wait_for("long.log", "varuna: stopped")
    found = losses((shell.folder / "long.log").read_text())
    assert {step: found[step] for step in plain} == pytest.approx(plain, abs=2e-4)
    assert sorted(found) == list(range(len(found)))
