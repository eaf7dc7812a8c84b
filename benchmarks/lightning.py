"""CPU seconds per update of Lightning's Trainer and Fabric in one process, with and without Varuna.

One process with one thread computes all the time, and CPU time does not depend on other processes.
"""

import time
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import varuna.lightning  # noqa: F401 (registers the strategy)
from benchmarks.trainers import TOKENS, make_model, make_rows

BATCH, SKIPPED = 8, 3
QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}


class LanguageModel(L.LightningModule):
    """A Llama whose loss is computed by the model, as people write it."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.model = make_model(layers, width, tokens)
        self.ends: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.process_time())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def seconds_with_trainer(strategy: str, updates: int, layers: int, width: int) -> list[float]:
    model = LanguageModel(layers, width, TOKENS)
    steps = updates + SKIPPED
    chosen: Any = strategy
    trainer = L.Trainer(
        strategy=chosen, accelerator="cpu", devices=1, max_steps=steps, enable_model_summary=False, **QUIET
    )
    trainer.fit(model, _loader(steps))
    return [after - before for before, after in pairwise(model.ends[SKIPPED - 1 :])]


def seconds_with_fabric(strategy: str, updates: int, layers: int, width: int) -> list[float]:
    steps = updates + SKIPPED
    fabric = L.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    plain = make_model(layers, width, TOKENS)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
    ends = []
    for batch in fabric.setup_dataloaders(_loader(steps)):
        fabric.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.process_time())
    return [after - before for before, after in pairwise(ends[SKIPPED - 1 :])]


def _loader(steps: int) -> DataLoader[Any]:
    rows: Any = make_rows(BATCH * steps)
    return DataLoader(rows, batch_size=BATCH)
