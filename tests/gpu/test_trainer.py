"""Evaluations of VarunaTrainer on a GPU, with losses that are computed from outputs and labels."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import nn

from tests.hf.test_trainer_arguments import mean_logit, summed_loss
from tests.hf.trainers import (
    arguments,
    assert_same_logs,
    classifier,
    language_model,
    prompts,
    sentences,
    sentences_with_classes,
    sft_arguments,
    tokenizer,
)
from tests.pool import Pool
from varuna.hf import VarunaTrainer

pytestmark = pytest.mark.gpu

EVALUATED: dict[str, Any] = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "use_cpu": False}


def smoothed(folder: str) -> dict[str, Any]:
    return {
        "model": language_model(),
        "args": arguments(folder, label_smoothing_factor=0.1, **EVALUATED),
        "train_dataset": sentences(16),
        "eval_dataset": sentences(6, seed=2),
        "compute_metrics": mean_logit,
    }


def loss_function(folder: str) -> dict[str, Any]:
    return {
        "model": language_model(),
        "args": arguments(folder, **EVALUATED),
        "train_dataset": sentences(16),
        "eval_dataset": sentences(6, seed=2),
        "compute_loss_func": summed_loss,
    }


def own_loss(folder: str) -> dict[str, Any]:
    return {
        "model": classifier(),
        "args": arguments(folder, **EVALUATED),
        "train_dataset": sentences_with_classes(16),
        "eval_dataset": sentences_with_classes(6, seed=2),
    }


def fine_tuning(folder: str) -> dict[str, Any]:
    """trl's SFTTrainer logs entropy and token accuracy of evaluations."""
    return {
        "model": language_model(),
        "args": sft_arguments(folder, **EVALUATED),
        "train_dataset": prompts(16, 1),
        "eval_dataset": prompts(6, 2),
        "processing_class": tokenizer(),
    }


class OwnLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, label_smoothing=0.2)
        return (loss, outputs) if return_outputs else loss


def train(kind: str, case: Callable[[str], dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    bases: list[Any] = [OwnLoss] if case is own_loss else []
    bases += [VarunaTrainer] if kind == "VarunaTrainer" else []
    if case is fine_tuning:
        import trl

        bases.append(trl.SFTTrainer)
    trainer = type("Chosen", (*bases, transformers.Trainer), {})(**case(folder))
    trainer.train()
    logs: list[dict[str, Any]] = trainer.state.log_history
    return logs


@pytest.mark.parametrize("case", [smoothed, loss_function, own_loss, fine_tuning])
def test_evaluations_on_cuda(case: Callable[[str], dict[str, Any]], pool: Pool, tmp_path: Path) -> None:
    """TRA-1, V21: outputs and labels are on one device, as with transformers' Trainer."""
    (expected,) = pool.run(train, 1, "Trainer", case, str(tmp_path / "one"))
    (found,) = pool.run(train, 1, "VarunaTrainer", case, str(tmp_path / "mine"))
    for entry in expected:  # SFTTrainer: evaluations have them
        for name in ("entropy", "mean_token_accuracy"):
            entry.pop(name, None)
    assert_same_logs(found, expected, tolerance=1e-3)
