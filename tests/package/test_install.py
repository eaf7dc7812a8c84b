"""The wheel and the source distribution install under their own name and work outside of a checkout."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import varuna

ROOT = Path(__file__).parents[2]
SITE = sysconfig.get_path("purelib")

TRAIN = """
import sys
import torch, varuna, pyrannc
from varuna import CutPoint, Varuna

assert varuna.__file__.startswith(sys.prefix), varuna.__file__
assert pyrannc.__file__.startswith(sys.prefix), pyrannc.__file__

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.cut, self.second = torch.nn.Linear(4, 4), CutPoint(), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.second(self.cut(self.first(x))).pow(2).mean()

inputs = {"x": torch.ones(4, 4)}
model = Varuna(Net(), "0;", inputs, batch_size=4, chunk_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.set_optimizer(optimizer)
losses = []
for step in range(3):
    loss, overflow = model.step(inputs)
    optimizer.step()
    model.zero_grad()
    losses.append(loss)
assert losses[-1] < losses[0]
print("trained")
"""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The source distribution of this tree, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    build = "import os, sys; from hatchling import build; os.chdir(sys.argv[1]); "
    build += "getattr(build, sys.argv[2])(sys.argv[3])"
    run(sys.executable, "-c", build, ROOT, "build_sdist", folder, cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    run(sys.executable, "-c", build, source, "build_wheel", folder, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel, "source": source}


def test_the_distribution_is_named_varuna_torch(built: dict[str, Path]) -> None:
    version = varuna.__version__
    assert built["sdist"].name == f"varuna_torch-{version}.tar.gz"
    assert built["wheel"].name == f"varuna_torch-{version}-py3-none-any.whl"


def test_the_wheel_holds_the_two_packages_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
    code = {name for name in names if ".dist-info/" not in name}
    tree = {
        str(path.relative_to(ROOT))
        for package in ("varuna", "pyrannc")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert code == tree
    assert {"varuna/py.typed", "varuna/cli/main.py", "varuna/page/static/main.js"} <= code


def test_the_source_distribution_holds_what_the_tests_need(built: dict[str, Path]) -> None:
    for name in ("pyproject.toml", "LICENSE", "README.md", "tests/conftest.py", "docs/index.md", "Makefile"):
        assert (built["source"] / name).is_file(), name


def test_an_installed_wheel_runs_its_command_and_trains(built: dict[str, Path], tmp_path: Path) -> None:
    """In a fresh environment, outside of the checkout; torch and the other dependencies are lent to it."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = home.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps",
        "--disable-pip-version-check", built["wheel"], cwd=tmp_path)  # fmt: skip
    (site / "dependencies.pth").write_text(SITE + "\n")
    assert run(home / "bin" / "varuna", "--version", cwd=tmp_path).startswith(f"varuna {varuna.__version__}")
    assert "run" in run(home / "bin" / "varuna", "--help", cwd=tmp_path)
    assert "--machine-list" in run(python, "-m", "varuna.run_varuna", "--help", cwd=tmp_path)
    assert run(python, "-c", TRAIN, cwd=tmp_path).endswith("trained\n")
    shown = run(home / "bin" / "varuna", "demo", "--steps", "3", cwd=tmp_path)
    assert "losses of all 3 steps over 4 workers equal the single process's" in shown
