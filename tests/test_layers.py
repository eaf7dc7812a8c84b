"""The house keeps its shape: who may import whom, and that importing does nothing."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"capture", "measure", "plan", "execute", "checkpoint", "morph"}
GROUND = {"types", "errors", "units"}
TORCH_FREE = {"schedule", "observe", "plan", "morph", "types", "codec", "errors", "units"}

LEVELS = {**dict.fromkeys(GROUND, 0), "codec": 1, "schedule": 2, "observe": 2, **dict.fromkeys(ROOMS, 3)}
DOOR = 4
FILES = sorted((ROOT / "varuna").rglob("*.py"))


def part_of(path: Path) -> str:
    """The part of the house a file belongs to: "types", "plan", ..., or the door's own name."""
    return path.relative_to(ROOT / "varuna").with_suffix("").parts[0]


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Every module that a file names in an import, also inside functions, with relative ones resolved."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def modules_of(path: Path) -> list[str]:
    return list(imported_modules(path.read_text(), path.relative_to(ROOT).parent.parts))


def imported_parts(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in modules_of(path) if name.startswith("varuna.")}
    return {name for name in names if is_part(name)} - {part_of(path)}


def is_part(name: str) -> bool:
    return (ROOT / "varuna" / name).is_dir() or (ROOT / "varuna" / f"{name}.py").is_file()


def level(part: str) -> int:
    return LEVELS.get(part, DOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_below_and_no_room_imports_another(path: Path) -> None:
    if level(part_of(path)) == DOOR:
        return
    wrong = {part for part in imported_parts(path) if level(part) >= level(part_of(path))}
    if part_of(path) in GROUND:
        wrong -= GROUND
    assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_runs_on_the_managers_machine_imports_no_torch(path: Path) -> None:
    if part_of(path) in TORCH_FREE:
        assert not [name for name in modules_of(path) if name.split(".")[0] == "torch"]


def test_every_folder_is_a_known_part_of_the_house() -> None:
    folders = {path.parent.name for path in (ROOT / "varuna").glob("*/__init__.py")}
    assert folders <= set(LEVELS), "a new room has to be named in this test and in CONTRIBUTING.md"


def test_an_import_hidden_in_a_function_and_written_relatively_is_seen() -> None:
    source = "def f():\n    from ..execute import engine"
    assert "varuna.execute.engine" in list(imported_modules(source, ("varuna", "plan")))


WATCH_AN_IMPORT = """
import os, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
environment = dict(os.environ)
import varuna, pyrannc
assert "torch" not in sys.modules, "import varuna imported torch"
assert "msgspec" not in sys.modules, "import varuna imported msgspec"
assert threading.active_count() == 1
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}
assert environment == dict(os.environ)
"""


def test_importing_has_no_side_effects(tmp_path: Path) -> None:
    """R17, for both packages: no torch, no output, no file, no signal handler, no thread."""
    run = subprocess.run(
        [sys.executable, "-B", "-c", WATCH_AN_IMPORT],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
