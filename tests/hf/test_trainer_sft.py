"""VarunaTrainer over trl's SFTTrainer: losses of trl where they differ from those of the model itself."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

from tests.hf.trainers import assert_same_logs, language_model, prompts, sft_arguments, tokenizer
from varuna.hf import VarunaTrainer


class RenamedModel(GPT2LMHeadModel):
    """A class that transformers does not know as a causal language model: its labels are not shifted."""


class ModelWithMeanLoss(GPT2LMHeadModel):
    """A model that Trainer gives no number of items."""

    accepts_loss_kwargs = False


def masked_rows() -> Any:
    """24 rows. No label of the rows 8 to 15, the second update, counts, nor one of the rows 16 to 19."""
    import datasets

    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, 64, (24, 9), generator=draw).tolist()
    labels = [[-100] * 9 if 8 <= number < 20 else row for number, row in enumerate(tokens)]
    rows = [{"input_ids": row, "labels": own} for row, own in zip(tokens, labels, strict=True)]
    return datasets.Dataset.from_list(rows)


def train(staged: bool, kind: type, folder: Path, **options: Any) -> list[dict[str, Any]]:
    import trl

    model = language_model()
    model.__class__ = kind
    order = {"train_sampling_strategy": "sequential", "num_train_epochs": 1}
    prepared = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    evaluations = {"eval_strategy": "epoch", "per_device_eval_batch_size": 8}
    args = sft_arguments(folder, **order, **prepared, **evaluations, **options)
    chosen: Any = type("Staged", (VarunaTrainer, trl.SFTTrainer), {}) if staged else trl.SFTTrainer
    rows = {"train_dataset": masked_rows(), "eval_dataset": masked_rows().select(range(4, 12))}
    trainer = chosen(model, args, **rows, processing_class=tokenizer())
    trainer.train()
    logs: list[dict[str, Any]] = trainer.state.log_history
    if not staged:
        for entry in logs:  # SFTTrainer: evaluations have them
            for name in ("entropy", "mean_token_accuracy"):
                entry.pop(name, None)
    return logs


@pytest.mark.parametrize("kind", [GPT2LMHeadModel, ModelWithMeanLoss])
def test_an_update_without_a_counted_token_has_no_loss(kind: type, tmp_path: Path) -> None:
    """TRA-1: trl divides by one, where the model itself would divide by zero."""
    expected = train(False, kind, tmp_path / "one")
    logs = train(True, kind, tmp_path / "mine")
    assert_same_logs(logs, expected)
    assert all(math.isfinite(value) for entry in logs for value in entry.values())
    assert [entry["loss"] for entry in logs if "loss" in entry][1] == 0


def test_label_smoothing_of_trl_shifts_the_labels_of_every_model(tmp_path: Path) -> None:
    """TRA-1"""
    options = {"label_smoothing_factor": 0.1, "max_steps": 1}
    expected = train(False, RenamedModel, tmp_path / "one", **options)
    assert_same_logs(train(True, RenamedModel, tmp_path / "mine", **options), expected)


@pytest.mark.parametrize("given", [None, {"device_map": {"": "cpu"}}])
def test_a_model_that_trl_loads_is_not_placed_on_a_gpu(
    given: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRA-1: trl's default is device_map="auto", which fills the GPUs with the whole model."""
    import trl

    language_model().save_pretrained(tmp_path / "source")
    load, found = trl.trainer.sft_trainer.create_model_from_path, []

    def recorded(name: str, **options: Any) -> Any:
        found.append(options["device_map"])
        return load(name, **options)

    monkeypatch.setattr("trl.trainer.sft_trainer.create_model_from_path", recorded)
    args = sft_arguments(tmp_path, model_init_kwargs=given)
    kind: Any = type("Staged", (VarunaTrainer, trl.SFTTrainer), {})
    kind(str(tmp_path / "source"), args, train_dataset=prompts(4, 1), processing_class=tokenizer())
    assert found == [(given or {"device_map": None})["device_map"]]
