"""Fabric with the strategy "varuna" trains as one process does on the whole batch."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import varuna.lightning
from tests.lightning.modules import AutoEncoder, data
from tests.pool import Pool
from varuna import CutPoint
from varuna.lightning.fabric import is_checked
from varuna.lightning.losses import explain_divisors, loss_divisors

STAGES = {"partition_num": 2, "pipeline_num": 2}


def net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), CutPoint(), nn.Linear(16, 2)).double()


def loop(folder: str, *, wrapped: bool = True, **options: Any) -> dict[str, Any]:
    """The loop of Fabric's documentation, with accumulation, clipping, a scheduler and a checkpoint."""
    world = dist.get_world_size() if wrapped else 1
    strategy: Any = varuna.lightning.VarunaFabricStrategy(measure=False, **options) if wrapped else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=12 // world))
    losses = []
    for number, (x, y) in enumerate(loader):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
        losses.append(float(fabric.all_reduce(loss.detach())))
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=0.05)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        scores = fabric.all_gather(model(torch.ones(2, 12).double())).reshape(-1, 2, 2)[0]
    file = Path(folder) / ("wrapped.ckpt" if wrapped else "plain.ckpt")
    fabric.save(file, {"model": model, "optimizer": optimizer, "step": 4})
    rest = fabric.load(file, {"model": model, "optimizer": optimizer})
    assert rest == {"step": 4}
    return {"losses": losses, "scores": scores, "state": model.state_dict(), "file": torch.load(file)}


