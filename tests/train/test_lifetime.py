"""A wrapped model that the script drops is collected, also while the script keeps its own model."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pyrannc import RaNNCModule
from tests.pool import Pool
from tests.tasks import stage_map
from tests.train.faces import FACES, LAYOUTS
from varuna import CutPoint, Varuna


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.cut = nn.Linear(6, 6), nn.Linear(6, 6), CutPoint()
        self.norm = nn.BatchNorm1d(6)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(torch.tanh(self.norm(self.first(x))))).square().mean()


def wrap_and_drop(face: str, depth: int, width: int) -> list[str]:
    """Train two steps, drop the wrapper and its optimizer; return what is still alive."""
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(4, 6)
    if face == "varuna":
        wrapped: Any = Varuna(model, stage_map(depth, width), {"x": x}, 4 * width, 2, device="cpu")
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        wrapped.set_optimizer(optimizer)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = RaNNCModule(model, optimizer, device="cpu", partition_num=depth)
    for _ in range(2):
        if face == "varuna":
            wrapped.step({"x": x})
        else:
            wrapped(x).backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trainer = wrapped._trainer if face == "varuna" else wrapped._partitioned.pipeline.trainer
    watched = {
        "wrapper": weakref.ref(wrapped),
        "trainer": weakref.ref(trainer),
        "session": weakref.ref(wrapped._session),
        "network": weakref.ref(wrapped._session.network),
    }
    del wrapped, optimizer, trainer
    gc.collect()
    return [name for name, reference in watched.items() if reference() is not None]


@pytest.mark.parametrize("face", FACES)
def test_a_dropped_wrapper_is_collected(pool: Pool, face: str) -> None:
    """EXA-5: with its stage and links, although its weights are those of the script's model."""
    for depth, width in LAYOUTS:
        for left in pool.run(wrap_and_drop, depth * width, face, depth, width):
            assert left == []
