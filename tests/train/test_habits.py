"""Everyday training scripts, with the habits that people have, equal one process in both interfaces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.train.faces import FACES, LAYOUTS, check_state, play
from varuna import CutPoint

Run = Callable[[int], float]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.cut = nn.Linear(6, 8), nn.LayerNorm(8), CutPoint()
        self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(torch.relu(self.norm(self.first(x))))
        return (self.last(torch.tanh(self.second(h))) - x[:, :3]).square().mean()


def many_habits(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[float]:
    """Two schedulers, changed groups, freezing, skipped and accumulated steps, clipping, changed weights."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
    named = dict(model.named_parameters())
    average = {name: parameter.detach().clone() for name, parameter in named.items()}
    losses = []
    for step in range(6):
        for name, parameter in named.items():
            parameter.requires_grad_(step != 1 or not name.endswith("bias"))
        losses.append(run(step))
        if step == 2:
            optimizer.zero_grad()  # a batch that the script leaves out
            continue
        if step == 3:
            continue  # accumulates with the next one
        if step == 4:
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter.grad.div_(2)
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.1)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        plateau.step(losses[-1])
        decay.step()
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.clamp_(-0.3, 0.3)
                average[name].lerp_(parameter, 0.1)
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(average[name])
    return [*losses, run(6)]


def sharpness_aware(model: Any, optimizer: torch.optim.Optimizer, run: Run) -> list[float]:
    """Climbs along the normed gradient, takes the gradient there, and goes back before the update."""
    losses, named = [], dict(model.named_parameters())
    for step in range(2):
        losses.append(run(step))
        norm = torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None])
        climb = {name: 0.05 * p.grad / norm for name, p in named.items() if p.grad is not None}
        with torch.no_grad():
            for name, change in climb.items():
                named[name].add_(change)
        optimizer.zero_grad()
        losses.append(run(step))
        with torch.no_grad():
            for name, change in climb.items():
                named[name].sub_(change)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("depth", "width"), LAYOUTS)
def test_scripts_as_people_write_them_are_those_of_one_process(
    pool: Pool, face: str, depth: int, width: int
) -> None:
    """EXA-3, EXA-4, EXA-5"""
    for script in (many_habits, sharpness_aware):
        expected, state = play("plain", 1, 1, Net, script)
        for found, its_state in pool.run(play, depth * width, face, depth, width, Net, script):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
            check_state(its_state, state, script.__name__)
