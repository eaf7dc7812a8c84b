"""Deployments: chosen, saved, loaded, shown and refused; and errors that reach every rank."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from typer.testing import CliRunner

import pyrannc
import pyrannc.calls
import pyrannc.partitioning
from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.pyrannc.jobs import make
from tests.pyrannc.models import WIDTH
from varuna.cli.main import app
from varuna.plan.plan_file import PinnedPlan, read_plan, write_plan


def wrapped(model: nn.Module, **options: Any) -> RaNNCModule:
    return RaNNCModule(model, device="cpu", timeout_seconds=20, **options)


def test_a_deployment_is_saved_loaded_shown_and_refused(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R10, R13, R14: a model that fits gets one stage; the search is skipped where there is a file."""
    file, forced = tmp_path / "deployment.json", tmp_path / "forced.json"
    for chosen, as_forced, loaded, messages in pool.run(deploy, 2, str(file), str(forced), timeout=150):
        assert chosen == [(0, 1)] and as_forced == [(0,), (1,)] and loaded == as_forced
        assert "another model" in messages[0] and "is not partitioned yet" in messages[1]
    assert read_plan(file).plan.depth == 1
    with pytest.raises(ValueError, match="another number of ranks: 2, expected 1"):
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


class Deep(nn.Sequential):
    """Of weights more than anything else; BatchNorm's statistics change with every forward, dropout draws."""

    def __init__(self) -> None:
        layers = [(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.2)) for _ in range(4)]
        super().__init__(nn.Linear(WIDTH, 64), *(layer for parts in layers for layer in parts))


