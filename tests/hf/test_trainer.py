"""VarunaTrainer trains as transformers' Trainer does in one process, at every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.hf.trainers import Logs, arguments, assert_same_logs, language_model, sentences
from tests.pool import Pool
from varuna.hf import VarunaTrainer

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]


def train_language_model(kind: str, folder: str, stages: int | None = None, **options: Any) -> Any:
    """Logs, and the final weights by name."""
    layout = {} if kind == "Trainer" else {"stages": stages}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        language_model(),
        arguments(folder, eval_strategy="steps", eval_steps=7, **options),
        train_dataset=sentences(44),
        eval_dataset=sentences(13, seed=2),
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
    """TRA-1: 20 steps with warm-up, clipping, weight decay, labels of -100, accumulation and evaluations."""
    expected, weights = one_process
    results = pool.run(train_language_model, stages * replicas, "VarunaTrainer", str(tmp_path), stages)
    for logs, _ in results:
        assert_same_logs(logs, expected)
    for name, value in weights.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-4, atol=1e-6)
