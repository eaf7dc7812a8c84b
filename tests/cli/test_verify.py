"""`varuna verify`: the function that it calls, its output, and its exit codes (PRO-1, B1)."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import Cli

SCRIPT = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, coupled):
        super().__init__()
        self.layers, self.coupled = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), coupled

    def forward(self, x):
        y = self.layers(x)
        if self.coupled:
            y = y.sort(0).values
        return (y.cumsum(0) if self.coupled else y).square().mean()


def get_batch(size):
    return {"x": torch.randn(size, 4)}


def make():
    return Net("coupled" in sys.argv), get_batch, lambda parameters: torch.optim.SGD(parameters, lr=0.1)


def alone():
    return Net(False)


def number():
    return 3


def unknown():
    return {"model": Net(False), "sample": get_batch(4), "optimiser": None}


def without_inputs():
    return {"model": Net(False)}


def broken():
    raise OSError("no such file: data.bin")


def leaves():
    sys.exit(0)


def no_model():
    return Net, get_batch


value = 3
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_exit_code_says_whether_all_layouts_are_equal(cli: Cli, script: Path) -> None:
    """B1, PRO-1: the function is that of `varuna profile`."""
    options = ("--layouts", "1x2", "--steps", "2", "--batch_size", "5")
    assert cli("verify", f"{script}:make", *options) == 0, cli.err
    assert "Net: 2 steps of 5 samples in fp64, varuna" in cli.out
    assert "verdict: equal: all 1 layouts train as one plain process does" in cli.out
    assert "layers.0.weight" not in cli.out
    assert cli("verify", f"{script}:make", *options, "--verbose") == 0, cli.err
    assert "layers.0.weight  parameter  " in cli.out and "verdict: equal" in cli.out
    assert cli("verify", f"{script}:make", *options, "--json", "--", "coupled") == 1, cli.err
    found = json.loads(cli.out)
    assert found["status"] in ("differs", "refused") and "train.py:" in cli.out


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("train.py", "names no function (write SCRIPT:FUNCTION"),
        ("{script}:missing", "has no function 'missing' (it has "),
        ("{script}:value", "has no function 'value'"),
        ("nowhere.py:make", "there is no script nowhere.py"),
        ("{script}:alone", "returned a model alone; it must return (model, sample)"),
        ("{script}:number", "returned a int; it must return (model, sample)"),
        ("{script}:unknown", "returned a dict with optimiser; known are model, sample, optimizer"),
        ("{script}:without_inputs", "it must have `model`, and `sample` or `make_batch`"),
        ("{script}:broken", "raised OSError: no such file: data.bin"),
        ("{script}:no_model", "model must be a torch.nn.Module, not the class Net"),
    ],
)
def test_a_function_that_cannot_be_used_is_exit_code_2(
    cli: Cli, script: Path, target: str, words: str
) -> None:
    """B1, PRO-1: the error names what is wrong and what to do."""
    assert cli("verify", target.format(script=script)) == 2
    assert words in cli.err


def test_a_script_that_exits_is_not_verified(cli: Cli, script: Path) -> None:
    """B1, PRO-1: status 0 of a script without a guard would tell CI that all layouts are equal."""
    assert cli("verify", f"{script}:leaves") == 2
    assert "leaves exited with status 0 (put code that runs and exits under" in cli.err
    script.write_text(f"{SCRIPT}\nsys.exit(3)\n")
    assert cli("verify", f"{script}:make") == 2
    assert "train.py exited with status 3" in cli.err
