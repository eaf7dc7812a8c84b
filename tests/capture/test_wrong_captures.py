"""EXA-7: captures that were made wrong on purpose are found, in every precision, and named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.capture.models import batch_of
from tests.capture.wrong_captures import (
    Change,
    LanguageModel,
    after,
    aten,
    corrupt,
    instead,
    sentences,
    with_args,
)
from varuna.capture import Captured, Source, check_capture, opaque
from varuna.errors import CaptureError
from varuna.types import PrecisionName

LINEAR = aten.linear.default


class Wrong(NamedTuple):
    """An operation of the graph, which one of its kind, what is done to it, and words of the error."""

    operation: Any
    change: Change
    words: str = "the loss"
    number: int = 0


def same(x: Tensor) -> Tensor:
    return x


def read_the_ids(graph: fx.Graph, node: fx.Node) -> None:
    node.args = tuple(other for other in graph.nodes if other.name == "i_ids")


def without_row(grad: Tensor) -> Tensor:
    grad = grad.clone()
    grad[int(grad.norm(dim=1).argmax())] = 0
    return grad


def without_last_sample(x: Tensor) -> Tensor:
    return torch.cat([x[:-1], torch.zeros_like(x[-1:])])


WRONG: dict[str, Wrong] = {
    "lost custom backward": Wrong(
        "apply_Halved", instead(lambda x: [x.clone()]), "gradient of 'blocks.0.down"
    ),
    "dropped tie": Wrong(LINEAR, instead(lambda x, w, b: F.linear(x, w.detach(), b)), "'words.weight'", -1),
    "tie counted twice": Wrong("s_words_weight", after(same, gradient=lambda g: 2 * g), "'words.weight'"),
    "padding not masked": Wrong(aten.__or__.Tensor, instead(lambda future, padding: future)),
    "causal mask shifted": Wrong(aten.triu.default, with_args(lambda x, first: (x, first + 1))),
    "missing scale": Wrong(aten.mul.Tensor, instead(lambda x, scale: x * 1.0)),
    "stale weight": Wrong(LINEAR, instead(lambda x, w, b: F.linear(x, w * 0.999, b))),
    "detached branch": Wrong(aten.gelu.default, after(torch.detach), "gradient of 'blocks.0.up.bias'"),
    "another dropout mask": Wrong("dropout", with_args(lambda *args: (*args[:3], 7, *args[4:]))),
    "another dropout probability": Wrong("dropout", with_args(lambda x, p, *rest: (x, p - 0.05, *rest))),
    "dropout lost": Wrong("dropout", instead(lambda x, *rest: x), number=1),
    "lost residual": Wrong(aten.add.Tensor, instead(lambda x, y: y), number=2),
    "cast to integers": Wrong(LINEAR, after(lambda x: x + (x.int().to(x.dtype) - x).detach())),
    "transposed weight": Wrong(LINEAR, instead(lambda x, w, b: F.linear(x, w.t(), b)), number=2),
    "positions off by one": Wrong(aten.arange.default, after(lambda x: x + 1)),
    "swapped inputs": Wrong(aten.flatten.using_ints, read_the_ids, number=-1),
    "labels shifted": Wrong(aten.flatten.using_ints, after(lambda x: x.roll(1)), number=-1),
    "sign of one gradient": Wrong(LINEAR, after(same, gradient=torch.neg), "gradient of 'blocks.0.up.", 3),
    "one gradient times 1.01": Wrong(
        "s_blocks_1_up_bias", after(same, gradient=lambda g: g * 1.01), "gradient of 'blocks.1.up.bias' by"
    ),
    "one row of a gradient lost": Wrong(
        "s_words_weight", after(same, gradient=without_row), "'words.weight'"
    ),
    "one sample lost": Wrong(aten.add.Tensor, after(without_last_sample)),
    "counter not updated": Wrong(aten.add_.Tensor, instead(lambda x, y: x), "the buffer 'steps'"),
    "another momentum": Wrong(
        aten.batch_norm.default,
        with_args(lambda *args: (*args[:6], 0.2, *args[7:])),
        "the buffer 'norm.running_mean'",
    ),
    "another eps": Wrong(aten.layer_norm.default, with_args(lambda *args: (*args[:4], 1e-6, *args[5:]))),
    "mean in place of sum": Wrong(  # a captured model divides by the labels of the whole batch later
        aten.cross_entropy_loss.default, instead(lambda x, y, **_: F.cross_entropy(x, y))
    ),
    "evaluation in place of training": Wrong(
        aten.batch_norm.default, with_args(lambda *args: (*args[:5], False, *args[6:]))
    ),
    "another GELU": Wrong(aten.gelu.default, instead(lambda x: F.gelu(x, approximate="tanh"))),
    "lost bias": Wrong(LINEAR, instead(lambda x, w, b: F.linear(x, w)), number=4),
    "softmax over another dimension": Wrong(aten.softmax.int, with_args(lambda x, dim: (x, -2))),
}


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def capture(request: pytest.FixtureRequest) -> tuple[nn.Module, Captured]:
    precision: PrecisionName = request.param
    torch.manual_seed(0)
    model = LanguageModel()
    return model, Source(model, precision=precision).capture(sentences(3), training=True)


@pytest.fixture
def captured(capture: tuple[nn.Module, Captured]) -> Iterator[Captured]:
    yield capture[1]
    vars(capture[1]).pop("carve", None)


def test_the_right_capture_is_accepted(capture: tuple[nn.Module, Captured]) -> None:
    """EXA-7: and nothing is changed by the check."""
    model, captured = capture
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    check_capture(model, captured, sentences(3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # type: ignore[arg-type]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_capture_is_found(name: str, capture: tuple[nn.Module, Captured], captured: Captured) -> None:
    """EXA-7"""
    wrong = WRONG[name]
    corrupt(captured, wrong.operation, wrong.change, wrong.number)
    with pytest.raises(CaptureError, match=f"differs from the model itself: .*({wrong.words})"):
        check_capture(capture[0], captured, sentences(3))


def test_a_cast_to_a_lower_precision_is_found() -> None:
    """EXA-7: in fp32; autocast casts everywhere."""
    torch.manual_seed(0)
    model = LanguageModel()
    captured = Source(model).capture(sentences(3), training=True)
    corrupt(captured, LINEAR, after(lambda x: x.to(torch.float16).to(x.dtype)))
    with pytest.raises(CaptureError, match=r"differs from the model itself: .*gradient"):
        check_capture(model, captured, sentences(3))


class Stateful(nn.Module):
    """Computes with something that no capture sees."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.kind, self.calls, self.seen = kind, itertools.count(1), [1.0]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = {
            "counter": lambda: next(self.calls),
            "list": lambda: float(len(self.seen)),
        }[self.kind]()
        self.seen.append(factor)
        return F.mse_loss(self.layer(x) * factor, y)


