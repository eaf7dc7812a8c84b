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


def test_a_block_is_found_with_its_tag_and_its_line() -> None:
    text = "Title\n```python\nx = 1\n```\n```python no-run\nx = 2\n```\n```bash\nls\n```\n"
    assert blocks(text) == [(True, "\n\nx = 1\n"), (False, "\n\n\n\n\nx = 2\n")]
    assert not OTHER_NAMES.findall(text) and OTHER_NAMES.findall("Text\n  ```py\nx = 1\n```\n")
