"""The precision of VarunaTrainer: the model computes in autocast, a loss around it in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.hf.trainers import arguments, assert_same_logs, language_model, sentences
from varuna.hf import VarunaTrainer

SCORES = torch.randn(64, 8, generator=torch.Generator().manual_seed(4))


def loss_of_a_product(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    """A product of the logits, which autocast would compute in bf16, and a sum that bf16 would round."""
    assert not torch.is_autocast_enabled("cpu")
    logits = outputs["logits"]
    assert logits.dtype is torch.float32
    products = (logits[:, :-1] @ SCORES).tanh()
    return (products * (labels[:, 1:] != -100).unsqueeze(-1)).sum() / num_items_in_batch


class OwnLoss:
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss: Tensor = loss_of_a_product(outputs, labels, num_items_in_batch)
        with torch.no_grad():
            second = model(**inputs)  # in autocast, too
        loss = loss + loss_of_a_product(second, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def seen_by_metrics(logits: Any, labels: Any) -> Any:
    assert logits.dtype is torch.float32
    return logits.argmax(-1)


def train(staged: bool, own: str, folder: Path) -> list[dict[str, Any]]:
    bases = [*([OwnLoss] if own == "method" else []), *([VarunaTrainer] if staged else []), hf.Trainer]
    options: dict[str, Any] = {"compute_loss_func": loss_of_a_product} if own == "function" else {}
    if own == "smoothing":
        options = {"preprocess_logits_for_metrics": seen_by_metrics, "compute_metrics": lambda _found: {}}
    smoothing = {"label_smoothing_factor": 0.1} if own == "smoothing" else {}
    steps = {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "warmup_steps": 0}
    args = arguments(folder, bf16=True, gradient_accumulation_steps=1, **steps, **smoothing)
    layout = {"micro_batch": 4} if staged else {}
    rows = {"train_dataset": sentences(8), "eval_dataset": sentences(4, seed=3)}
    kind: Any = type("Chosen", tuple(bases), {})
    trainer = kind(language_model(), args, **rows, **options, **layout)
    trainer.train()
    logs: list[dict[str, Any]] = trainer.state.log_history
    return logs


@pytest.mark.parametrize("own", ["function", "method", "smoothing"])
def test_a_loss_around_the_model_is_computed_in_float32(own: str, tmp_path: Path) -> None:
    """TRA-1: as with transformers' Trainer, the operations are the same, so the numbers are."""
    expected = train(False, own, tmp_path / "one")
    assert_same_logs(train(True, own, tmp_path / "mine"), expected, 1e-6)


def test_predictions_are_in_float32(tmp_path: Path) -> None:
    """TRA-1"""
    args = arguments(tmp_path, bf16=True)
    found = {}
    for kind in (hf.Trainer, VarunaTrainer):
        trainer: Any = kind(language_model(), args, train_dataset=sentences(4))
        trainer.evaluate(sentences(4))
        found[kind] = torch.as_tensor(trainer.predict(sentences(4)).predictions)
    assert found[VarunaTrainer].dtype is found[hf.Trainer].dtype
    torch.testing.assert_close(found[VarunaTrainer], found[hf.Trainer], rtol=0, atol=0)


@pytest.mark.parametrize(("given", "expected"), [("bf16", "bf16"), ("fp16", "fp16"), ("no", "fp32")])
def test_the_precision_of_accelerate_launch_is_honoured(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRA-1: it sets a variable, which transformers reads when the arguments are made."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", given)
    trainer = VarunaTrainer(language_model(), arguments(tmp_path), train_dataset=sentences(4))
    trainer.evaluate(sentences(4))
    assert trainer.pipeline.wrapped.plan.precision == expected
