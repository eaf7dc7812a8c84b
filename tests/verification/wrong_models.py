"""Models that do not train the same in every layout, each in another way."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Layers(nn.Module):
    """A right model; the others change one part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.calls, self.count = nn.BatchNorm1d(6), 0, itertools.count(1)

    def middle(self, h: Tensor) -> Tensor:
        return F.dropout(h, 0.3, self.training)

    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(h, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.c(self.middle(self.b(self.a(x).relu()))), y)


class Normalized(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(h))


class Counter(Layers):
    def middle(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class HiddenCounter(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return h * next(self.count)


class CoupledLoss(Layers):
    def loss(self, h: Tensor, y: Tensor) -> Tensor:
        return (h - y).mean() ** 2


class InPlace(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x, y)


class InPlaceNested(Layers):
    """Changes tensors inside of a list and a dict."""

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, xs: list[Tensor], y: dict[str, Tensor]) -> Tensor:
        y["a"].mul_(0.5)
        return super().forward(xs[0].mul_(0.5), y["a"])


class Unrepeatable(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + int.from_bytes(os.urandom(4), "big") * 1e-9)


class RandomGradient(torch.autograd.Function):
    """Multiplies the gradient by a number that nobody seeds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * (1 + int.from_bytes(os.urandom(4), "big") * 1e-9)


class UnrepeatableBackward(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return RandomGradient.apply(h)  # type: ignore[no-any-return,no-untyped-call]


class TimesBatch(torch.autograd.Function):
    """Multiplies the gradient by the number of samples, which no derivative of its forward does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * grads[0].shape[0]


class WrongBackward(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return TimesBatch.apply(h)  # type: ignore[no-any-return,no-untyped-call]


class SortedSamples(Layers):
    def middle(self, h: Tensor) -> Tensor:
        return h.sort(0).values


class Chaotic(Layers):
    """Doubles the last bits of its values sixteen times: other roundings give other losses, as they must."""

    def middle(self, h: Tensor) -> Tensor:
        h = h.sigmoid()
        for _ in range(16):
            h = 3.99 * h * (1 - h)
        return h


def samples(size: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return {name: torch.randn(size, 6, generator=generator) for name in ("x", "y")}
