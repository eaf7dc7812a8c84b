"""The structure of the library: which file may import which, unique class names, imports without effects."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

LEVELS = {
    **dict.fromkeys(
        ["types", "errors", "units", "codec", "files", "environment", "processes", "addresses", "secure"], 0
    ),
    **dict.fromkeys(["schedule", "observe"], 1),
    **dict.fromkeys(["capture", "measure", "plan", "execute", "checkpoint", "morph"], 2),
    **dict.fromkeys(["train", "profile", "simulate", "page"], 3),
    **dict.fromkeys(["pyrannc", "hf"], 4),
    **dict.fromkeys(["verification", "lightning", "chaos", "demo"], 5),
    **dict.fromkeys(["cli"], 6),
    **dict.fromkeys(["__main__", "run_varuna", "launcher"], 7),
}
"""Every package and top-level file, from the bottom up; a file imports only from lower levels."""
BASE = {name for name, level in LEVELS.items() if level == 0}
TORCH_FREE = BASE | {"schedule", "observe", "plan", "morph", "simulate", "page", "chaos", "cli"}
WITH_EXTRAS = {
    **dict.fromkeys(["transformers", "accelerate"], "varuna/hf/trainer/"),
    "lightning": "varuna/lightning/",
    "aiohttp": "varuna/page/",
    "prometheus_client": "varuna/observe/prometheus.py",
    "obstore": "varuna/checkpoint/store/s3.py",
    **{name: f"varuna/observe/trackers/{name}_" for name in ("tensorboard", "wandb", "mlflow", "trackio")},
}
"""Modules of optional packages, and the files that are imported only if these are installed."""
MOST_FILES_AT_THE_TOP = 14
MOST_FILES_IN_A_FOLDER = 16
FILES = [*sorted((ROOT / "varuna").rglob("*.py")), *sorted((ROOT / "pyrannc").rglob("*.py"))]


def package_of(path: Path, root: Path = ROOT) -> str:
    """The entry of LEVELS that a file belongs to: "types", "plan", "pyrannc", ..."""
    first, *rest = path.relative_to(root).with_suffix("").parts
    return first if first == "pyrannc" else rest[0]


def package_of_module(name: str) -> str | None:
    """The entry of LEVELS that a module belongs to; None for a module of another library."""
    first, *rest = name.split(".")
    if first == "pyrannc":
        return "pyrannc"
    return rest[0] if first == "varuna" and rest else None


def imported_modules(source: str, package: tuple[str, ...], *, at_import_time: bool = False) -> Iterator[str]:
    """Every module that a file imports, inside functions too unless only import time matters."""
    for node in _walk(ast.parse(source), skip_functions=at_import_time):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _walk(tree: ast.AST, *, skip_functions: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if skip_functions and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_type_checkers(node)
        ):
            continue
        yield node
        yield from _walk(node, skip_functions=skip_functions)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def wrong_imports(path: Path, root: Path = ROOT) -> set[str]:
    """The packages that a file imports although they are not below its own."""
    own = package_of(path, root)
    if own == "__init__":  # the package itself: it names what users import, and imports it when first used
        return set()
    modules = imported_modules(path.read_text(), path.relative_to(root).parent.parts)
    packages = {package_of_module(name) for name in modules} & set(LEVELS) - {own}
    wrong = {package for package in packages if package and LEVELS[package] >= LEVELS[own]}
    return wrong - BASE if own in BASE else wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_from_lower_layers(path: Path) -> None:
    assert not wrong_imports(path)


@pytest.mark.parametrize(
    ("file", "line", "found"),
    [
        ("varuna/plan/cost/costs.py", "from varuna.execute.step import engine", {"execute"}),
        ("varuna/plan/cost/costs.py", "from ...execute.step import engine", {"execute"}),
        ("varuna/plan/cost/costs.py", "def f():\n    from varuna.train import varuna", {"train"}),
        ("varuna/types.py", "import varuna.plan.plan_file", {"plan"}),
        ("varuna/train/varuna.py", "from varuna.cli.plan import plan", {"cli"}),
        ("varuna/train/varuna.py", "from varuna.profile.profiler import Profiler", {"profile"}),
        ("varuna/capture/model/tied_weights.py", "from pyrannc import process", {"pyrannc"}),
        ("varuna/plan/cost/costs.py", "from varuna.types import Plan", set()),
    ],
)
def test_a_planted_import_of_a_higher_layer_is_found(
    tmp_path: Path, file: str, line: str, found: set[str]
) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(line)
    assert wrong_imports(planted, tmp_path) == found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_managers_machine_needs_no_torch(path: Path) -> None:
    if package_of(path) in TORCH_FREE:
        names = imported_modules(
            path.read_text(),
            path.relative_to(ROOT).parent.parts,
            at_import_time=package_of(path) in ("cli", "morph"),
        )
        assert not [name for name in names if name.split(".")[0] == "torch"]


def required_packages() -> set[str]:
    """What `pip install varuna-torch` brings, by the names of the modules."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split("[^a-z]", line)[0] for line in project["dependencies"]} | {"sympy"}  # torch requires it


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_an_installation_brings(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    found = imported_modules(path.read_text(), path.relative_to(ROOT).parent.parts, at_import_time=True)
    others = {module.split(".")[0] for module in found} - sys.stdlib_module_names - {"varuna", "pyrannc"}
    extra = {module for module, place in WITH_EXTRAS.items() if name.startswith(place)}
    assert not others - required_packages() - extra


def test_every_file_has_a_layer() -> None:
    packages = {package_of(path) for path in FILES} - {"__init__"}
    assert packages <= set(LEVELS), "give the new package a level in this test and in docs/design.md"


def test_folders_stay_small_enough_to_read() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in FILES:
        counts[str(path.parent.relative_to(ROOT))] += path.name != "__init__.py"
    assert counts["varuna"] <= MOST_FILES_AT_THE_TOP
    assert not {folder: count for folder, count in counts.items() if count > MOST_FILES_IN_A_FOLDER}


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
