"""Corner cases: checkpointing, replaced buffers, sizes that depend on the data, fingerprints."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.capture.comparison import assert_same, chained
from tests.capture.models import Mlp, batch_of
from varuna.capture import CutPoint, Source, check_capture
from varuna.errors import CaptureError
from varuna.types import Work

Body = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.cut = CutPoint()
        self.body = body
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(self, x), y)


def reentrant(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    return model.b(model.cut(checkpoint(lambda z: torch.relu(model.b(z)), h, use_reentrant=True)))


def not_reentrant(model: Model, x: Tensor) -> Tensor:
    return model.b(model.cut(checkpoint(lambda z: torch.relu(model.a(z)), x, use_reentrant=False)))


def cut_without_gradient(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    with torch.no_grad():
        gate = model.cut(torch.sin(h)) * 2
    return model.b(h * gate)


def chosen_rows(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    rows = (x.sum(1) > 0).nonzero()[:, 0]
    chosen = h[rows]
    h = model.cut(h)
    return model.b(h.index_add(0, rows, chosen))


def written_by_mask(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    z = torch.zeros_like(h)
    z[x.sum(1) > 0] = 2.0
    return model.b(model.cut(h) * z)


def sizes(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    n = h.shape[0]
    h = model.cut(h)
    return model.b(h / n + torch.arange(2 * n, device=x.device).view(n, 2).sum(1)[:, None])


def replaced_buffer(model: Model, x: Tensor) -> Tensor:
    h = model.a(x)
    model.average = 0.9 * model.average + 0.1 * h.detach().mean(0)
    return model.b(model.cut(h))


def halves(model: Model, x: Tensor) -> Tensor:
    """Runs pairs as one batch, as in SimCLR and with guidance by a condition."""
    one, other = model.cut(model.a(torch.cat([x, -x]))).chunk(2)
    three = torch.split(model.b(torch.cat([one, other, x], 0)), x.shape[0])
    return three[0] + 2 * three[1] * torch.chunk(input=three[2], chunks=2, dim=1)[0].sum(1, keepdim=True)


@pytest.mark.parametrize(
    "body",
    [
        halves,
        reentrant,
        not_reentrant,
        cut_without_gradient,
        chosen_rows,
        written_by_mask,
        sizes,
        replaced_buffer,
    ],
)
def test_a_corner_case_is_cut_exactly(body: Body) -> None:
    """V3"""
    torch.manual_seed(0)
    assert_same(Model(body), batch_of(5), batch=5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_that_uses_checkpointing_is_captured_and_verified(use_reentrant: bool) -> None:
    """V3: with dropout inside; reentrant checkpointing trains nothing if only inputs go in."""

    def body(model: Model, x: Tensor) -> Tensor:
        h = checkpoint(model.a, x, use_reentrant=use_reentrant)
        again = checkpoint(lambda z: F.dropout(model.b(z)), model.b(h), use_reentrant=use_reentrant)
        return model.b(model.cut(again))

    model = Model(body)
    captured = Source(model).capture(batch_of(3), training=True)
    check_capture(model, captured, batch_of(3))
    assert ("a.weight" in captured.untouched([True])) is use_reentrant


def test_shared_noise_is_recognized_when_its_size_is_a_multiple_of_the_batch() -> None:
    """V17: three samples, and a draw of six."""

    def body(model: Model, x: Tensor) -> Tensor:
        h = model.cut(model.a(x)) + torch.randn(6)
        return model.b(h + torch.randn(x.shape[0], 6))

    model = Model(body)
    captured = Source(model).capture(batch_of(3), training=True)
    assert captured.shared_draws == {0}
    check_capture(model, captured, batch_of(3))


def test_a_buffer_changed_on_one_side_of_a_cut_and_read_on_the_other_is_refused() -> None:
    """V7"""

    def torn(model: Model, x: Tensor) -> Tensor:
        model.average.add_(1.0)
        return model.cut(model.a(x)) + model.average

    with pytest.raises(CaptureError, match=r"'average' is changed in place and used in the segments 0, 1"):
        Source(Model(torn)).capture(batch_of(2), training=True)


def test_a_change_in_place_of_two_views_behind_a_cut_is_refused_by_its_line() -> None:
    """V7: after the cut they no longer share memory."""

    def two_views(model: Model, x: Tensor) -> Tensor:
        h = model.a(x)
        rows = h.view(-1, 2, 3)
        return model.cut(h).mul_(2) + rows.flatten(1)

    captured = Source(Model(two_views)).capture(batch_of(2), training=True)
    with pytest.raises(CaptureError, match=r"test_corners.py:\d+: .*mul_.* changes a tensor"):
        captured.carve(1, 2)


def test_attributes_that_cannot_be_copied_are_shared() -> None:
    model = Model(lambda model, x: model.b(model.cut(model.a(x))))
    model.lock = threading.Lock()  # type: ignore[assignment]
    model.b = torch.nn.utils.weight_norm(model.b)
    source = Source(model)
    captured = source.capture(batch_of(3), training=True)
    check_capture(model, captured, batch_of(3))
    loss, _ = chained(source, captured, [0, 1, 2], batch_of(3))
    torch.testing.assert_close(loss, model(**batch_of(3)).detach())


def fingerprint(model: nn.Module, size: int = 3) -> str:
    return Source(model).capture(batch_of(size), training=True).graph.fingerprint


def test_the_fingerprint_depends_on_the_model_and_not_on_its_values() -> None:
    """V8"""
    ours = fingerprint(Mlp())
    assert fingerprint(Mlp(), size=7) == ours
    assert len({ours, fingerprint(Mlp(layers=3)), fingerprint(Mlp(dropout=0.1))}) == 3
    fewer = Mlp()
    fewer.cuts = nn.ModuleList(list(fewer.cuts)[:2])
    assert fingerprint(fewer) != ours


def looped_over_names(model: Model, x: Tensor) -> Tensor:
    """Loops over a set of strings, as Gemma 3 and ModernBERT do; its order differs between processes."""
    names = ("sin", "cos", "tan", "tanh", "sigmoid", "exp", "relu", "erf", "sinh", "atan", "abs", "square")
    found = {name: getattr(torch, name)(x) for name in set(names)}
    assert isinstance({1}, set) and set() == set()
    return model.b(model.cut(model.a(x)) + sum(found[name] for name in names))


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    """V8, EXA-7"""
    script = "from tests.capture.test_corners import own_fingerprints; print(*own_fingerprints())"
    other = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split() == own_fingerprints()


def own_fingerprints() -> list[str]:
    return [fingerprint(Mlp()), fingerprint(Model(looped_over_names))]


def test_new_tensors_and_constants_of_a_program_are_on_its_device() -> None:
    def made(model: Model, x: Tensor) -> Tensor:
        return model.b(model.cut(model.a(x)) + torch.tensor([1.0] * 6) + torch.arange(6, device=x.device))

    model = Model(made)
    program = Source(model).capture(batch_of(3), training=True).carve(0, 2).to("meta")
    inputs = {name: value.to("meta") for name, value in batch_of(3).items()}
    state = {name: value.to("meta") for name, value in model.state_dict().items()}
    (loss,) = program([state[name] for name in program.state], (), inputs, Work(0, 0, 0))
    assert loss.is_meta


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_capture_does_not_depend_on_the_grad_mode_of_its_caller(mode: Any) -> None:
    """R9: the `no_grad` of the model itself is in the graph."""

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Linear(6, 6)
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                seen = self.seen(x)
            return F.mse_loss(self.layer(x) + seen, y)

    for size in (1, 4):
        with mode():
            captured = Source(Seeing()).capture(batch_of(size), training=True)
        assert captured.listing == Source(Seeing()).capture(batch_of(size), training=True).listing
        assert any("detach" in line for line in captured.listing)
