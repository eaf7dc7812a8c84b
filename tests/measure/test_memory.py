"""The bytes that are counted are those that can be told by hand."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.measure.ladders import WIDTH, Ladder
from varuna import CutPoint
from varuna.measure.memory import Bytes, CountingMeter, count_bytes
from varuna.profile.profiler import Profiler

MakeProfiler = Callable[..., Profiler]
CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [2, 6])
def test_a_chain_of_linear_and_gelu_holds_what_both_save(make_profiler: MakeProfiler, size: int) -> None:
    """Linear saves what it is given, GELU what Linear made, the loss what it compares; no weight counts."""
    first, middle, last = make_profiler(Ladder(4)).profile_all([size]).kinds
    row = size * WIDTH * 4
    held = [kind.sizes[0].activation_bytes for kind in (first, middle, last)]
    # The model's own input is counted as such, and the last GELU's output is compared and not sent.
    assert held == [row, 2 * row, 3 * row]


class Handing(nn.Module):
    """The first step's output crosses every cut; the steps between do not look at it."""

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


def test_between_its_parts_a_backward_holds_the_gradients_that_wait_for_their_weights(
    make_profiler: MakeProfiler,
) -> None:
    profile = make_profiler(Lines()).profile_all([2])
    row = 2 * WIDTH * 4
    assert profile.segment(1).sizes[0].activation_bytes == 2 * row
    assert profile.segment(1).sizes[0].split_bytes == 2 * row


def test_what_is_only_handed_through_is_counted_where_it_is_first_given(make_profiler: MakeProfiler) -> None:
    profile = make_profiler(Handing()).profile_all([2])
    row = 2 * WIDTH * 4
    assert [cut.sent.size(2) for cut in profile.cuts] == [row, 2 * row, 2 * row, 2 * row]
    # Sigmoid keeps its output, which is what Linear is given; what came in is held by the stage.
    held = [profile.segment(i).sizes[0].activation_bytes for i in range(4)]
    assert held == [0, 2 * row, 2 * row, 2 * row]


class Piece:
    """Keeps the square of what it is given, behind a view, until it is asked to go back."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def forward(self, given: list[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        square = given[0] * given[0]
        self.kept = [given[0], square.view(-1), square.t()]
        return [square + 1.0]

    def backward(self, gradients: list[Tensor]) -> list[Tensor]:
        large = torch.cat([gradients[0]] * 10)
        self.kept = []
        return [large[:1]]

    backward_inputs = backward

    def backward_weights(self) -> None:
        pass


def test_memory_counts_once_however_many_views_look_at_it() -> None:
    given = torch.ones(8, 8)
    found = count_bytes(Piece(), [given], [given], [False], CountingMeter(CPU))
    assert found.activation == 2 * given.nbytes
    # The gradient that came in, and ten times as much.
    assert found.working == 11 * given.nbytes
    assert isinstance(found, Bytes)
