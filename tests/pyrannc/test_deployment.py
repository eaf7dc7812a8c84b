"""How a model is spread: chosen, kept in a file, shown, refused; and errors that reach every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

import pyrannc
from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.pyrannc.jobs import make
from tests.pyrannc.models import WIDTH
from varuna.cli import app
from varuna.plan_file import read_plan


def wrapped(model: nn.Module, **options: Any) -> RaNNCModule:
    return RaNNCModule(model, device="cpu", timeout_seconds=20, **options)


def test_a_deployment_is_saved_loaded_shown_and_refused(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R10, R13, R14: a model that fits gets one stage; the search is skipped where there is a file."""
    file, forced = tmp_path / "deployment.json", tmp_path / "forced.json"
    for chosen, as_forced, loaded, messages in pool.run(deploy, 2, str(file), str(forced), timeout=150):
        assert chosen == [(0, 1)] and as_forced == [(0,), (1,)] and loaded == as_forced
        assert "another model" in messages[0] and "needs the model to be spread" in messages[1]
    assert read_plan(file).plan.depth == 1
    with pytest.raises(ValueError, match="is for 2 ranks, but there are 1"):
        wrapped(make("Simple"), load_deployment=file)(torch.randn(2, WIDTH))
    pyrannc.show_deployment(forced)
    shown = capsys.readouterr().out
    for word in ("operations", "parameters", "ranks", "replicas", "bubble", "memory", "compute", "2 stages"):
        assert word in shown
    command = CliRunner().invoke(app, ["show", str(file)])
    assert command.exit_code == 0 and "plain data parallel (this plan)" in command.output


def deploy(file: str, forced: str) -> tuple[Any, Any, Any, list[str]]:
    x = torch.randn(2, WIDTH)
    stages = []
    early = wrapped(make("Simple"))
    with pytest.raises(RuntimeError) as too_early:
        early.save_deployment(file)
    for options, target in (
        ({}, file),
        ({"partition_num": 2}, forced),
        ({"load_deployment": True, "deployment_file": forced}, None),
    ):
        model = wrapped(make("Simple"), **options)
        model(x)
        stages.append([stage.ranks for stage in model.plan.stages])
        if target is not None:
            model.save_deployment(target)
        pyrannc.barrier()
        model.undeploy()
    with pytest.raises(Exception) as other:
        wrapped(make("Shared"), load_deployment=forced)(x)
    early.undeploy()
    return (*stages, [str(other.value), str(too_early.value)])  # type: ignore[return-value]


class Divided(nn.Module):
    """Its forward is another one on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.tanh(y) if dist.get_rank() else torch.relu(y)


class Looking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Fixed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(4, -1)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Triple.apply(x)
        return y


def refusal(what: str) -> str:
    rank, x = dist.get_rank(), torch.randn(4, WIDTH)
    model: nn.Module = make("Simple")
    options: dict[str, Any] = {}
    if what == "names":
        model = nn.Linear(WIDTH, 2 + rank)
    elif what == "forward":
        model = Divided()
    elif what == "memory":
        options["mem_limit_gb"] = 1e-6
    elif what == "layout":
        options.update(partition_num=2, replica_num=2)
    elif what == "shape":
        x = torch.randn(4, WIDTH + rank)
    elif what in ("Looking", "Fixed", "Custom"):
        model = {"Looking": Looking, "Fixed": Fixed, "Custom": Custom}[what]()
    with pytest.raises(Exception) as refused:
        wrapper = wrapped(model, **options)
        if what == "one rank" and rank == 1:
            x = x.int().float() * float("nan")
            raise_in(wrapper)
        wrapper(x)
    return str(refused.value) + "".join(getattr(refused.value, "__notes__", ()))


def raise_in(wrapper: RaNNCModule) -> None:
    """An error that only one rank meets, in the midst of a call."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("something of this rank's own")

    wrapper._deploy = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("names", ["'weight'", "[2, 6]", "[3, 6]"]),
        ("forward", ["another than on rank 0", "tanh", "relu"]),
        ("memory", ["no layout of 2 ranks fits", "needs"]),
        ("layout", ["partition_num 2", "replica_num 2", "2 ranks"]),
        ("shape", ["'x'", "rank 1", "rank 0"]),
        ("one rank", ["something of this rank's own"]),
        ("Looking", ["test_deployment.py", "x.sum() > 0"]),
        ("Fixed", ["test_deployment.py", "x.view(4, -1)", "batch size"]),
        ("Custom", ["test_deployment.py", "Triple", "lose its own backward"]),
    ],
)
def test_a_refusal_reaches_every_rank_and_says_why(pool: Pool, what: str, expected: list[str]) -> None:
    """R6, R11, R17: no rank hangs, and each has the message."""
    for message in pool.run(refusal, 2, what):
        for word in expected:
            assert word in message, message
