"""The short form `varuna.wrap`, and the whole model after training, against one plain process."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.pool import Pool
from tests.train.faces import check_state
from varuna import SampleOrder
from varuna.train import wrap as wrapping

BATCH, DATA = 8, 40


class Tied(nn.Module):
    """Has a tied and an unused weight, a frozen bias, a buffer that is not saved, and no CutPoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.middle.bias.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6), persistent=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x))) * self.scale)).square().mean()


def groups_of(model: nn.Module) -> torch.optim.Optimizer:
    """As people write it: no weight decay for biases."""
    weights = [p for name, p in model.named_parameters() if "bias" not in name]
    biases = [p for name, p in model.named_parameters() if "bias" in name]
    settings = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=0.05)


def train(wraps: bool, makes: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], Any]:
    """Train four steps; return losses, the model's state and the stage map. `makes`: the optimizer later."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(3)
        plain = Tied()
        data = torch.randn(DATA, 6)
        order, layout = SampleOrder(DATA, batch_size=BATCH, seed=1), None
        model: Any = plain
        make: Callable[[Any], torch.optim.Optimizer] = functools.partial(torch.optim.Adam, lr=0.05)
        optimizer = make(plain.parameters()) if makes else groups_of(plain)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        if wraps:
            settings = {"batch_size": BATCH, "sample": {"x": data[:2]}, "device": "cpu", **options}
            model = varuna.wrap(plain, make if makes else optimizer, **settings)
            layout = [stage.ranks for stage in model.plan.stages]
            if makes:
                optimizer = model.optimizer
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        losses = []
        for step in range(4):
            if wraps:
                losses.append(model.step({"x": data[order.share(model)]})[0])
            else:
                loss = model(data[order.step(step)])
                loss.backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if wraps:
            whole = model.gather_model()
            assert (whole is None) == (int(os.environ.get("RANK", "0")) != 0)
            model.close()
            if whole is None:
                return losses, {}, layout
            assert type(whole) is Tied and whole.last.weight is whole.first.weight and whole.training
            assert not whole.middle.bias.requires_grad and whole.middle.weight.requires_grad
            assert float(whole(data).detach()) == pytest.approx(float(expected_loss(whole, data)))
            plain = whole
        return losses, {**plain.state_dict(), "scale": plain.scale.clone()}, layout
    finally:
        torch.set_default_dtype(torch.float32)


def expected_loss(model: Tied, data: Tensor) -> Tensor:
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    return fresh(data).detach()


@pytest.mark.parametrize("makes", [False, True])
@pytest.mark.parametrize(
    ("world", "options", "layout"),
    [
        (1, {}, [(0,)]),
        (2, {}, [(0, 1)]),
        (2, {"stages": 2}, [(0,), (1,)]),
        (4, {"stages": 2, "microbatch_size": 2}, [(0, 2), (1, 3)]),
    ],
)
def test_a_wrapped_model_and_optimizer_train_like_one_process(
    pool: Pool, world: int, options: dict[str, Any], layout: list[tuple[int, ...]], makes: bool
) -> None:
    """TRA-6: also with parameter groups and a scheduler made before; afterwards one rank has the model."""
    losses, state, _ = train(False, makes, {})
    ranks = pool.run(train, world, True, makes, options)
    for found, _, used in ranks:
        assert found == pytest.approx(losses, rel=1e-10) and used == layout
    check_state(ranks[0][1], state)


def train_with_map(stage_map: str) -> tuple[list[float], dict[str, Tensor], Any]:
    os.environ.update(VARUNA_STAGE_TO_RANK_MAP=stage_map, VARUNA_CHUNK_SIZE="3")
    try:
        return train(True, False, {})
    finally:
        del os.environ["VARUNA_STAGE_TO_RANK_MAP"], os.environ["VARUNA_CHUNK_SIZE"]


def train_with_little_memory(num_bytes: int) -> Any:
    space = wrapping._space
    wrapping._space = lambda device: num_bytes
    try:
        return train(True, False, {})[2]
    except MemoryError as error:
        return str(error)
    finally:
        wrapping._space = space


def test_the_layout_comes_from_the_launcher_or_from_the_memory(pool: Pool) -> None:
    """TRA-6: nobody writes a map."""
    losses, state, _ = train(False, False, {})
    ranks = pool.run(train_with_map, 2, "1;0;")
    assert all(found == pytest.approx(losses, rel=1e-10) for found, _, _ in ranks)
    assert ranks[0][2] == [(1,), (0,)]
    check_state(ranks[0][1], state)
    need = wrapping.training_state_bytes(Tied().double())
    assert (
        pool.run(train_with_little_memory, 2, int(need / wrapping.STATE_SHARE / 2) + 8) == [[(0,), (1,)]] * 2
    )
    for said in pool.run(train_with_little_memory, 2, need // 2):
        assert "2 processes have space for" in said and "more processes" in said


def test_an_optimizer_that_cannot_be_taken_over_is_refused() -> None:
    model, x = Tied(), torch.randn(4, 6)
    settings: dict[str, Any] = {"batch_size": 4, "sample": {"x": x}, "device": "cpu"}
    with pytest.raises(ValueError, match="6 of the optimizer's parameters do not belong to the model"):
        varuna.wrap(model, torch.optim.SGD(Tied().parameters(), lr=0.1), **settings)
    optimizer = torch.optim.Adam(model.parameters())
    model(x).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="has made steps before the model was wrapped"):
        varuna.wrap(model, optimizer, **settings)
    with pytest.raises(ValueError, match="divides the 1 processes, not 2"):
        varuna.wrap(model, functools.partial(torch.optim.SGD, lr=0.1), stages=2, **settings)
