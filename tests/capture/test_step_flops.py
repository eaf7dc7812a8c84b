"""Operations of a step: a frozen weight needs no gradient, and nothing before the first trained one does."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from varuna.capture import Source
from varuna.train.validate import trained_names

WIDTH, TOKENS = 64, 8
PRODUCT = 2 * WIDTH * WIDTH * TOKENS
"""Operations of one layer of WIDTH x WIDTH for a sample."""


class Adapted(nn.Module):
    """A layer with a low-rank adapter, as LoRA makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Layers(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def products(model: nn.Module) -> float:
    """The products of a step, in units of one layer's forward; the few other operations are left out."""
    captured = Source(model).capture({"x": torch.randn(2, TOKENS, WIDTH)}, training=True)
    return round(captured.step_flops(trained_names(model)) / PRODUCT, 1)


def plain(frozen: Iterable[int]) -> nn.Module:
    model = Layers(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
    for index in frozen:
        model.layers[index].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ([], 2 + 3 + 3 + 3),  # the input needs no gradient
        ([0, 1], 1 + 1 + 2 + 3),  # nothing before the first trained weight does
        ([2, 3], 2 + 3 + 2 + 2),
        ([0, 1, 2, 3], 4),
    ],
)
def test_the_backward_leaves_out_gradients_of_frozen_weights(frozen: list[int], expected: int) -> None:
    assert products(plain(frozen)) == pytest.approx(expected, abs=0.15)


def test_an_adapter_trains_at_two_thirds_of_the_operations() -> None:
    """SEE-1: forward and gradient of the inputs of the frozen weights, and all of the small ones."""
    model = Layers(Adapted() for _ in range(4))
    whole = products(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base" not in name)
    low_rank = 2 * 4 / WIDTH / 2
    assert whole == pytest.approx(4 * 3 * (1 + 2 * low_rank) - 1 - low_rank, abs=0.3)
    assert products(model) == pytest.approx(1 + 3 * 2 + (4 * 6 - 1) * low_rank, abs=0.3)


def test_the_count_agrees_with_torchs_own() -> None:
    """torch counts the products of a real forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    for frozen in ([], [0, 2], [1]):
        model = plain(frozen)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(1, TOKENS, WIDTH)).backward()
        assert products(model) == pytest.approx(counter.get_total_flops() / PRODUCT, abs=0.15)
