"""VarunaTrainer trains as transformers' Trainer does in one process, at every layout."""

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hf.trainers import (
    arguments,
    assert_same_logs,
    classifier,
    language_model,
    padded,
    prompts,
    sentences,
    sentences_with_classes,
    sft_arguments,
    share_of_right,
    tokenizer,
)
from tests.pool import Pool
from varuna.errors import CaptureError
from varuna.hf import VarunaTrainer
from varuna.hf.trainer.pipeline import join_batches

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]


def train_language_model(kind: str, folder: str, stages: int | None = None, **options: Any) -> Any:
    """Logs, and the final weights by name."""
    layout = {} if kind == "Trainer" else {"stages": stages}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        language_model(),
        arguments(folder, **options),
        train_dataset=sentences(44),
        **layout,
    )
    trainer.train()
    model = trainer.model if kind == "Trainer" else trainer.gather_model()
    return trainer.state.log_history, None if model is None else model.state_dict()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_language_model("Trainer", str(tmp_path_factory.mktemp("one")))


@pytest.mark.parametrize(("stages", "replicas"), LAYOUTS)
def test_logs_and_weights_are_those_of_one_process(
    stages: int, replicas: int, one_process: Any, pool: Pool, tmp_path: Path
) -> None:
    """TRA-1: 20 steps with warm-up, clipping, weight decay, labels of -100 and accumulation."""
    expected, weights = one_process
    results = pool.run(train_language_model, stages * replicas, "VarunaTrainer", str(tmp_path), stages)
    for logs, _ in results:
        assert_same_logs(logs, expected)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-4, atol=1e-6)


def train_with_saves(kind: str, folder: str, stages: int | None = None, resume: str | None = None) -> Any:
    """Train with padding of different lengths and dropout 0; save every third step."""
    layout: dict[str, Any] = {} if kind == "Trainer" else {"stages": stages, "micro_batch": 2}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        language_model(),
        arguments(folder, max_steps=8, save_strategy="steps", save_steps=3, save_total_limit=2),
        train_dataset=sentences(44, lengths=(9, 12)),
        data_collator=padded,
        **layout,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer.state.log_history


def test_resumes_at_another_layout(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: checkpoint-N at 2 stages goes on with 2 replicas, and is a folder of transformers, too."""
    one, mine = str(tmp_path / "one"), str(tmp_path / "mine")
    expected = train_with_saves("Trainer", one)
    assert_same_logs(pool.run(train_with_saves, 2, "VarunaTrainer", mine, 2)[0], expected)
    assert sorted(path.name for path in Path(mine).glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
    for resumed, world, stages in (
        (f"{mine}/checkpoint-6", 2, 1),
        (f"{one}/checkpoint-6", 2, 2),  # of transformers' Trainer
    ):
        logs = pool.run(train_with_saves, world, "VarunaTrainer", str(tmp_path / "on"), stages, resumed)[1]
        assert_same_logs(logs[:-1], expected[:-1])
    weights = transformers.GPT2LMHeadModel.from_pretrained(f"{one}/checkpoint-8").state_dict()
    found = transformers.GPT2LMHeadModel.from_pretrained(f"{mine}/checkpoint-8").state_dict()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert transformers.trainer_utils.get_last_checkpoint(mine) == f"{mine}/checkpoint-8"


def train_classifier(kind: str, folder: str, stages: int | None = None) -> Any:
    """Train until early stopping, load the best model, evaluate and predict."""
    layout: dict[str, Any] = {} if kind == "Trainer" else {"stages": stages, "micro_batch": 2}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        classifier(),
        arguments(
            folder,
            max_steps=12,
            gradient_accumulation_steps=3,
            learning_rate=2e-2,
            max_grad_norm=0.0,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="right",
            label_smoothing_factor=0.1,
        ),
        train_dataset=sentences_with_classes(26),
        eval_dataset=sentences_with_classes(13, seed=2),
        compute_metrics=share_of_right,
        callbacks=[transformers.EarlyStoppingCallback(early_stopping_patience=1)],
        **layout,
    )
    trainer.train()
    test = trainer.predict(sentences_with_classes(7, seed=3))
    trainer.save_model(f"{folder}/final")
    return trainer.state.log_history, test.metrics, test.predictions, trainer.state.best_metric


def test_metrics_early_stopping_and_the_best_model(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: a loss that is a mean over samples, accumulated; metrics of logits; label smoothing."""
    expected, test, logits, best = train_classifier("Trainer", str(tmp_path / "one"))
    assert expected[-1]["step"] < 12, "this training stops early"
    for found in pool.run(train_classifier, 2, "VarunaTrainer", str(tmp_path / "mine"), 2):
        assert_same_logs(found[0], expected)
        assert_same_logs([found[1]], [test])
        assert found[3] == best
        torch.testing.assert_close(torch.tensor(found[2]), torch.tensor(logits), rtol=1e-4, atol=1e-5)
    kind = transformers.BertForSequenceClassification
    wanted = kind.from_pretrained(tmp_path / "one" / "final").state_dict()
    saved = kind.from_pretrained(tmp_path / "mine" / "final").state_dict()
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)


