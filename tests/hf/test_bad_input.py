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


def train(model: Any, folder: str, rows: list[dict[str, Any]]) -> str:
    return error_of(VarunaTrainer(model, arguments(folder), train_dataset=rows, stages=2).train)


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
        assert "did not return a loss" in found["no loss"]
        assert f"{last.name} does not exist, but the index lists it" in found["missing shard"]
        assert "contains no model" in found["no shards"]


class OwnStream(torch.utils.data.IterableDataset[Any]):
    """A stream that ends early on the second rank."""

    def __iter__(self) -> Iterator[Any]:
        is_second = dist.is_initialized() and dist.get_rank() == 1
        yield from sentences(5 if is_second else 26)


def train_on_streams(kind: str, folder: str, stages: int | None = None) -> Any:
    layout = {} if kind == "Trainer" else {"stages": stages}
    trainer = (transformers.Trainer if kind == "Trainer" else VarunaTrainer)(
        language_model(), arguments(folder, max_steps=4), train_dataset=OwnStream(), **layout
    )
    trainer.train()
    return trainer.state.log_history


def test_a_stream_that_ends_early_on_one_rank(pool: Pool, tmp_path: Path) -> None:
    """TRA-4: the first rank reads for all, so both train on its samples."""
    expected = train_on_streams("Trainer", str(tmp_path))
    for logs in pool.run(train_on_streams, 2, "VarunaTrainer", str(tmp_path), 1, timeout=240):
        assert_same_logs(logs, expected)
