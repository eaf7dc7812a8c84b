"""A resumed VarunaTrainer has the weights of its folder, and reads the rows that an undisturbed one reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hf.trainers import arguments, language_model, padded, sentences
from tests.pool import Pool
from varuna.hf import VarunaTrainer
from varuna.hf.trainer import data, reader

ROWS = 24


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = transformers.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    return found


def train_and_save(
    folder: str, name: str, resume: bool, stages: int, options: dict[str, Any]
) -> tuple[int, bool]:
    """Train, and save the model; return the step, and whether gather_model gives the saved weights."""
    usual = {"gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 2, "warmup_steps": 0}
    args = arguments(folder, **{**usual, "lr_scheduler_type": "constant", **options})
    rows = sentences(ROWS)
    trainer = VarunaTrainer(
        language_model(), args, train_dataset=rows, eval_dataset=sentences(4, seed=2), stages=stages
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(f"{folder}/{name}")
    whole = trainer.gather_model()
    saved = weights_of(f"{folder}/{name}")
    return trainer.state.global_step, whole is None or all(
        torch.equal(saved[key], value) for key, value in whole.state_dict().items()
    )


BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("options", "ranks"),
    [({"max_steps": 6}, 2), ({"max_steps": 4}, 1), ({"max_steps": 6, "learning_rate": 0.5, **BEST}, 1)],
)
def test_a_resume_with_no_update_left_has_the_trained_model(
    options: dict[str, Any], ranks: int, pool: Pool, tmp_path: Path
) -> None:
    """TRA-1: a finished run is resumed to export it, or a job restarts after its last checkpoint.

    6 updates are an epoch, and 4 end within one.
    """
    folder = str(tmp_path)
    for name, resume in (("final", False), ("again", True)):
        for found in pool.run(train_and_save, ranks, folder, name, resume, ranks, options):
            assert found == (options["max_steps"], True), name
    final, again = weights_of(f"{folder}/final"), weights_of(f"{folder}/again")
    start = language_model().state_dict()
    assert all(torch.equal(again[key], value) for key, value in final.items())
    assert not all(torch.equal(start[key], value) for key, value in final.items())


def test_a_folder_that_cannot_be_loaded_is_an_error(tmp_path: Path) -> None:
    """TRA-1: without a batch, the model of a finished run is not wrapped."""
    train_and_save(str(tmp_path), "final", False, 1, {"max_steps": 2})
    args = arguments(tmp_path, max_steps=2, save_strategy="steps")
    trainer = VarunaTrainer(language_model(), args, train_dataset=Stream([]))
    with pytest.raises(ValueError, match=r"checkpoint-2 cannot be loaded: the training data has no batch"):
        trainer.train(resume_from_checkpoint=True)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        yield from self.rows


class ShuffledStream(Stream):
    """Draws its order from the global generator of torch at each pass."""

    def __iter__(self) -> Any:
        yield from (self.rows[index] for index in torch.randperm(len(self.rows)).tolist())


class OwnOrder(VarunaTrainer):
    """Has a sampler without set_epoch, which draws from the global generators."""

    def _get_train_sampler(self, *_args: Any) -> Any:
        return RandomOrder()


class RandomOrder(torch.utils.data.Sampler[int]):
    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        import random

        import numpy

        rows = list(range(ROWS))
        random.shuffle(rows)
        yield from numpy.random.permutation(rows).tolist()


def read_rows(
    folder: Path | str, resume: str | None, rows: int | type[Stream], **options: Any
) -> list[tuple[int, ...]]:
    """Train, and return the rows of each batch. `rows` is the length of a dataset, or a stream of 24 rows."""
    seen: list[tuple[int, ...]] = []

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        seen.append(tuple(row["number"] for row in batch))
        return padded(batch)

    kind = OwnOrder if options.pop("own_sampler", False) else VarunaTrainer
    numbered = [{**row, "number": number} for number, row in enumerate(sentences(ROWS, lengths=(8, 12)))]
    dataset = numbered if isinstance(rows, int) else rows(numbered)
    args = arguments(folder, remove_unused_columns=False, **{"gradient_accumulation_steps": 1, **options})
    trainer = kind(language_model(), args, train_dataset=dataset, data_collator=collate, stages=1)
    trainer.train(resume_from_checkpoint=resume)
    trainer.pipeline.close()
    return seen


ORDERS: dict[str, dict[str, Any]] = {
    "groups": {"train_sampling_strategy": "group_by_length"},
    "unseeded": {"accelerator_config": {"use_seedable_sampler": False}},
    "own": {"own_sampler": True},
    "seeded": {},
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_restart_within_the_second_epoch_reads_the_same_rows(order: str, tmp_path: Path) -> None:
    """TRA-1: samplers draw the order of an epoch from the global generators, or from the epoch's number."""
    given = {**ORDERS[order], "max_steps": 18, "save_strategy": "steps", "save_steps": 4}
    whole = read_rows(tmp_path, None, ROWS, **given)
    assert len(whole) == 18
    assert sorted(row for batch in whole[6:12] for row in batch) == list(range(ROWS))
    # 8 and 16 are within an epoch, 12 is its end. The second restart continues the first one.
    for step, read in ((8, whole[8:]), (16, whole[16:]), (12, whole[12:])):
        assert read_rows(tmp_path, f"{tmp_path}/checkpoint-{step}", ROWS, **given) == read, step


