"""Inputs by function: `step(fetch)` and `batches(fetch)` ask for this rank's share of each step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import varuna
from tests.pool import Pool
from tests.toys import make_model

STEPS, SAMPLES, BATCH = 5, 13, 8


def data() -> dict[str, torch.Tensor]:
    x = torch.randn(SAMPLES, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return {"x": x, "y": x.flip(1)}


def fetch(samples: Sequence[int]) -> dict[str, torch.Tensor]:
    return {name: value[[sample % SAMPLES for sample in samples]] for name, value in data().items()}


def train_by_fetch(way: str, order: bool, options: dict[str, Any]) -> list[float]:
    model = make_model("Plain", dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = varuna.wrap(
        model, optimizer, batch_size=BATCH, sample=fetch(range(2)), microbatch_size=2, device="cpu", **options
    )
    chosen = varuna.SampleOrder(SAMPLES, batch_size=BATCH, seed=1) if order else None
    losses = []
    if way == "step":
        while wrapped.iteration < STEPS:
            losses.append(wrapped.step(fetch, order=chosen)[0])
            optimizer.step()
            wrapped.zero_grad()
    else:
        for step, inputs in wrapped.batches(fetch, chosen, steps=STEPS):
            assert step == wrapped.iteration
            losses.append(wrapped.step(inputs)[0])
            optimizer.step()
            wrapped.zero_grad()
    wrapped.close()
    return losses


def train_plainly(order: bool) -> list[float]:
    model = make_model("Plain", dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    chosen = varuna.SampleOrder(SAMPLES, batch_size=BATCH, seed=1)
    losses = []
    for step in range(STEPS):
        loss = model(**fetch(chosen.step(step) if order else range(step * BATCH, (step + 1) * BATCH)))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(("way", "order", "stages"), [("step", False, 1), ("batches", True, 2)])
def test_each_rank_fetches_its_share(pool: Pool, way: str, order: bool, stages: int) -> None:
    """HOT-2: the library computes the share, so it can ask for another one after a morph."""
    for losses in pool.run(train_by_fetch, 2, way, order, {"stages": stages}):
        torch.testing.assert_close(losses, train_plainly(order), rtol=1e-10, atol=1e-12)


def test_a_batch_that_is_not_trained_and_a_wrong_fetch_are_refused() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = varuna.wrap(
        model,
        optimizer,
        batch_size=4,
        sample={"input": torch.randn(2, 3)},
        device="cpu",
        loss=lambda output: output.square().mean(),
    )
    with pytest.raises(RuntimeError, match="step 0 was not trained"):
        list(wrapped.batches(lambda samples: {"input": torch.ones(len(samples), 3)}))
    with pytest.raises(TypeError, match="fetch must return a dict"):
        wrapped.step(lambda samples: torch.ones(len(samples), 3))  # type: ignore[arg-type,return-value]
    wrapped.close()
