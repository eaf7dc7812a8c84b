"""What the documents show runs: every Python block of README.md and docs/, file by file."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = sorted({ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / "docs/tutorial.md"})
"""Without the tutorial: `test_tutorial.py` runs it, with its commands."""
BLOCK = re.compile(r"^```python(?P<tag>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)

OTHER_NAMES = re.compile(r"^ *```(?:py|py3|python3|Python|pycon)\b", re.MULTILINE)
"""Other names of Python blocks, which `BLOCK` does not find."""
# How many `no-run` blocks a file may hold: shown for reading, because they need what a test cannot have.
NO_RUN_ALLOWED: dict[str, int] = {}


def blocks(text: str) -> list[tuple[bool, str]]:
    """(is run, code) of each Python block, moved down to its own line number for tracebacks."""
    return [
        ("no-run" not in match["tag"], "\n" * text.count("\n", 0, match.start("code")) + match["code"])
        for match in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_block_runs_in_order(document: Path, tmp_path: Path) -> None:
    text = document.read_text()
    assert not OTHER_NAMES.findall(text), "a block of another name does not run: call it python"
    found = blocks(text)
    for _, code in found:
        compile(code, str(document), "exec")
    name = str(document.relative_to(ROOT))
    assert sum(not is_run for is_run, _ in found) <= NO_RUN_ALLOWED.get(name, 0), f"too many no-run in {name}"
    script = tmp_path / "blocks.py"
    # Each block is compiled under the document's name, so that a traceback points into the document.
    script.write_text(
        f"blocks = {[code for is_run, code in found if is_run]!r}\n"
        "space = globals()\n"
        f"for block in blocks:\n    exec(compile(block, {name!r}, 'exec'), space)\n"
    )
    (tmp_path / "cwd").mkdir()
    run = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path / "cwd",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_the_first_script_of_a_reader_trains_over_stages_and_replicas(document: str, tmp_path: Path) -> None:
    """Each process makes the same data: stages that get different samples are refused."""
    code = next(code for _, code in blocks((ROOT / document).read_text()) if "varuna.wrap(" in code)
    (tmp_path / "train.py").write_text(f"{code}\nprint('trained', model.iteration)\n")
    (batch_size,) = re.findall(r"varuna\.wrap\(.*batch_size=(\d+)", code)
    options = ["--ngpus-per-server", "4", "--nstages", "2", "--batch-size", batch_size, "--chunk-size", "3"]
    run = subprocess.run(
        [sys.executable, "-m", "varuna.launcher", *options, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "trained" in run.stdout


def test_a_block_is_found_with_its_tag_and_its_line() -> None:
    text = "Title\n```python\nx = 1\n```\n```python no-run\nx = 2\n```\n```bash\nls\n```\n"
    assert blocks(text) == [(True, "\n\nx = 1\n"), (False, "\n\n\n\n\nx = 2\n")]
    assert not OTHER_NAMES.findall(text) and OTHER_NAMES.findall("Text\n  ```py\nx = 1\n```\n")