@pytest.mark.parametrize("kind", ["counter", "list"])
def test_state_that_no_capture_sees_is_found(kind: str) -> None:
    """EXA-7: the model itself gives other results when it is called again."""
    model = Stateful(kind)
    captured = Source(model).capture(batch_of(3), training=True)
    with pytest.raises(CaptureError, match="the loss differently when it is called again"):
        check_capture(model, captured, batch_of(3))
    assert next(model.calls) == 1


class Phase(nn.Module):
    """Multiplies by a constant that the trace computes in fp32, after an opaque module and a shared draw."""

    def __init__(self) -> None:
        super().__init__()
        self.noise, self.layer = opaque(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        turned = torch.fft.rfft(self.layer(self.noise(x))) * torch.exp(1j * torch.tensor(0.3))
        return F.mse_loss(torch.fft.irfft(turned, n=6) + torch.randn(6), y)


def test_constants_of_the_trace_and_draws_of_opaque_modules_are_no_difference() -> None:
    """EXA-7: the model itself computes the constant in fp64, and the opaque module numbers its own draws."""
    torch.manual_seed(0)
    model = Phase()
    captured = Source(model).capture(batch_of(3), training=True)
    assert captured.shared_draws == {1}
    check_capture(model, captured, batch_of(3))


class Hybrid(nn.Module):
    """Dropout after a CTC loss, which stays eager, and after experts that are made opaque while tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.listen, self.experts, self.write = nn.Linear(6, 5), LoopedExperts(), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = F.dropout(self.listen(x), 0.3).log_softmax(-1).transpose(0, 1)
        ends = torch.full_like(y[:, 0], 8)
        heard = F.ctc_loss(scores, y, ends, torch.full_like(ends, 2), zero_infinity=True)
        written = F.dropout(self.write(self.experts(x.mean(1))), 0.3)
        return heard + F.cross_entropy(written, y[:, 0])


class LoopedExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for chosen in (x[:, 0] > 0).long().unique().tolist():
            rows = ((x[:, 0] > 0).long() == chosen).nonzero()[:, 0]
            out = out.index_add(0, rows, F.dropout(self.experts[chosen](x[rows]), 0.3))
        return out


def test_what_stays_eager_numbers_draws_as_the_model_does() -> None:
    """EXA-7: no false refusal of dropout after a CTC loss, or after experts that loop over data."""
    torch.manual_seed(0)
    model = Hybrid()
    inputs = {"x": torch.randn(4, 8, 6), "y": torch.randint(1, 5, (4, 3))}
    captured = Source(model).capture(inputs, training=True)
    assert set(captured.leaf_names) == {"ctc_loss", "experts"}
    check_capture(model, captured, inputs)