def train_sft(kind: str, folder: str, stages: int | None = None) -> Any:
    """Fine-tune on prompts and completions of different lengths, with dropout and an evaluation."""
    import trl

    class Staged(VarunaTrainer, trl.SFTTrainer):
        pass

    model = language_model()
    layout: dict[str, Any] = {} if kind == "SFTTrainer" else {"stages": stages, "micro_batch": 2}
    trainer = (trl.SFTTrainer if kind == "SFTTrainer" else Staged)(
        model,
        args=sft_arguments(folder, max_steps=3, eval_strategy="steps", eval_steps=3),
        train_dataset=prompts(40, 1),
        eval_dataset=prompts(10, 2),
        processing_class=tokenizer(),
        **layout,
    )
    trainer.train()
    return trainer.state.log_history


def test_sft(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: trl's SFTTrainer; its training logs lack entropy and token accuracy, evaluations have them."""
    expected = train_sft("SFTTrainer", str(tmp_path / "one"))
    for entry in expected:
        entry.pop("entropy", None)
        entry.pop("mean_token_accuracy", None)
    assert "eval_mean_token_accuracy" in expected[-2]
    assert_same_logs(pool.run(train_sft, 2, "Staged", str(tmp_path / "mine"), 2)[1], expected)


def train_with_dropout(folder: str, stages: int) -> Any:
    trainer = VarunaTrainer(
        language_model(dropout=0.2),
        arguments(folder, max_steps=3, gradient_checkpointing=True, bf16=False),
        train_dataset=sentences(20),
        stages=stages,
        micro_batch=2,
    )
    trainer.train()
    return trainer.state.log_history


def test_dropout_does_not_depend_on_the_layout(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: with dropout and recompute, two stages and two replicas log the same."""
    (one, _), (two, _) = (pool.run(train_with_dropout, 2, str(tmp_path), stages) for stages in (1, 2))
    assert_same_logs(one, two)


def test_evaluations_have_outputs_on_the_device_of_the_labels(tmp_path: Path) -> None:
    """TRA-1: losses that are computed from them mixed a GPU with the CPU. `meta` stands for the GPU."""
    rows = sentences(8)
    trainer = VarunaTrainer(language_model(), arguments(tmp_path, max_steps=1), train_dataset=rows, stages=1)
    trainer.train()
    batch, pipeline = padded(rows[:2]), trainer.pipeline
    assert trainer._outputs(**batch).logits.device == trainer.args.device == pipeline.settings.device
    pipeline.settings = replace(pipeline.settings, device=torch.device("meta"))
    outputs = trainer._outputs(**batch)
    assert outputs.logits.is_meta and outputs.loss.is_meta
    fused = trainer._outputs(**{**batch, "labels": batch["labels"].to("meta"), "fused_lm_head": True})
    assert fused.log_probs.is_meta
    pipeline.close()


class ScaledLoss(transformers.GPT2LMHeadModel):
    """Multiplies its loss by a number that the batch has."""

    def forward(self, input_ids: Any, alpha: Any, labels: Any = None, **options: Any) -> Any:
        outputs = super().forward(input_ids, labels=labels, **options)
        outputs.loss = outputs.loss * alpha
        return outputs


def with_number(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad rows, and add a number that is 1 or 2."""
    return {**padded(rows), "alpha": torch.tensor(float(rows[0]["input_ids"][0] % 2 + 1))}


def train_scaled(kind: str, folder: str, stages: int | None = None) -> Any:
    layout: dict[str, Any] = {} if kind == "Trainer" else {"stages": stages, "micro_batch": 2}
    model = language_model()
    model.__class__ = ScaledLoss
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        model,
        arguments(folder, max_steps=4, gradient_accumulation_steps=3),
        train_dataset=sentences(48),
        data_collator=with_number,
        **layout,
    )
    trainer.train()
    return trainer.state.log_history


def test_accumulated_batches_have_their_own_numbers(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: batches with different values of an input without dimensions are not one step."""
    expected = train_scaled("Trainer", str(tmp_path / "one"))
    for logs in pool.run(train_scaled, 2, "VarunaTrainer", str(tmp_path / "mine"), 2):
        assert_same_logs(logs, expected)


def test_batches_are_joined_by_shape_and_number() -> None:
    """TRA-1"""
    numbers = (1.0, 2.0, 1.0)
    batches = [{"x": torch.full((2, 3), n), "n": torch.tensor(a)} for n, a in enumerate(numbers)]
    first, second = join_batches(batches)
    assert first["x"][:, 0].tolist() == [0, 0, 2, 2] and first["n"] == 1
    assert second["x"][:, 0].tolist() == [1, 1] and second["n"] == 2


class ShortStream(torch.utils.data.IterableDataset[Any]):
    """Ends within an update: 3 batches, of which two make an update."""

    def __iter__(self) -> Any:
        yield from sentences(10)


def test_a_stream_that_ends_within_an_update(tmp_path: Path) -> None:
    """TRA-1: Trainer adds the gradient of the last batch to the next update, and clips their sum."""
    logs = []
    for kind in (transformers.Trainer, VarunaTrainer):
        trainer = kind(language_model(), arguments(tmp_path, max_steps=4), train_dataset=ShortStream())
        trainer.train()
        logs.append(trainer.state.log_history)
    assert_same_logs(logs[1], logs[0])


def fail_by_reading(folder: str) -> str:
    """The second batch of the data cannot be read, on the rank that reads it."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        if calls.append(1) or len(calls) > 2:
            raise ZeroDivisionError("broken row")
        return padded(rows)

    calls: list[int] = []
    trainer = VarunaTrainer(
        language_model(), arguments(folder), train_dataset=sentences(44), data_collator=collate, stages=2
    )
    try:
        trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def compute_loss_of_items(self: Any, model: Any, inputs: Any, *_args: Any, **_options: Any) -> Any:
    loss = model(**inputs).loss
    return loss * math.exp(-loss.item())


def test_errors_name_their_cause(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: data that fails on one rank ends all; a loss that reads values is refused by its line."""
    first, second = pool.run(fail_by_reading, 2, str(tmp_path))
    assert first == "ZeroDivisionError: broken row"
    assert "rank 0" in second and "broken row" in second
    kind = type("Custom", (VarunaTrainer,), {"compute_loss": compute_loss_of_items})
    with pytest.raises(CaptureError, match=r"loss\.item\(\)"):
        kind(language_model(), arguments(tmp_path), train_dataset=sentences(8)).train()


def train_images(kind: str, folder: str, stages: int | None = None, **options: Any) -> Any:
    """Train a ResNet; return logs, warnings, and the weights and running statistics by name."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    draw = torch.Generator().manual_seed(1)
    rows = [
        {"pixel_values": torch.randn(3, 16, 16, generator=draw), "labels": number % 3} for number in range(24)
    ]
    layout = {} if kind == "Trainer" else {"stages": stages, **options}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        transformers.ResNetForImageClassification(config),
        arguments(folder, max_steps=4),
        train_dataset=rows,
        **layout,
    )
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("varuna").addHandler(handler)
    try:
        trainer.train()
    finally:
        logging.getLogger("varuna").removeHandler(handler)
    model = trainer.model if kind == "Trainer" else trainer.gather_model()
    state = None if model is None else model.state_dict()
    return trainer.state.log_history, [text for text in noted if "BatchNorm" in text], state


def test_batch_norm_sees_the_batches_of_one_process(pool: Pool, tmp_path: Path) -> None:
    """TRA-1: over stages, its micro-batches are whole batches; its running statistics are the same."""
    expected, _, weights = train_images("Trainer", str(tmp_path / "one"))
    first, second = pool.run(train_images, 2, "VarunaTrainer", str(tmp_path / "mine"), 2)
    for logs, noted, _ in (first, second):
        assert_same_logs(logs, expected, tolerance=1e-4)
        assert not noted
    assert any("running_var" in name for name in weights)
    for name, value in weights.items():
        torch.testing.assert_close(first[2][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("stages", "options", "most"), [(2, {"micro_batch": 2}, 2), (1, {}, 2)])
def test_batch_norm_over_fewer_samples_is_reported_by_name(
    stages: int, options: dict[str, Any], most: int, pool: Pool, tmp_path: Path
) -> None:
    """TRA-1: small micro-batches, or replicas."""
    first, second = pool.run(train_images, 2, "VarunaTrainer", str(tmp_path), stages, **options)
    (warning,) = first[1]
    assert not second[1]
    assert "embedder.normalization" in warning and f"at most {most} samples of 4" in warning
    assert "micro_batch=4" in warning
