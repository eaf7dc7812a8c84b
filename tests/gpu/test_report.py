"""Reports show device times, although the device runs behind its host."""

from statistics import median

import pytest
import torch
from torch import Tensor, nn

from varuna import CutPoint, Varuna

pytestmark = pytest.mark.gpu


class Heavy(nn.Module):
    """Takes microseconds to queue and milliseconds to run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(8192, 8192), CutPoint(), nn.Linear(8192, 8192)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(self.first(x))).square().mean()


def test_most_of_a_step_of_matrix_products_is_computing() -> None:
    """V28, B4; V44: the manager compares machines by this time."""
    inputs = {"x": torch.randn(8192, 8192)}
    model = Varuna(Heavy(), "0;", {"x": torch.randn(2, 8192)}, 8192, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.set_optimizer(optimizer)
    inputs = {"x": inputs["x"].cuda()}
    computed = []
    for _ in range(6):
        model.step(inputs)
        computed.append(model._trainer.engine.recorder.compute_seconds())
        optimizer.step()
        model.zero_grad()
    (stage,) = model.report().stages
    assert median(computed[3:]) == pytest.approx(stage.compute_seconds, rel=0.2)
    assert stage.compute_seconds > stage.reduce_seconds
    assert stage.bubble < 0.5
