"""Hooks of Trainer that scripts override: they run as with transformers' Trainer."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.hf.trainers import (
    arguments,
    assert_same_logs,
    classifier,
    language_model,
    padded,
    sentences,
    sentences_with_classes,
)
from tests.pool import Pool
from varuna.hf import VarunaTrainer
from varuna.hf.trainer.loss_watch import LossWatch
from varuna.hf.trainer.refusals import UnsupportedFeature


class RandomMask:
    """Replaces tokens by others that are drawn, and forgets labels; each batch has its own."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared: Any = super()  # of Trainer
        found = dict(prepared._prepare_inputs(inputs))
        chosen = torch.rand(found["input_ids"].shape) < 0.3
        found["input_ids"] = torch.where(
            chosen, torch.randint_like(found["input_ids"], 64), found["input_ids"]
        )
        found["labels"] = found["labels"].masked_fill(chosen, -100)
        return found


def train(staged: bool, folder: str, stages: int | None = None) -> list[dict[str, Any]]:
    evaluations = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args = arguments(folder, max_steps=4, **evaluations)
    layout = {"stages": stages} if staged else {}
    kind: Any = type("Chosen", (RandomMask, *([VarunaTrainer] if staged else []), hf.Trainer), {})
    rows = {"train_dataset": sentences(44), "eval_dataset": sentences(10, seed=5)}
    trainer = kind(language_model(), args, **rows, **layout)
    trainer.train()
    logs: list[dict[str, Any]] = trainer.state.log_history
    for metrics in (None, lambda _found: {}):  # of the loss only, and of all outputs
        trainer.compute_metrics = metrics
        torch.manual_seed(5)
        logs.append(trainer.evaluate())
    return logs


@pytest.mark.parametrize("stages", [1, 2])
def test_inputs_are_prepared_by_the_script(stages: int, pool: Pool, tmp_path: Path) -> None:
    """TRA-1: in training and evaluations; random numbers are drawn once for all ranks."""
    expected = train(False, str(tmp_path / "one"))
    assert expected[-1]["eval_loss"] == pytest.approx(expected[-2]["eval_loss"])
    for logs in pool.run(train, 2, True, str(tmp_path / "mine"), stages, timeout=240):
        assert_same_logs(logs, expected)


class LossOfTheStep:
    """An own loss whose weight grows with the steps. `as_input`: the batch has it; else it is read."""

    as_input = False
    scale = 1.0
    classes = (1.0, 2.0, 3.0)

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared: Any = super()  # of Trainer
        found = prepared._prepare_inputs(inputs)
        weight = torch.tensor(float(self.state.global_step))  # type: ignore[attr-defined]
        return {**found, "weight": weight} if self.as_input else found

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        weight = inputs.pop("weight", None)
        outputs = model(**inputs)
        logits = outputs.logits * torch.tensor(self.classes)
        loss = self.scale * torch.nn.functional.cross_entropy(logits, labels)
        if self.reads_step or self.as_input:  # type: ignore[attr-defined]
            weight = self.state.global_step if weight is None else weight  # type: ignore[attr-defined]
            loss = loss + weight * logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class Changing(hf.TrainerCallback):
    """Changes an attribute of the trainer after the first step."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value, self.trainer = name, value, None

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        if self.name:
            setattr(self.trainer, self.name, self.value)


def train_classes(staged: bool, folder: str, change: tuple[str, Any] = ("", None), **attributes: Any) -> Any:
    bases = (LossOfTheStep, *([VarunaTrainer] if staged else []), hf.Trainer)
    kind: Any = type("Chosen", bases, {"reads_step": False, **attributes})
    callback = Changing(*change)
    evaluations = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    args = arguments(folder, max_steps=3, **evaluations)
    rows = {"train_dataset": sentences_with_classes(24), "eval_dataset": sentences_with_classes(4, 5)}
    callback.trainer = trainer = kind(classifier(), args, **rows, callbacks=[callback])
    trainer.train()
    return trainer.state.log_history


@pytest.mark.parametrize(
    ("change", "reads_step", "found"),
    [
        (("", None), True, r"weight \* logits.*computes aten\.mul\.Tensor\(.*, 1\), but .*, 0\)"),
        (("scale", 0.5), False, r"cross_entropy.*, 0\.5\), but .*, 1\.0\)"),
        (("classes", (3.0, 2.0, 1.0)), False, r"torch\.tensor.*\(constant .*, but .*\(constant "),
    ],
)
def test_a_loss_that_reads_a_changing_value_is_refused(
    change: tuple[str, Any], reads_step: bool, found: str, tmp_path: Path
) -> None:
    """TRA-1: a captured loss would keep the first value."""
    with pytest.raises(UnsupportedFeature, match=rf"(?s)test_trainer_hooks\.py.*{found}.*_prepare_inputs"):
        train_classes(True, str(tmp_path), change, reads_step=reads_step)


@pytest.mark.parametrize("as_input", [False, True])
def test_a_loss_may_read_constants_and_inputs_that_change(as_input: bool, tmp_path: Path) -> None:
    """TRA-1: this is the way out that the error names."""
    expected = train_classes(False, str(tmp_path / "one"), as_input=as_input)
    logs = train_classes(True, str(tmp_path / "mine"), as_input=as_input)
    assert_same_logs(logs, expected)


class LossOfTwoCalls:
    """An own loss of two calls of the model, of batches with different lengths."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        with torch.no_grad():
            before = model(**inputs).logits
        changes = (outputs.logits - before).square().sum(-1)[:, :-1]
        scores = outputs.logits[:, :-1].reshape(-1, 64)
        losses = torch.nn.functional.cross_entropy(scores, labels[:, 1:].reshape(-1), reduction="none")
        loss = (losses + changes.reshape(-1)).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def train_lengths(staged: bool, folder: str) -> Any:
    kind: Any = type("Chosen", (LossOfTwoCalls, *([VarunaTrainer] if staged else []), hf.Trainer), {})
    rows = sentences(24, lengths=(5, 12))
    trainer = kind(language_model(), arguments(folder, max_steps=3), train_dataset=rows, data_collator=padded)
    trainer.train()
    return trainer.state.log_history


