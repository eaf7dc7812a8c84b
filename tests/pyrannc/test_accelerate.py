"""The recipe of docs/accelerate.md: RaNNCModule beside Accelerate, equal to one process."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyrannc
from tests.pool import Pool
from varuna import CutPoint


def train(mixed: str | None, wrapped: bool = True, **options: Any) -> dict[str, Any]:
    """A loop of Accelerate's documentation: accumulation, clipping, a scheduler, autocast and metrics."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, mixed_precision=mixed, gradient_accumulation_steps=2)
    world = accelerator.num_processes if wrapped else 1
    net: nn.Module = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), CutPoint(), nn.Linear(12, 3))
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    x = torch.randn(48, 6)
    loader: Any = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=12 // world)
    model = pyrannc.RaNNCModule(net, optimizer, device=accelerator.device, measure=False, **options)
    # Not the model: Accelerate would wrap it in DistributedDataParallel.
    # Not the scheduler: it would step once for each process.
    optimizer, loader = accelerator.prepare(optimizer, loader)
    losses, norms = [], []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = F.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    model.eval()
    with torch.no_grad():
        found = [
            accelerator.gather_for_metrics((model(inputs).argmax(1), labels)) for inputs, labels in loader
        ]
    return {
        "losses": losses,
        "norms": norms,
        "counted": sum(len(labels) for _, labels in found),
        "state": model.state_dict(),
        "type": type(model).__name__,
    }


@pytest.mark.parametrize(
    ("world", "mixed", "options"),
    [(2, None, {"partition_num": 2, "pipeline_num": 2}), (3, None, {}), (2, "bf16", {"partition_num": 2})],
)
def test_the_recipe_trains_as_one_process(
    pool: Pool, world: int, mixed: str | None, options: dict[str, Any]
) -> None:
    """TRA-5: accumulate, clip_grad_norm_, autocast, schedulers and gather_for_metrics."""
    (expected,) = pool.run(train, 1, mixed)
    rtol = 1e-5 if mixed is None else 2e-2
    for found in pool.run(train, world, mixed, **options):
        assert found["counted"] == 48 and found["type"] == "RaNNCModule"
        for part in ("losses", "norms", "state"):
            torch.testing.assert_close(found[part], expected[part], rtol=rtol, atol=rtol)
