"""Captured under autocast, a program computes what autocast computes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.comparison import assert_same
from tests.capture.models import batch_of
from varuna.capture import CutPoint, Source


class Mixed(nn.Module):
    """Some lines in low precision, some in fp32, and a dtype read from an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 6)
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cuts[0](self.first(x))
        with torch.autocast("cpu", enabled=False):
            exact = h.float() @ self.first.weight
            exact = self.cuts[1](exact)
            exact = torch.cos(exact @ self.first.weight).sum(-1, keepdim=True, dtype=torch.float32) + exact
        h = self.dropout(self.norm(h) * exact.to(h.dtype))
        h = self.cuts[2](h)
        with torch.autocast("cpu", torch.bfloat16):
            h = self.last(h)
        return F.mse_loss(h.float(), y)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_every_layout_computes_what_autocast_computes(precision: str, dtype: torch.dtype | None) -> None:
    """V14: the same casts at the same places, bit for bit with one stage."""
    torch.manual_seed(0)
    model = Mixed()
    source = Source(model, precision=precision)  # type: ignore[arg-type]
    assert_same(model, batch_of(4), batch=4, source=source, autocast=dtype, layouts=[[0, 4]], rtol=0, atol=0)
    captured = assert_same(
        model,
        batch_of(4),
        batch=4,
        source=source,
        autocast=dtype,
        layouts=[[0, 1, 2, 3, 4]],
        rtol=1e-2,
        atol=1e-2,
    )
    low = str(dtype or torch.float32).removeprefix("torch.")
    assert [spec.dtype for spec in captured.carve(1, 2).received] == [low]
    assert sorted(spec.dtype for spec in captured.carve(2, 3).received) == sorted(["float32", low])


class FrozenInItsOwnPrecision(nn.Module):
    """Lines in fp32, some of them without gradients, and a call in low precision among these."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cut(self.first(x))
        with torch.autocast("cpu", enabled=False):
            exact = h.float() @ self.last.weight
            with torch.no_grad():
                with torch.autocast("cpu", torch.bfloat16):
                    low = self.first(y)
                scale = (exact * 2 + low.float()).tanh()
            return (exact * scale - self.last(y)).square().mean()


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", None), ("bf16", torch.bfloat16)])
def test_lines_without_gradients_in_a_precision_of_their_own(
    precision: str, dtype: torch.dtype | None
) -> None:
    """V14: they have none in the captured model, too."""
    torch.manual_seed(0)
    model = FrozenInItsOwnPrecision()
    source = Source(model, precision=precision)  # type: ignore[arg-type]
    assert_same(model, batch_of(4), batch=4, source=source, autocast=dtype, layouts=[[0, 2]], rtol=0, atol=0)


class InItsOwnPrecision(nn.Module):
    """Lines in fp32 that take items of a list, draw random numbers, and call a kernel that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.cut = CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cut(self.first(x))
        with torch.autocast("cpu", enabled=False):
            exact = h.float()
            largest, _ = exact.topk(3, -1)
            exact = torch.cat([largest, exact.chunk(2, -1)[1]], -1) * torch.rand_like(exact)
            rows = exact.unflatten(-1, (2, 3))[:, None]
            rows = F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.1)
            exact = F.dropout(rows.flatten(1), 0.1) @ self.last.weight
        return F.mse_loss(self.last(exact).float(), y)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_operations_of_all_kinds_in_a_precision_of_their_own(precision: str) -> None:
    """V14: items of lists and random operations, too."""
    torch.manual_seed(0)
    model = InItsOwnPrecision()
    source = Source(model, precision=precision)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if precision == "bf16" else None
    assert_same(
        model, batch_of(4), batch=4, source=source, autocast=dtype, layouts=[[0, 2]], rtol=1e-6, atol=1e-6
    )
