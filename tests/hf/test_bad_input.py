"""Bad input of a job of two processes: every rank gets an error that names it, and no rank waits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from tests.hf.models import make_batch, write_folder
from tests.hf.trainers import arguments, assert_same_logs, language_model, sentences
from tests.pool import Pool
from varuna import Varuna
from varuna.hf import VarunaTrainer, empty_model, hf_weights


def error_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class OwnStep(VarunaTrainer):
    """Replaces training_step, as scripts do."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = model(**inputs).loss
        self.accelerator.backward(loss)
        found: torch.Tensor = loss.detach()
        return found


class OwnEvaluation(VarunaTrainer):
    def prediction_step(self, model: Any, inputs: Any, *_others: Any, **_options: Any) -> Any:
        return model(**inputs).loss, None, None


def train(
    model: Any,
    folder: str,
    rows: list[dict[str, Any]],
    kind: type[VarunaTrainer] = VarunaTrainer,
    *,
    stages: int = 2,
    **given: Any,
) -> str:
    args = arguments(folder, max_steps=1, eval_strategy="steps", eval_steps=1)
    vars(args).update(given)
    return error_of(kind(model, args, train_dataset=rows, eval_dataset=rows[:4], stages=stages).train)


def save_stage(folder: str, rows: list[dict[str, Any]], *, adapted: bool) -> str:
    """Save the model as scripts of one process do."""
    import peft

    model: Any = language_model()
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"]))
    VarunaTrainer(model, arguments(folder, max_steps=1), train_dataset=rows, stages=2).train()
    return error_of(lambda: model.save_pretrained(folder) if adapted else model.state_dict())


def read_folder(folder: str) -> str:
    def wrap() -> None:
        model, weights = empty_model(folder), hf_weights(folder)
        Varuna(model, "0;1;", make_batch("gpt2", 2), 2, 1, device="cpu", initialize=weights).close()

    return error_of(wrap)


def use_bad_input(folder: str, damaged: str, empty: str) -> dict[str, str]:
    """Return the errors of this rank, one after another in the same processes."""
    import peft

    config = peft.AdaLoraConfig(target_modules=["c_attn"], total_step=10, init_r=4, target_r=2)
    rows = sentences(16)
    without_labels = [{"input_ids": row["input_ids"]} for row in rows]
    return {
        "adapter of changing rank": train(peft.get_peft_model(language_model(), config), folder, rows),
        "own training_step, stages": train(language_model(), folder, rows, OwnStep),
        "own training_step, replicas": train(language_model(), folder, rows, OwnStep, stages=1),
        "own prediction_step": train(language_model(), folder, rows, OwnEvaluation),
        "generate": train(language_model(), folder, rows, predict_with_generate=True),
        "own saving": save_stage(folder, rows, adapted=False),
        "own saving of adapters": save_stage(folder, rows, adapted=True),
        "no loss": train(transformers.GPT2Model(language_model().config), folder, without_labels),
        "missing shard": read_folder(damaged),
        "no shards": read_folder(empty),
    }


def test_bad_input_is_named_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    """TRA-1, TRA-2, TRA-3: also if only one stage would read the missing shard."""
    damaged, empty = tmp_path / "damaged", tmp_path / "empty"
    write_folder(damaged, "gpt2", shards=3)
    last = max(damaged.glob("model-*.safetensors"))
    last.unlink()
    empty.mkdir()
    (empty / "config.json").write_text((damaged / "config.json").read_text())
    for found in pool.run(use_bad_input, 2, str(tmp_path), str(damaged), str(empty), timeout=240):
        assert "AdaLora" in found["adapter of changing rank"]
        assert "LoraConfig" in found["adapter of changing rank"]
        for own in ("training_step, stages", "prediction_step", "saving", "saving of adapters"):
            assert "holds the stage of one rank" in found[f"own {own}"]
            assert "must call super()" in found[f"own {own}"]
        assert "must call super().training_step" in found["own training_step, replicas"]
        assert "predict_with_generate=True does not work over 2 stages" in found["generate"]
        assert "did not return a loss" in found["no loss"]
        assert f"{last.name} does not exist, but the index lists it" in found["missing shard"]
        assert "contains no model" in found["no shards"]


class OwnStream(torch.utils.data.IterableDataset[Any]):
    """A stream that ends early on the second rank."""

    def __iter__(self) -> Iterator[Any]:
        yield from own_rows()


def own_rows() -> list[dict[str, Any]]:
    """Return fewer rows on the second rank."""
    return sentences(5 if dist.is_initialized() and dist.get_rank() == 1 else 26)


def train_on_own_data(kind: str, folder: str, stages: int | None = None) -> Any:
    """Return the logs of a training on a stream, and of one on rows."""
    layout: dict[str, Any] = {} if kind == "Trainer" else {"stages": stages}
    logs = []
    for data, given in (
        (OwnStream(), {"max_steps": 4}),
        (own_rows(), {"max_steps": -1, "num_train_epochs": 1}),
    ):
        trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
            language_model(), arguments(folder, **given), train_dataset=data, **layout
        )
        trainer.train()
        logs.append(trainer.state.log_history)
    return logs


def test_data_that_ends_early_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    """TRA-4: the first rank reads for all, so both train on its samples, and make as many steps."""
    expected = train_on_own_data("Trainer", str(tmp_path))
    for found in pool.run(train_on_own_data, 2, "VarunaTrainer", str(tmp_path), 1, timeout=240):
        for logs, others in zip(found, expected, strict=True):
            assert_same_logs(logs, others)
