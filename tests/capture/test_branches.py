"""Branches with one path to capture are captured, and their conditions are checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same
from tests.capture.models import batch_of
from tests.capture.test_refusals import Layers, refusal
from varuna.capture import Source
from varuna.errors import CaptureError
from varuna.types import Work


class OutOfRangeError(Exception):
    """An error of the model's own."""


class Raises(nn.Module):
    """Raises in many ways, none of which happens."""

    def __init__(self, limit: float = 1e3) -> None:
        super().__init__()
        self.limit = limit
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if self.limit is not None and x.max() >= self.limit:
            raise OutOfRangeError(f"values must be below {self.limit}, got {x.max()}")
        if not (x > -1e3).all():
            text = "too small"
            raise ValueError(text)
        if torch.isnan(x).any() or x.min() < -1e3:
            raise RuntimeError("nan")
        if self.training and (x.sum() > 1e6).item():
            raise ValueError
        if (x < 1e3).all():
            h = self.inner(x)
        else:
            raise ValueError("large")
        assert (h > -1e6).all() and (h < 1e6).all(), f"limit {self.limit}"
        if (x > 1e3).sum().item() > 4:
            raise ValueError("many")
        return h


class Clamps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            x = torch.clamp(x, -3e38, 3e38)
        if x.dtype == torch.float32 and (torch.isinf(x).any() or torch.isnan(x).any()):
            x = torch.nan_to_num(x)
        return x


class Chooses(nn.Module):
    """Uses the rows with a positive first value, if there are any."""

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] > 0).nonzero().squeeze(1)
        if rows.size(0) > 0:
            x = x + x[rows].mean()
        return x


class Masks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask: Tensor | None = x > 1e3
        kept: Tensor | None = x < 1e3
        if not mask.any():
            mask = None
        if kept.all():
            kept = None
        x = x if mask is None else x.masked_fill(mask, 0)
        return x if kept is None else x * kept


class Guarded(nn.Module):
    def __init__(self, change: Any = Tensor.contiguous, limit: int = 64) -> None:
        super().__init__()
        self.change = change
        self.limit = limit
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if h.shape[0] >= self.limit:
            h = self.change(h)
        if x.shape[0] > 2 * self.limit:
            h = h.contiguous()
        return h + x[: x.shape[0]]


class Causal(nn.Module):
    """torch's own encoder with a causal mask; the features are the sequence."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.is_causal = is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        h = x.unsqueeze(2).expand(-1, -1, 4)
        return self.encoder(h, mask=mask, is_causal=self.is_causal).sum(2)


@pytest.mark.parametrize(
    "between",
    [Raises(), Clamps(), Chooses(), Masks(), Guarded(), Guarded(limit=4), Causal(None), Causal(True)],
    ids=lambda model: type(model).__name__,
)
def test_a_branch_with_one_path_to_capture_is_captured(between: nn.Module) -> None:
    """EXA-9: also as the only sample of a micro-batch."""
    assert_same(Layers(between), batch_of(5), batch=5)
    assert_same(Layers(between), batch_of(1), batch=1)


def run(between: nn.Module, x: Tensor) -> None:
    """Run a module's captured graph on inputs that take another path."""
    torch.manual_seed(0)
    captured = Source(Only(between)).capture({"x": torch.randn(5, 6)}, training=True)
    program = captured.carve(0, captured.num_segments)
    state = [dict(Only(between).named_parameters())[name] for name in program.state]
    program(state, (), {"x": x}, Work(0, 0, 0))


class Only(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


@pytest.mark.parametrize(
    ("between", "value", "kind", "words"),
    [
        (Raises(), 2e3, OutOfRangeError, "values must be below 1000.0, got {x.max()}"),
        (Raises(), -2e3, ValueError, "{text}"),
        (Raises(3e9), 5e5, ValueError, "raise ValueError"),
        (Clamps(), float("inf"), RuntimeError, "if not torch.isfinite(x).all(): values are not finite here"),
        (Chooses(), -1.0, RuntimeError, "if rows.size(0) > 0: no row is chosen here"),
    ],
)
def test_data_that_take_the_other_path_raise(
    between: nn.Module, value: float, kind: type[Exception], words: str
) -> None:
    """EXA-9: the model's own error, or one that names the line."""
    run(between, torch.randn(5, 6).abs())
    with pytest.raises(kind) as caught:
        run(between, torch.full((5, 6), value))
    assert words in str(caught.value)


def test_a_batch_size_that_changes_the_result_is_refused_by_its_line() -> None:
    """EXA-9"""
    text = refusal(Layers(Guarded(Tensor.tanh)))
    assert "test_branches.py:" in text and ": if h.shape[0] >= self.limit: " in text
    assert "batches of other than 2 to 63 samples" in text and 'varuna.opaque(model, "between")' in text


class Changing(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        view = x.view(-1)
        view.mul_(2)
        return F.mse_loss(x, y)


def test_an_input_that_is_changed_in_place_is_named() -> None:
    """EXA-9"""
    text = refusal(Changing())
    assert "test_branches.py:" in text and ": view.mul_(2): " in text
    assert "changes its input 'x' in place" in text and "x = x.clone()" in text


def test_a_branch_with_two_paths_is_refused() -> None:
    """EXA-9: nothing is assumed about a condition that may go either way."""

    class Either(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.any():
                x = x * 2
            return x

    class Dropped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = None if (x > 0).any() else x
            return x if mask is None else x * mask

    for model in (Either(), Dropped()):
        with pytest.raises(CaptureError, match="depends on the values of a tensor"):
            Source(Layers(model)).capture(batch_of(4), training=True)
