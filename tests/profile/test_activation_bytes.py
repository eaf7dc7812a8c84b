"""Activation bytes in a profile: they equal what one can count by hand for small models."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.profile.ladders import WIDTH, Ladder
from varuna import CutPoint
from varuna.profile.profiler import Profiler

MakeProfiler = Callable[..., Profiler]


@pytest.mark.parametrize("size", [2, 6])
def test_a_linear_and_a_gelu_hold_what_both_save(make_profiler: MakeProfiler, size: int) -> None:
    """Linear saves its input, GELU the output of Linear, the loss what it compares; weights do not count."""
    first, middle, last = make_profiler(Ladder(4)).profile_all([size]).kinds
    row = size * WIDTH * 4
    held = [kind.sizes[0].activation_bytes for kind in (first, middle, last)]
    # The model's input counts separately; the last GELU's output is not sent but compared.
    assert held == [row, 2 * row, 3 * row]


class Relaying(nn.Module):
    """The first step's output crosses every cut; the steps between do not use it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = x = self.steps[0](x)
        for step, cut in zip(list(self.steps)[1:], self.cuts, strict=True):
            x = step(torch.sigmoid(cut(x)))
        return ((x + first - y) ** 2).mean()


class Lines(nn.Module):
    """Steps of two Linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i, step in enumerate(self.steps):
            x = self.cuts[i // 2 - 1](x) if i in (2, 4) else x
            x = step(x)
        return ((x - y) ** 2).mean()


def test_a_split_backward_holds_gradients_until_the_weights_use_them(
    make_profiler: MakeProfiler,
) -> None:
    profile = make_profiler(Lines()).profile_all([2])
    row = 2 * WIDTH * 4
    assert profile.segment(1).sizes[0].activation_bytes == 2 * row
    assert profile.segment(1).sizes[0].split_bytes == 2 * row


def test_a_relayed_tensor_is_counted_by_its_first_receiver(
    make_profiler: MakeProfiler,
) -> None:
    profile = make_profiler(Relaying()).profile_all([2])
    row = 2 * WIDTH * 4
    assert [cut.sent.size(2) for cut in profile.cuts] == [row, 2 * row, 2 * row, 2 * row]
    # Sigmoid keeps its output, which is the input of Linear; the stage holds what it received.
    held = [profile.segment(i).sizes[0].activation_bytes for i in range(4)]
    assert held == [0, 2 * row, 2 * row, 2 * row]
