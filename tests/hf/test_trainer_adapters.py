"""VarunaTrainer trains adapters of peft as transformers' Trainer does in one process."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.hf.trainers import arguments, assert_same_logs, language_model, sentences
from tests.pool import Pool
from varuna.hf import VarunaTrainer

STEPS = 20


def train_adapters(kind: str, folder: str, stages: int | None = None, resume: str | None = None) -> Any:
    """Return the logs; save checkpoints in `folder`, and the adapter in `folder`/final."""
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], modules_to_save=["ln_f"])
    model: Any = peft.get_peft_model(language_model(), config)
    torch.manual_seed(1)
    for name, value in model.named_parameters():
        if "lora_B" in name:  # 0 at first, so that A would have no gradient
            torch.nn.init.normal_(value, std=0.1)
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        model,
        arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=STEPS // 2),
        train_dataset=sentences(44),
        **({} if kind == "Trainer" else {"stages": stages}),
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/final")
    return trainer.state.log_history


def adapter_of(folder: str | Path) -> dict[str, torch.Tensor]:
    whole = peft.PeftModel.from_pretrained(language_model(), str(folder))
    return peft.get_peft_model_state_dict(whole)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("one"))
    return train_adapters("Trainer", folder), folder


@pytest.mark.parametrize(("stages", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_adapters_train_as_in_one_process(
    stages: int, replicas: int, expected: Any, pool: Pool, tmp_path: Path
) -> None:
    """TRA-1, TRA-2: logs of 20 steps, and files that peft loads."""
    logs, one = expected
    world = stages * replicas
    for found in pool.run(train_adapters, world, "VarunaTrainer", str(tmp_path), stages):
        assert_same_logs(found, logs)
    plain = adapter_of(f"{one}/final")
    for name, value in adapter_of(tmp_path / "final").items():
        torch.testing.assert_close(value, plain[name], rtol=1e-4, atol=1e-6)
    assert not list(tmp_path.glob("checkpoint-*/model*.safetensors")), "the base is not saved"


def test_adapters_resume_at_another_layout(expected: Any, pool: Pool, tmp_path: Path) -> None:
    """TRA-2: saved at 2 stages, and by transformers' Trainer."""
    logs, one = expected
    mine = str(tmp_path / "mine")
    pool.run(train_adapters, 2, "VarunaTrainer", mine, 2)
    for resumed in (f"{mine}/checkpoint-10", f"{one}/checkpoint-10"):
        found = pool.run(train_adapters, 2, "VarunaTrainer", str(tmp_path / "on"), 1, resumed)[0]
        assert_same_logs(found[:-1], logs[:-1])


def train_to_best(kind: str, folder: str, stages: int | None = None) -> Any:
    """Train too fast, so that an early step is the best; return its loss, and that of the loaded model."""
    config = peft.LoraConfig(
        r=4, target_modules=["c_attn"], modules_to_save=["ln_f"], init_lora_weights=False
    )
    strategies = {f"{name}_strategy": "steps" for name in ("eval", "save")}
    best = {"load_best_model_at_end": True, "save_only_model": True, "save_steps": 1, "eval_steps": 1}
    torch.manual_seed(2)
    trainer: Any = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        peft.get_peft_model(language_model(), config),
        arguments(folder, max_steps=3, warmup_steps=0, learning_rate=0.3, **strategies, **best),
        train_dataset=sentences(44),
        eval_dataset=sentences(8, seed=2),
        **({} if kind == "Trainer" else {"stages": stages}),
    )
    trainer.train()
    return trainer.state.best_global_step, trainer.state.best_metric, trainer.evaluate()["eval_loss"]


def test_the_best_adapter_is_loaded_from_its_file(pool: Pool, tmp_path: Path) -> None:
    """TRA-2: with save_only_model there is no store."""
    step, metric, loss = train_to_best("Trainer", str(tmp_path / "one"))
    assert step < 3 and metric == pytest.approx(loss)
    mine = tmp_path / "mine"
    for found in pool.run(train_to_best, 2, "VarunaTrainer", str(mine), 2):
        assert found == (step, pytest.approx(metric, rel=1e-5), pytest.approx(loss, rel=1e-5))
    assert not list(mine.glob("checkpoint-*/varuna"))
