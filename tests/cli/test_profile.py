"""`varuna profile` measures the model of a user's script and reports errors of the script."""

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import Cli, on_a_terminal
from varuna.plan.profile_file import read_profile

SCRIPT = """
import argparse

import torch
from torch import nn

from varuna import CutPoint
from varuna.measure.stopwatch import Effort


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(layers))

    def forward(self, x):
        for layer, cut in zip(self.layers, self.cuts):
            x = cut(torch.relu(layer(x)))
        return x.square().mean()


def get_batch(size):
    return {"x": torch.randn(size, 8)}


def make():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int)
    layers = parser.parse_args().layers
    quickly = {"message_bytes": [1024, 65536], "effort": Effort(seconds=0.01, fewest=2, most=3)}
    return {"model": Net(layers), "get_batch": get_batch, "optimizer": torch.optim.SGD, **quickly}


def number():
    return 3


def typo():
    return {"model": Net(2), "get_batches": get_batch}


def stranger():
    return {"model": Net(2), "get_batch": get_batch, "colour": "blue"}


def uncut():
    return nn.Linear(8, 8), get_batch


def boom():
    return [][1]
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@pytest.mark.timeout(300)
def test_a_script_is_profiled_with_a_progress_bar_and_then_planned(script: Path, cli: Cli) -> None:
    """V24"""
    folder = script.parent / "profile"
    arguments = ["profile", f"{script}:make", "--out", folder, "--device", "cpu"]
    seen = on_a_terminal(*arguments, "--sizes", "1,2", "--", "--layers", "3")
    assert "links within a machine" in seen and "micro-batch size 2" in seen and "━" in seen
    made = read_profile(folder)
    assert len(made.segments) == 4 and made.optimizer.name == "SGD"
    assert "micro-batches of 1, 2" in " ".join(seen.split())
    assert "not measured: between: all processes ran on one machine" in seen
    assert cli("plan", folder, "--devices", 2, "--batch-size", 8, "--json") == 0
    assert json.loads(cli.out)["proposals"][0]["forecast"]["seconds"] > 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "number",
            "returned int; it must return (model, get_batch), (model, get_batch, optimizer), or a dict",
        ),
        ("typo", "returned a dict of model, get_batches; it must return"),
        ("stranger", "returned a dict with colour; known are model, get_batch, optimizer, batch_dims"),
        ("mak", "has no function 'mak' (it has CutPoint, Effort, Net, get_batch, make, number"),
        ("", "names no function (write SCRIPT:FUNCTION, such as train.py:make_model)"),
    ],
)
def test_a_missing_function_or_a_wrong_result_is_refused(
    cli: Cli, script: Path, function: str, message: str
) -> None:
    assert cli("profile", f"{script}:{function}") == 2
    assert message in cli.err and cli.err.count("\n") == 1


def test_an_error_in_the_script_shows_the_line_of_the_script(cli: Cli, script: Path) -> None:
    path = list(sys.path)
    assert cli("profile", f"{script}:boom") == 2
    first, *_, second_last, last = cli.err.splitlines()
    assert first == "Traceback (most recent call last):" and "varuna/" not in cli.err
    assert second_last == "IndexError: list index out of range"
    assert last == f"varuna: {script}:boom raised IndexError: list index out of range"
    script.write_text("import nothing_that_exists")
    assert cli("profile", f"{script}:make") == 2
    assert cli.err.splitlines()[-1].endswith(
        "train.py raised ModuleNotFoundError: No module named 'nothing_that_exists'"
    )
    assert sys.path == path


@pytest.mark.parametrize(
    ("option", "wrong", "message"),
    [
        ("--sizes", "0", "--sizes must be 1 or more, not 0"),
        ("--sizes", "1,two", "--sizes '1,two' must be whole numbers separated by commas"),
        ("--device", "tpu", "--device must be cpu, cuda, cuda:N or a number, not 'tpu'"),
        ("--precision", "fp8", "precision must be one of fp32, bf16, fp16, not 'fp8'"),
        ("--per-machine", "0", "gpus_per_node must be a positive whole number, not 0"),
    ],
)
def test_invalid_options_of_profile_are_refused_with_their_name(
    cli: Cli, script: Path, option: str, wrong: str, message: str
) -> None:
    assert cli("profile", f"{script}:uncut", "--device", "cpu", option, wrong) == 2
    assert message in cli.err and cli.err.count("\n") == 1


def test_a_missing_script_is_refused(cli: Cli, tmp_path: Path) -> None:
    assert cli("profile", tmp_path / "nowhere.py:make") == 2
    assert cli.err == f"varuna: there is no script {tmp_path}/nowhere.py\n"