def test_an_iterator_may_be_used_for_all_epochs(tmp_path: Path) -> None:
    """TRA-1: the one of a DataLoader with persistent workers is."""

    class OwnLoader(VarunaTrainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                self.train_dataset, 4, collate_fn=padded, num_workers=1, persistent_workers=True
            )

    args = arguments(tmp_path, max_steps=5, gradient_accumulation_steps=1)
    trainer = OwnLoader(language_model(), args, train_dataset=Stream(sentences(8)), stages=1)
    trainer.train()
    assert trainer.state.global_step == 5 and trainer.state.epoch == 2.2


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_short_stream_goes_on_at_its_row(accumulated: int, tmp_path: Path) -> None:
    """TRA-1: 16 batches, of which a pass has 6. The pass of the folder is read from its start."""
    given = {
        "gradient_accumulation_steps": accumulated,
        "max_steps": 16 // accumulated,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = read_rows(tmp_path, None, Stream, **given)
    passes = [tuple(range(first, first + 4)) for first in range(0, ROWS, 4)] * 3
    assert whole[:16] == passes[:16]
    for step in range(2, 16 // accumulated, 2):
        seen = read_rows(tmp_path, f"{tmp_path}/checkpoint-{step}", Stream, **given)
        assert seen == whole[(step * accumulated - 1) // 6 * 6 :], step


def test_a_stream_with_a_random_order_goes_on_at_its_row(tmp_path: Path) -> None:
    """TRA-1: a pass draws its order from the global generator, once more after a restart."""
    given = {"max_steps": 15, "save_strategy": "steps", "save_steps": 4}
    whole = read_rows(tmp_path, None, ShuffledStream, **given)
    seen = read_rows(tmp_path, f"{tmp_path}/checkpoint-8", ShuffledStream, **given)
    assert seen[2 : 2 + 7] == whole[8:15]


def test_a_longer_training_goes_on_with_a_stream_that_has_not_ended(tmp_path: Path) -> None:
    """TRA-1: max_steps of the first training are not the stream's length."""
    given = {"save_strategy": "steps", "save_steps": 3}
    whole = read_rows(tmp_path, None, Stream, max_steps=3, **given)
    seen = read_rows(tmp_path, f"{tmp_path}/checkpoint-3", Stream, max_steps=9, **given)
    assert [batch[0] for batch in whole[:3]] == [0, 4, 8]
    assert [batch[0] for batch in seen[3:9]] == [12, 16, 20, 0, 4, 8]


def test_a_stream_that_has_ended_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-1: Trainer asks for max_steps updates in each pass; each question is a message to all ranks."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, control: Any, **_options: Any) -> None:
            control.should_training_stop = state.global_step == 6

    calls = []

    def count(*args: Any) -> Any:
        calls.append(args)
        return reader.read_batches(*args)

    monkeypatch.setattr(data, "read_batches", count)
    args = arguments(tmp_path, max_steps=1000, gradient_accumulation_steps=1)
    trainer = VarunaTrainer(
        language_model(), args, train_dataset=Stream(sentences(12)), callbacks=[Stop()], stages=1
    )
    trainer.train()
    assert trainer.state.global_step == 6 and len(calls) == 7
    trainer.train()
    assert len(calls) == 14
