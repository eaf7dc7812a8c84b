"""With the operation cache, the graph equals the one that torch traces without it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.fx.proxy
import torch.nn.functional as F
from torch import Tensor, nn

from varuna.capture import Captured, Source, opaque
from varuna.capture.trace import trace as tracing
from varuna.plan.cut.blocks import partition
from varuna.types import PrecisionName

WIDTH = 6


class Repeated(nn.Module):
    """Several equal layers."""

    def __init__(self, run: Callable[["Repeated", nn.Module, Tensor], Tensor], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.run = run
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept.clear()
        for layer in self.layers:
            x = self.run(self, layer, x)
        return F.mse_loss(x, y) + sum(kept.mean() for kept in self.kept)


def _parts(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    left, right = layer(x).chunk(2, -1)
    values, _ = torch.max(right, -1, keepdim=True)
    return x + torch.cat([left * values, right[..., 1:], right[:, :1]], dim=-1)


def _sizes(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    rows = x.shape[0] * 2
    return layer(x).view(rows, -1).reshape(x.size(0), WIDTH).expand(x.shape[0], WIDTH) / x.shape[0]


def _drawn(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(layer(x), 0.5, training=model.training) + torch.randn_like(x)


def _without_gradient(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = layer(x).abs().amax(-1, keepdim=True)
    return layer(x) / (scale + 1) if scale.requires_grad is False and x.is_floating_point() else x


def _in_place(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    x += 1
    x[:, 0] = 0
    x.narrow(1, 1, 2).mul_(x[:, :1])
    return F.relu(x, inplace=True)


def _statistics(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = model.norm(layer(x))
    return result


def _state(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    """Keeps a value of each layer: the model's own code runs in every layer."""
    x = torch.tanh(layer(x)) * (1 + len(model.kept))
    model.kept.append(x)
    return x


def _nested(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    x = torch.sin(torch.sin(layer(x)))
    result: Tensor = torch.cond(x.sum() > 0, lambda a, b: a * b, lambda a, b: a - b, (x, torch.sin(x)))
    return result


def _constants(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) * torch.tensor([float(len(model.kept))] * WIDTH) + torch.arange(WIDTH)


def _half_once(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = layer(x)
    return layer(x.float())


def _half(model: Repeated, layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (layer(x) + layer(x)).float()


RUNS = [_parts, _sizes, _drawn, _without_gradient, _in_place, _statistics, _state, _nested, _constants]
RUNS += [_half_once, _half]


def _capture(model: nn.Module, precision: PrecisionName = "fp32") -> Captured:
    inputs = {"x": torch.zeros(4, WIDTH), "y": torch.zeros(4, WIDTH)}
    return Source(model, partition=partition, precision=precision).capture(inputs, training=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("run", RUNS)
def test_the_graph_equals_the_one_that_torch_traces(
    run: Any, precision: PrecisionName, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = _capture(Repeated(run), precision)
    monkeypatch.setattr(tracing, "OperationCache", lambda _: nullcontext())
    plain = _capture(Repeated(run), precision)
    assert quick.listing == plain.listing and quick.graph == plain.graph


def test_torch_traces_a_repeated_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """R12: deep models trace as many operations as shallow ones."""
    create = torch.fx.proxy.TracerBase.create_node
    traced: list[object] = []

    def counted(tracer: Any, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "call_function":
            traced.append(target)
        return create(tracer, kind, target, *args, **kwargs)

    monkeypatch.setattr(torch.fx.proxy.TracerBase, "create_node", counted)
    counts = []
    for layers in (3, 12):
        traced.clear()
        captured = _capture(Repeated(_parts, layers))
        counts.append(len(traced))
        assert sum(segment.num_operations for segment in captured.graph.segments) > 7 * layers
    assert counts[0] == counts[1]


def test_opaque_modules_are_not_cached() -> None:
    model = Repeated(_parts)
    opaque(model, "layers.*")
    assert sum("opaque" in line or "leaf" in line for line in _capture(model).listing) >= 3
