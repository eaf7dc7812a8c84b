"""The loss of a batch is compared with those of its parts: any kind of batch; a warning says if it is not."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from tests.lightning.modules import refused
from tests.pool import Pool
from varuna.lightning.losses import compare_parts


@dataclass(frozen=True)
class Batch:
    x: Tensor
    mask: Tensor


class Masked(L.LightningModule):
    """A masked mean, of a batch with attributes; returns a mapping that is no dict."""

    def __init__(self, divides: bool = True) -> None:
        super().__init__()
        self.layer, self.divides = nn.Linear(3, 1), divides

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = self.layer(batch.x).square().mean(1)
        divisor = batch.mask.sum() if self.divides else len(batch.mask)
        return BatchEncoding({"loss": (losses * batch.mask).sum() / divisor})


class Sharded(OrderedDict[str, Tensor]):
    """A dict with attributes, as in many datasets."""

    def __getattr__(self, name: str) -> Tensor:
        return self[name]


def values(samples: int = 6) -> dict[str, Tensor]:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return {"x": x, "mask": (torch.arange(samples) != 1).float()}


@pytest.mark.parametrize("kind", [BatchEncoding, Sharded, lambda found: Batch(**found)])
def test_any_kind_of_batch_is_compared_with_its_parts(kind: Any) -> None:
    torch.manual_seed(0)
    batch = kind(values())
    check = compare_parts(Masked(), batch, [0], None)
    assert check.difference is not None and "for 6 samples" in check.difference and check.skipped is None
    assert compare_parts(Masked(divides=False), batch, [0], None) == type(check)()
    assert len(batch.x) == 6


class Failing(Masked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise KeyError("labels")


class Noisy(Masked):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.rand(())


@pytest.mark.parametrize(
    ("module", "batch", "weight", "said"),
    [
        (Masked, Batch(**values(1)), None, "a single sample"),
        (Masked, object(), None, "no tensor is found in the batch, a object"),
        (Failing, Batch(**values()), None, "raises KeyError('labels')"),
        (Noisy, Batch(**values()), None, "draws random numbers"),
        (Masked, Batch(**values()), lambda batch: 0, "loss_weight of the first batch is zero"),
    ],
)
def test_a_comparison_that_is_skipped_says_why(module: Any, batch: Any, weight: Any, said: str) -> None:
    check = compare_parts(module(), batch, [0], weight)
    assert check.difference is None and said in (check.skipped or "")


def fit_and_listen(kind: str, folder: str, batch: int) -> tuple[str, list[str]]:
    """Train; return the error, and the warnings about the comparison."""
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("varuna").addHandler(handler)
    try:
        found = refused(kind, folder, batch=batch, steps=2)
    finally:
        logging.getLogger("varuna").removeHandler(handler)
    return found, [text for text in noted if "was not compared" in text]


def test_the_first_rank_warns_that_the_loss_was_not_compared(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: with one sample for each rank, there are no parts."""
    (first, warnings), (second, others) = pool.run(fit_and_listen, 2, "AutoEncoder", str(tmp_path), 2)
    assert first == second == "trained" and others == []
    assert len(warnings) == 1 and "a single sample" in warnings[0] and "loss_weight=" in warnings[0]
    (_, warnings), _ = pool.run(fit_and_listen, 2, "AutoEncoder", str(tmp_path), 4)
    assert warnings == []
