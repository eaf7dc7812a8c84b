"""The number of samples of a step, as its record has it: the last step of an epoch may have fewer."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from varuna import CutPoint, SampleOrder, Varuna

SAMPLES, BATCH = 21, 8


class Net(nn.Module):
    def __init__(self, reduction: str, dropout: float) -> None:
        super().__init__()
        self.first, self.cut, self.last = nn.Linear(4, 8), CutPoint(), nn.Linear(8, 1)
        self.dropout = nn.Dropout(dropout)
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        losses = self.last(self.cut(self.dropout(self.first(x)))).square()
        return losses.sum() if self.reduction == "sum" else losses.mean()


class RecordedMetrics:
    """Takes the place of a worker's records."""

    watched = True

    def __init__(self) -> None:
        self.samples: list[int] = []

    def note_inputs(self, inputs: Mapping[str, object]) -> None: ...

    def ends_at(self, step: int | None) -> None: ...

    def finish_step(self, step: int, loss: float, *, seconds: float, samples: int, is_first: bool) -> None:
        self.samples.append(samples)


def weigh(inputs: Mapping[str, Tensor]) -> float:
    return 0.5 * len(inputs["x"])


def train_an_epoch(mapping: str, reduction: str, dropout: float, weighted: bool) -> list[int]:
    torch.manual_seed(3)
    data = torch.randn(SAMPLES, 4)
    options: dict[str, Any] = {"loss_weight": weigh} if weighted else {}
    model = Varuna(
        Net(reduction, dropout), mapping, {"x": data[:2]}, BATCH, 2, device="cpu", seed=1, **options
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.set_optimizer(optimizer)
    metrics: Any = RecordedMetrics()
    model._metrics = model._updates.metrics = metrics
    order = SampleOrder(SAMPLES, batch_size=BATCH, seed=5)
    for _, inputs in model.batches(lambda samples: {"x": data[samples]}, order, steps=3):
        model.step(inputs)
        optimizer.step()
        model.zero_grad()
    samples: list[int] = metrics.samples
    return samples


@pytest.mark.parametrize(
    ("mapping", "reduction", "dropout", "weighted"),
    [
        ("0;", "mean", 0.0, False),
        ("0,2;1,3;", "mean", 0.0, False),
        ("0,2;1,3;", "mean", 0.1, False),
        ("0,1;", "mean", 0.0, True),
        ("0,1;2;", "mean", 0.0, False),
        ("0,1;", "sum", 0.1, False),
        ("0,1;", "sum", 0.0, False),
    ],
)
def test_a_short_batch_counts_with_its_own_samples(
    pool: Pool, mapping: str, reduction: str, dropout: float, weighted: bool
) -> None:
    """SEE-3, PRO-4"""
    ranks = 1 + max(int(rank) for rank in mapping if rank.isdigit())
    for found in pool.run(train_an_epoch, ranks, mapping, reduction, dropout, weighted):
        assert found[:2] == [BATCH, BATCH]
        # A sum of losses without random numbers needs no exchange, so a replica knows only its own share.
        estimated = reduction == "sum" and not dropout
        assert found[2] == pytest.approx(5, abs=1 if estimated else 0)
