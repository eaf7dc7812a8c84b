"""The training data of VarunaTrainer: replaces methods of transformers' Trainer that read and count it."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any
from unittest.mock import patch

import transformers
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna.execute.comm.values import PlainValue
from varuna.hf.trainer import files
from varuna.hf.trainer.checkpoints import TrainerCheckpoints
from varuna.hf.trainer.epoch_reader import EpochReader, load_random_state, set_random_state
from varuna.hf.trainer.reader import BatchMessage, plain_batch, read_batches


class TrainerData(TrainerCheckpoints):
    """A Trainer whose first rank reads the data."""

    _epoch_start: dict[str, Any] | None = None  # random state, for the rest of a resumed epoch

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Return the numbers of steps and samples. Those of the first rank, which reads the data."""
        own, collective = super().set_initial_training_values(args, dataloader), self.pipeline.collective
        numbers: tuple[Any, ...] = collective.broadcast(own, collective.ranks[0], tuple[int | float, ...])
        return numbers

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Return how many epochs were trained, and how many batches of the next one."""
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._epoch_start = None
        if resume_from_checkpoint is None:
            return epochs, batches
        if self.state.global_step >= max_steps:
            return num_train_epochs, 0
        is_stream = num_train_epochs == sys.maxsize
        if is_stream and not self.args.ignore_data_skip:
            accumulated = self.args.gradient_accumulation_steps
            epochs, batches = files.position_in_stream(resume_from_checkpoint, accumulated)
        if batches:
            self._epoch_start = load_random_state(resume_from_checkpoint)
        return epochs, batches

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        self._epoch = None
        trained: Any = super()
        trained._run_epoch(*args, **options)

    def _read_batches(self, batches: Iterator[Any], count: int) -> list[dict[str, Any]]:
        """Read the batches of an update on the first rank, and return them on all ranks."""
        if self._epoch is None:
            if self._epoch_start is not None:
                set_random_state(self._epoch_start)
                self._epoch_start = None
            self._epoch = EpochReader()
        if self._epoch.has_ended:  # Trainer asks for all updates up to max_steps
            return []

        def read() -> BatchMessage:
            return BatchMessage(PlainValue(list(map(plain_batch, islice(batches, count)))))

        with self.pipeline.patient():
            found: list[dict[str, Any]] = read_batches(self.pipeline.collective, read).batches.value
        self._epoch.has_ended = len(found) < count
        return found

    def _prepared(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the script's `_prepare_inputs` makes of a batch. It may draw random numbers.

        The first rank calls it, for all. Without one, each rank moves its share to its device later.
        """
        if not any(_is_overridden(self, name) for name in PREPARATION):
            return dict(inputs.items())

        def prepare() -> BatchMessage:
            prepared = plain_batch(self._prepare_inputs(plain_batch(inputs)))
            return BatchMessage(PlainValue([pytree.tree_map_only(Tensor, Tensor.cpu, prepared)]))

        found: dict[str, Any] = read_batches(self.pipeline.collective, prepare).batches.value[0]
        return found


PREPARATION = ("_prepare_inputs", "_prepare_input")


def _is_overridden(trainer: transformers.Trainer, name: str) -> bool:
    return getattr(getattr(trainer, name), "__func__", None) is not getattr(transformers.Trainer, name)


def plain_preparation(trainer: transformers.Trainer) -> AbstractContextManager[Any]:
    """Within the block, `_prepare_inputs` is that of transformers: the inputs were prepared before."""
    plain = {name: partial(getattr(transformers.Trainer, name), trainer) for name in PREPARATION}
    return patch.dict(vars(trainer), plain)