def test_measuring_decides_the_plan_and_does_not_change_the_model(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R9, R10, R12, R13: the same plan on every rank, in every run, and without devices."""
    found, same = pool.run(measured, 2, str(tmp_path), timeout=150)
    assert same == found
    first, again, estimated, hurried, forced, smaller = found
    assert first.basis.startswith("measured on cpu") and first.speed is not None
    assert first.plan.depth == 1 and not first.plan.stages[0].recompute
    assert again == first  # to the last digit: nothing was measured twice
    assert (
        estimated.basis
        == hurried.basis
        == ("estimated from the model's shapes, with typical speeds of such devices")
    )
    assert estimated.plan == first.plan
    assert forced.plan.depth == 2 and forced.plain is not None
    # One stage does not fit: the stages that do are of measured segments too.
    assert smaller.plan.depth == 2 and smaller.basis == first.basis
    assert max(stage.memory.total for stage in smaller.forecast.stages) <= 0.9 * smaller_memory(smaller)
    # Without devices, values or ranks: by the same times the same plan; by the speed alone, about the same.
    with torch.device("meta"):
        model, x = Deep(), torch.randn(8, WIDTH)
    wished = {"ranks": 2, "device": "cpu", "memory_gb": smaller_memory(smaller) / (1 << 30)}
    profile = {"load_graph_profile": True, "graph_profile_file": str(tmp_path / "profile.json")}
    dry = pyrannc.dry_run(model, [x], **wished, **profile)  # type: ignore[arg-type]
    assert dry.plan == smaller.plan and dry.forecast == smaller.forecast
    dry = pyrannc.dry_run(
        model,
        [x],
        **wished,
        speed=tmp_path / "deployment.json",
        out=tmp_path / "dry.json",  # type: ignore[arg-type]
    )
    assert dry.plan.depth == 2 and first.speed.measured_on in dry.basis
    pyrannc.show_deployment(tmp_path / "dry.json")
    shown = capsys.readouterr().out
    assert "times are estimated from the model's shapes, with the speed of cpu" in shown
    assert "plain data parallel" in shown and "and needs" in shown
    with pytest.raises(ValueError, match="memory_gb"):
        pyrannc.dry_run(model, [x], ranks=2)
    write_plan(tmp_path / "estimated.json", estimated)
    with pytest.raises(ValueError, match="has no speed"):
        pyrannc.dry_run(model, [x], ranks=2, speed=tmp_path / "estimated.json")
    with pytest.raises(ValueError, match="of another model"):
        pyrannc.dry_run(make("Simple"), [torch.randn(2, WIDTH)], ranks=2, **profile)  # type: ignore[arg-type]


def smaller_memory(pinned: PinnedPlan) -> int:
    assert pinned.cluster is not None
    return pinned.cluster.machines[0].memory_bytes


def measured(folder: str) -> list[PinnedPlan]:
    profile = {"graph_profile_file": f"{folder}/profile.json"}
    found = []
    outputs, states = [], []
    limit = 0.0
    for options in (
        {"save_graph_profile": True, **profile},
        {},
        {"measure": False},
        {"measure_seconds": 1e-9},
        {"partition_num": 2},
        {"load_graph_profile": True, **profile},
    ):
        torch.manual_seed(1)
        model = Deep()
        optimizer = torch.optim.Adam(model.parameters())
        wrapper = RaNNCModule(
            model, optimizer, device="cpu", seed=1, timeout_seconds=20, mem_limit_gb=limit, **options
        )
        torch.manual_seed(2)
        x = torch.randn(8, WIDTH)
        torch.manual_seed(3)
        outputs.append(wrapper(x).detach())
        assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state())
        assert all(parameter.grad is None for parameter in wrapper.parameters())
        states.append(wrapper.state_dict())
        assert wrapper._partitioned is not None
        found.append(wrapper._partitioned.pinned)
        if not limit:
            wrapper.save_deployment(f"{folder}/deployment.json")
        if options.get("partition_num"):
            limit = 0.7 * found[0].forecast.stages[0].memory.total / (1 << 30)
        pyrannc.barrier()
        wrapper.undeploy()
    for number in range(4):  # measured or not, it is the same model afterwards
        assert torch.equal(outputs[number], outputs[0])
        assert all(torch.equal(value, states[0][name]) for name, value in states[number].items())
    return found


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


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Drawing.apply(x)
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
        options["partition_num"] = 2  # with one stage, lengths may differ
    elif what in ("Looking", "Fixed", "Custom"):
        model = {"Looking": Looking, "Fixed": Fixed, "Custom": Custom}[what]()
    elif what == "new session":
        options["partition_num"] = 2
    with pytest.raises(Exception) as refused, ExitStack() as stack:
        wrapper = wrapped(model, **options)
        if what == "one rank" and rank == 1:
            x = x.int().float() * float("nan")
            own_error = ZeroDivisionError("something of this rank's own")  # in the midst of a call
            stack.enter_context(patch.object(pyrannc.calls.AgreedCall, "capture", side_effect=own_error))
        if what == "new session" and rank == 1:
            error = ZeroDivisionError("no memory for this stage")
            stack.enter_context(patch.object(pyrannc.partitioning, "adopted_state", side_effect=error))
        wrapper(x)
    return str(refused.value) + "".join(getattr(refused.value, "__notes__", ()))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("names", ["'weight'", "[2, 6]", "[3, 6]"]),
        ("forward", ["differs from the one on rank 0", "tanh", "relu"]),
        ("memory", ["no layout of 2 ranks fits", "needs"]),
        ("layout", ["partition_num 2", "replica_num 2", "2 ranks"]),
        ("shape", ["'x'", "rank 1", "rank 0"]),
        ("one rank", ["something of this rank's own"]),
        ("new session", ["no memory for this stage"]),
        ("Looking", ["test_deployment.py", "x.sum() > 0"]),
        ("Fixed", ["test_deployment.py", "x.view(4, -1)", "batch size"]),
        ("Custom", ["test_deployment.py", "Drawing", "draws random numbers"]),
    ],
)
def test_an_error_reaches_every_rank_with_its_reason(pool: Pool, what: str, expected: list[str]) -> None:
    """R6, R11, R17: no rank hangs, and each has the message."""
    for message in pool.run(refusal, 2, what):
        for word in expected:
            assert word in message, message
