"""What VarunaTrainer reports of its updates: the manager, the ledger and the metrics count them as steps."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf.trainers import arguments, classifier, language_model, sentences, sentences_with_classes
from varuna.environment import VarunaEnvironment
from varuna.hf import VarunaTrainer
from varuna.hf.trainer.pipeline import TrainerPipeline
from varuna.morph.run.progress_page import ProgressReader
from varuna.observe.losses import LossFollower

UPDATES, ACCUMULATED = 4, 3
ONE_STEP = [(update, update * ACCUMULATED, True) for update in range(UPDATES)]
STEP_BY_STEP = [
    (update, update * ACCUMULATED + number, number == count - 1)
    for update, count in enumerate([ACCUMULATED] * (UPDATES - 1) + [2])
    for number in range(count)
]
"""Update, step of the random numbers, whether it ends the update; the last update has two batches."""


@pytest.mark.parametrize("joins", [True, False])
def test_an_update_is_one_step(joins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-1: also if its accumulated batches run one by one. The fourth update has 8 of 12 samples."""
    steps: list[Any] = []
    (tmp_path / "losses").mkdir()
    reader = ProgressReader(tmp_path / "page", 0)
    environment = VarunaEnvironment(progress_file=str(reader.path), losses=str(tmp_path / "losses"))
    for name, value in environment.write().items():
        monkeypatch.setenv(name, value)
    step = TrainerPipeline.step

    def noted(pipeline: TrainerPipeline, inputs: Any, **options: Any) -> float:
        steps.append((options["update"], options["random_step"], options["ends_update"]))
        return step(pipeline, inputs, **options)

    monkeypatch.setattr(TrainerPipeline, "step", noted)
    trainer = VarunaTrainer(
        language_model() if joins else classifier(),
        arguments(
            tmp_path,
            max_steps=UPDATES,
            gradient_accumulation_steps=ACCUMULATED,
            save_strategy="steps",
            save_steps=2,
        ),
        train_dataset=sentences(44) if joins else sentences_with_classes(44),
        stages=1,
    )
    trainer.train()
    trainer.pipeline.close()
    assert steps == (ONE_STEP if joins else STEP_BY_STEP)
    progress = reader.read()
    assert progress.iteration == progress.steps == progress.saved_step == UPDATES
    assert progress.missing_samples == 4 and not progress.in_step
    losses = {record.step: record.loss for record in LossFollower(tmp_path / "losses").read()}
    logged = {entry["step"] - 1: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    assert losses == pytest.approx(logged, rel=1e-5)


def test_batches_of_an_update_draw_their_own_random_numbers(tmp_path: Path) -> None:
    """TRA-1: the number of the update is the same for all of them."""
    trainer = VarunaTrainer(
        language_model(dropout=0.5), arguments(tmp_path, max_steps=1), train_dataset=sentences(8), stages=1
    )
    trainer.train()
    row = torch.arange(1, 13).repeat(4, 1)
    batch = {"input_ids": row, "labels": row, "num_items_in_batch": torch.tensor(44)}
    first, other, again = (
        trainer.pipeline.step(batch, update=7, random_step=number, ends_update=True, max_norm=None)
        for number in (21, 22, 21)
    )
    assert first == again != other
    trainer.pipeline.close()
