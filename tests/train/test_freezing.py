"""Parameters that are frozen or unfrozen after wrapping are right at the next step, in both interfaces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.faces import FACES, LAYOUTS, check_state, play
from varuna import CutPoint
from varuna.execute.update import reduce


class Frozen(nn.Module):
    """Starts with a frozen first half, and with a frozen weight that both halves use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()
        self.third, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.first.requires_grad_(False)
        self.second.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return self.last(torch.tanh(self.third(x))).square().mean()


def set_trained(model: Any, prefixes: tuple[str, ...], trained: bool) -> None:
    for name, parameter in model.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(trained)


def toggle(model: Any, optimizer: torch.optim.Optimizer, run: Callable[[int], float]) -> None:
    """Unfreeze before step 2, freeze other layers before step 4, all at the end; accumulate in between."""
    for step in range(8):
        if step == 2:
            set_trained(model, ("first", "second"), True)
        if step == 4:
            set_trained(model, ("first", "third"), False)
        if step == 6:
            set_trained(model, ("",), True)
        run(step)
        if step != 6:  # the gradient of step 6 is added to that of step 7
            optimizer.step()
            optimizer.zero_grad()


def several_buckets(*args: Any) -> Any:
    """Reduce each parameter in a bucket of its own, while the backward runs."""
    sizes = reduce.FIRST_BUCKET_BYTES, reduce.BUCKET_BYTES
    reduce.FIRST_BUCKET_BYTES = reduce.BUCKET_BYTES = 1
    try:
        return play(*args)
    finally:
        reduce.FIRST_BUCKET_BYTES, reduce.BUCKET_BYTES = sizes


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_freezing_and_unfreezing_is_right_at_the_next_step(
    pool: Pool, face: str, depth: int, width: int
) -> None:
    """EXA-4: gradients are reduced, summed over ties and accumulated; frozen weights have none."""
    _, expected = play("plain", 1, 1, Frozen, toggle)
    for task in (play, several_buckets) if width == 2 else (play,):
        for _, state in pool.run(task, depth * width, face, depth, width, Frozen, toggle):
            check_state(state, expected)