def test_an_own_loss_of_batches_of_different_lengths(tmp_path: Path) -> None:
    """TRA-1: other lengths are no change of the loss."""
    assert_same_logs(train_lengths(True, str(tmp_path / "mine")), train_lengths(False, str(tmp_path / "one")))


def test_a_loss_that_cannot_be_checked_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """TRA-1"""

    def loss_of_a_number(model: Any, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        return inputs["x"] * float(model(**inputs))

    watch, model = LossWatch(loss_of_a_number), torch.nn.Linear(2, 2)
    watch.begin({"x": torch.ones(2)}, None)
    watch.add_outputs(torch.ones(()))
    watch.start(model)
    assert "it is not checked whether it reads Python values that change" in caplog.text
    watch.check(model)


def watch_of(loss: Any) -> tuple[LossWatch, torch.nn.Module]:
    """Return a watch of a loss that was captured with the output [2.0, 2.0] of a model."""
    watch, model = LossWatch(loss), torch.nn.Linear(2, 2)
    watch.begin({"x": torch.ones(2)}, None)
    watch.add_outputs(torch.full((2,), 2.0))
    return watch, model


@pytest.mark.parametrize("keep", ["parts.append(y.mean().item())", "parts.append(y.detach())"])
def test_a_loss_that_keeps_a_value_is_refused_with_its_line(keep: str, tmp_path: Path) -> None:
    """TRA-1: a value to be logged would be that of the capture, a symbol or a tensor without values."""
    lines = ["parts = []", "def loss(model, inputs, num_items):", "    y = model(**inputs)"]
    (tmp_path / "script.py").write_text("\n".join([*lines, f"    {keep}", "    return y.sum()", ""]))
    watch, model = watch_of(runpy.run_path(str(tmp_path / "script.py"))["loss"])
    with pytest.raises(
        UnsupportedFeature, match=r"(?s)script\.py:[34]: .* keeps a value.*if not model.training"
    ):
        watch.start(model)


def test_a_loss_may_keep_values_in_evaluations_and_divide_by_one_that_it_reads() -> None:
    """TRA-1"""
    kept: list[Any] = []

    def loss(model: Any, inputs: dict[str, Any], num_items: Any) -> torch.Tensor:
        outputs: torch.Tensor = model(**inputs)
        if not model.training:
            kept.append(outputs.mean().item())
        return outputs.sum() / outputs.abs().sum().item()

    watch, model = watch_of(loss)
    watch.start(model)
    watch.check(model.train())
    assert not kept


def test_a_tensor_that_was_kept_when_the_loss_was_captured_is_refused() -> None:
    """TRA-1: it has no values."""
    with FakeTensorMode():
        weights = torch.ones(2)
    watch, model = watch_of(lambda model, inputs, num_items: (model(**inputs) * weights).sum())
    with pytest.raises(UnsupportedFeature, match=r"in an earlier call.*__init__"):
        watch.start(model)
