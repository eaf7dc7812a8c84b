"""Saves and ends a Trainer in a job of `varuna run` whose machines change; the next start continues there."""

import logging
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from varuna.environment import VarunaEnvironment

log = logging.getLogger("varuna")


def add_preemption(trainer: Any, callback_base: Any) -> None:
    """Let a Trainer of a managed job save and end when the manager asks for it."""
    managed = VarunaEnvironment.read(os.environ).generation is not None
    if not managed or threading.current_thread() is not threading.main_thread():
        return
    if not any(isinstance(callback, SaveAndExit) for callback in trainer.callbacks):
        kind: Any = type("SaveOnRequest", (SaveAndExit, callback_base), {"__module__": __name__})
        trainer.callbacks.append(kind())


class SaveAndExit:
    """A callback: after the last batch of an epoch, all ranks save and end, if one of them got SIGUSR1.

    Not within an epoch: Lightning would read its data from the start again.
    """

    def __init__(self) -> None:
        self._requested = False
        signal.signal(signal.SIGUSR1, self._on_signal)

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._requested = True

    def on_train_batch_end(self, trainer: Any, *_args: Any) -> None:
        if not trainer.is_last_batch:
            return
        requested = torch.tensor(float(self._requested), device=trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(requested)
        if not requested:
            return
        self._requested = False
        saver = next((one for one in trainer.checkpoint_callbacks if getattr(one, "save_last", False)), None)
        if saver is None:
            log.warning(
                "the machines of this job change, but nothing is saved (add ModelCheckpoint(dirpath, "
                "save_last=True), and call fit(..., ckpt_path='last'))"
            )
            return
        name = f"{saver.CHECKPOINT_NAME_LAST}{saver.FILE_EXTENSION}"
        trainer.save_checkpoint(os.path.join(saver.dirpath, name))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise SystemExit(0)