def steps_of_lightning_modules(wrapped: bool = True, **options: Any) -> list[float]:
    """Fabric calls training_step of a LightningModule, whose optimizer is made after setup."""
    world = dist.get_world_size() if wrapped else 1
    strategy: Any = varuna.lightning.VarunaFabricStrategy(measure=False, **options) if wrapped else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(2)
    model = fabric.setup_module(Quiet().double())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for number, batch in enumerate(fabric.setup_dataloaders(DataLoader(data(), batch_size=12 // world))):
        loss = model.training_step(batch, number)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
    return losses


class Quiet(AutoEncoder):
    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize(("world", "options"), [(2, STAGES), (3, {})])
def test_the_loop_of_the_documentation(
    pool: Pool, tmp_path: Path, world: int, options: dict[str, Any]
) -> None:
    """TRA-5: and a checkpoint that one process loads."""
    expected = loop(str(tmp_path), wrapped=False)
    for found in pool.run(loop, world, str(tmp_path), **options):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_lightning_module_trains_with_fabric(pool: Pool) -> None:
    """TRA-5"""
    expected = steps_of_lightning_modules(wrapped=False)
    for found in pool.run(steps_of_lightning_modules, 2, **STAGES):
        assert found == pytest.approx(expected, rel=1e-9)


MASK = torch.tensor([1.0, 0, 1, 1, 0, 1])


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (lambda x: (x.sum(1) * MASK).sum() / MASK.sum(), 4),
        (lambda x: (x.sum(1) * MASK).sum() * (1 / MASK.sum()), 4),
        (lambda x: (x.sum(1) * MASK / MASK.sum()).sum(), 4),
        (lambda x: x.sum(1)[MASK > 0].mean(), 4),
        (lambda x: F.mse_loss(x[MASK > 0], torch.ones(4, 2)), 8),
        (lambda x: F.cross_entropy(x, torch.where(MASK > 0, 1, -100)), 4),
        (lambda x: 0.5 * x.mean(-1).mean(), 24),
        (lambda x: x.sum() / len(x) / 3, 18),
        (lambda x: x.sum() / MASK.sum() * float(MASK.sum()) / 10, 10),
    ],
)
def test_the_divisors_of_a_loss_are_found(loss: Any, divisor: float) -> None:
    """TRA-5"""
    assert loss_divisors(loss(torch.ones(6, 2, requires_grad=True))) == pytest.approx([divisor])


@pytest.mark.parametrize("samples", [1, 2])
def test_a_mean_over_the_tokens_of_each_sample_is_a_mean_over_samples(samples: int) -> None:
    """TRA-5: also on a rank with one sample, where the counts of tokens are one number."""
    tokens, mask = torch.ones(samples, 6, requires_grad=True), MASK.expand(samples, 6)
    assert loss_divisors(((tokens * mask).sum(1) / mask.sum(1)).mean()) == [samples]


def test_losses_are_compared_now_and_then() -> None:
    """TRA-5: each comparison waits for all ranks. Two losses in turn are both compared."""
    checked = [number for number in range(400) if is_checked(number, (6, 6))]
    assert checked == [*range(10), 101, 202, 303]
    assert all(is_checked(number, (6, 5)) for number in range(400))


def test_divisors_that_do_not_follow_the_samples_are_explained() -> None:
    """TRA-5"""
    assert explain_divisors([[8.0, 5.0], [6.0, 5.0]], [4, 3]) is None
    assert explain_divisors([[4.0], []], [6, 6]) is None, "other losses"
    found = explain_divisors([[12.0, 4.0], [12.0, 3.0]], [6, 6])
    assert (
        found is not None
        and "by 4 for the 6 samples of rank 0, and by 3 for the 6 samples of rank 1" in found
    )


def masked_loop(divides: str, *, wrapped: bool = True) -> Any:
    """Train with a mean over some samples, written by hand; return the weights, or the error."""
    world = dist.get_world_size() if wrapped else 1
    strategy: Any = varuna.lightning.VarunaFabricStrategy(measure=False, **STAGES) if wrapped else "auto"
    fabric = L.Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    plain = net()
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for x, y in fabric.setup_dataloaders(DataLoader(data(), batch_size=12 // world)):
        mask = (x[:, 0] < 0).double()
        loss = (F.cross_entropy(model(x), y, reduction="none") * mask).sum()
        count = mask.sum()
        if divides == "by all" and wrapped:
            count = fabric.all_reduce(count, reduce_op="sum") / world
        try:
            fabric.backward(loss / count)
        except ValueError as error:
            return str(error)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_a_masked_mean_over_one_rank_is_refused(pool: Pool) -> None:
    """TRA-5: written by hand; divided by the labels of all ranks, it trains as one process does."""
    for error in pool.run(masked_loop, 2, "by own"):
        assert "the loss is no mean over samples: it divides by" in error and "check_loss=False" in error
    expected = masked_loop("by all", wrapped=False)
    for found in pool.run(masked_loop, 2, "by all"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def names() -> list[str]:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    return [registry["varuna"]["strategy"].__name__ for registry in (StrategyRegistry, STRATEGY_REGISTRY)]


def test_the_name_is_registered_and_other_names_are_refused() -> None:
    """TRA-5: the strategies of one process are found by name."""
    assert names() == ["VarunaStrategy", "VarunaFabricStrategy"]
    assert type(L.Trainer(strategy="varuna", accelerator="cpu", devices=1).strategy).__name__ == names()[0]
    with pytest.raises(AttributeError, match="no attribute 'VarunaStrateg'"):
        varuna.lightning.VarunaStrateg  # noqa: B018


def send_from_rank_1() -> Any:
    own: Any = Path("runs") if dist.get_rank() else (1, 2)
    with patch.object(dist, "broadcast_object_list", side_effect=AssertionError("a pickle")):
        fabric = L.Fabric(accelerator="cpu", devices=2, strategy=varuna.lightning.VarunaFabricStrategy())
        fabric.launch()
        return fabric.broadcast(own, src=1), fabric.broadcast([own, torch.ones(2)], src=0)[0]


def test_broadcasts_are_not_pickles(pool: Pool) -> None:
    """SEC-1, TRA-5"""
    assert pool.run(send_from_rank_1, 2) == [("runs", (1, 2))] * 2
