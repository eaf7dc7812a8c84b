"""The user's code as the manager compares it: a joiner with another version of a module is refused."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from varuna.environment import VarunaEnvironment
from varuna.morph.state import CodeIdentity
from varuna.train.hot.eligible import code_identity
from varuna.train.hot.hot_state import HotState

FILES = {
    "code/scripts/train.py": "import data, common, installed",
    "code/scripts/data.py": "shuffles = False",
    "code/scripts/models/layers.py": "width = 8",
    "code/common.py": "seed = 5",
    "code/scripts/plots.py": "colours = 3",
    "code/scripts/venv/lib/site-packages/installed.py": "version = 1",
    "elsewhere/other.py": "version = 1",
}
NOT_IMPORTED = "code/scripts/plots.py"


def wrap_on(machine: Path, changed: str, monkeypatch: pytest.MonkeyPatch) -> CodeIdentity:
    """Return the code of a worker on a machine whose copy of one file differs."""
    for place, text in FILES.items():
        (machine / place).parent.mkdir(parents=True, exist_ok=True)
        (machine / place).write_text(text + " # newer" * (place == changed))
    with monkeypatch.context() as worker:
        for place in FILES.keys() - {NOT_IMPORTED}:
            module = ModuleType(name := "__main__" if place.endswith("train.py") else Path(place).stem)
            module.__file__ = str(machine / place)
            worker.setitem(sys.modules, name, module)
        worker.chdir(machine / "code")
        hot = HotState.of(VarunaEnvironment(progress_file="page", hot="1"))
    captured = SimpleNamespace(graph=SimpleNamespace(fingerprint="layers"))
    sampled = SimpleNamespace(sampled=SimpleNamespace(captured=captured))
    model: Any = SimpleNamespace(_hot=hot, _programs=sampled)
    return code_identity(model)


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [
        ("", False),
        ("code/scripts/train.py", True),
        ("code/scripts/data.py", True),
        ("code/scripts/models/layers.py", True),
        ("code/common.py", True),
        (NOT_IMPORTED, False),
        ("code/scripts/venv/lib/site-packages/installed.py", False),
        ("elsewhere/other.py", False),
    ],
)
def test_a_joiner_with_another_version_of_a_module_has_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, is_other: bool
) -> None:
    """HOT-5: it would train on other samples or with another model."""
    job = wrap_on(tmp_path / "first", "", monkeypatch)
    joiner = wrap_on(tmp_path / "second", changed, monkeypatch)
    assert job.script and (joiner.script != job.script) == is_other
    assert (joiner.model, joiner.torch, joiner.varuna) == (job.model, job.torch, job.varuna)


def test_modules_that_are_imported_after_wrapping_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOT-5: a joiner has made fewer steps than the job, so it may not have imported them yet."""
    hot = HotState.of(VarunaEnvironment(progress_file="page", hot="1"))
    model: Any = SimpleNamespace(
        _hot=hot,
        _programs=SimpleNamespace(
            sampled=SimpleNamespace(captured=SimpleNamespace(graph=SimpleNamespace(fingerprint="layers")))
        ),
    )
    before = code_identity(model)
    late = ModuleType("late")
    late.__file__ = str(Path.cwd() / "late.py")
    monkeypatch.setitem(sys.modules, "late", late)
    assert code_identity(model) == before
