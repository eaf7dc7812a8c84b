"""Saves and ends a Trainer in a job of `varuna run` whose machines change; the next start continues there."""

import logging
import os
import signal
import threading
from typing import Any

import torch
import torch.distributed as dist

from varuna.environment import VarunaEnvironment
from varuna.morph.run.progress_page import ProgressWriter, process_progress
from varuna.morph.run.worker import early_signal

log = logging.getLogger("varuna")


def add_preemption(trainer: Any, callback_base: Any) -> None:
    """Let a Trainer of a managed job save and end when the manager asks for it."""
    managed = VarunaEnvironment.read(os.environ).generation is not None
    if not managed or threading.current_thread() is not threading.main_thread():
        return
    found = next((callback for callback in trainer.callbacks if isinstance(callback, SaveAndExit)), None)
    if found is None:
        kind: Any = type("SaveOnRequest", (SaveAndExit, callback_base), {"__module__": __name__})
        found = kind()
        trainer.callbacks.append(found)
    found.listen()


class SaveAndExit:
    """A callback: at the end of an epoch, all ranks save and end, if one of them got SIGUSR1.

    Not within an epoch: Lightning would read its data from the start again. As one of Lightning's Checkpoint
    callbacks, it comes after the validation and after all other hooks of the epoch's end. After `fit`, the
    script's handler is back.
    """

    def __init__(self) -> None:
        self._requested = False
        self._before: Any = None  # the script's handler, during fit
        self._progress = ProgressWriter()  # writes nothing until a signal comes

    def listen(self) -> None:
        """Take over the signal, until the end of `fit`. One that came before is not lost."""
        if self._before is None:
            self._before = signal.signal(signal.SIGUSR1, self._on_signal)
        if early_signal.came or self._requested:
            early_signal.came = False
            self._request()

    def teardown(self, *_args: Any, **_options: Any) -> None:
        if self._requested:  # else nothing was requested, or this process ends after its save
            self._progress.on_demand(False)
        before, self._before = self._before, None
        if before is not None and signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:
            signal.signal(signal.SIGUSR1, before)

    def on_exception(self, *_args: Any) -> None:
        self.teardown()

    def _on_signal(self, _number: int, _frame: Any) -> None:
        self._request()

    def _request(self) -> None:
        """Tell the manager that this worker will save and end, so that it waits for the end of the epoch."""
        self._requested = True
        if not self._progress.watched:
            self._progress = process_progress()
        self._progress.on_demand(True)

    def on_validation_batch_end(self, *_args: Any) -> None:
        self._progress.alive()

    def on_train_batch_end(self, *_args: Any) -> None:
        self._progress.alive()

    def on_train_epoch_end(self, trainer: Any, *_args: Any) -> None:
        requested = torch.tensor(float(self._requested), device=trainer.strategy.root_device)
        if dist.is_initialized():
            dist.all_reduce(requested)
        if not requested or ends_after_epoch(trainer):
            return
        self._requested = False
        saver = next((one for one in trainer.checkpoint_callbacks if getattr(one, "save_last", False)), None)
        if saver is None:
            log.warning(
                "the machines of this job change, but nothing is saved (add ModelCheckpoint(dirpath, "
                "save_last=True), and call fit(..., ckpt_path='last'))"
            )
            self._progress.on_demand(False)
            return
        # Lightning does this after the hooks, and not again after a restart.
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        mark_epoch_as_done(trainer.fit_loop)
        name = f"{saver.CHECKPOINT_NAME_LAST}{saver.FILE_EXTENSION}"
        trainer.save_checkpoint(os.path.join(saver.dirpath, name))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise SystemExit(0)


def mark_epoch_as_done(fit_loop: Any) -> None:
    """Set the progress of Lightning's loops so that the next start begins with the next epoch.

    From the end of an epoch, Lightning does so only in some cases: with `max_steps`, and if this run has
    continued a checkpoint, it would train one batch twice. From the end of the last batch of a finished
    epoch, it always does, with all hooks of the next epoch.
    """
    epochs, epoch_loop = fit_loop.epoch_progress, fit_loop.epoch_loop
    for count in (epochs.total, epochs.current):
        count.ready = count.started = count.completed = count.processed
    batches = epoch_loop.batch_progress
    for count in (batches.total, batches.current):
        count.completed = count.processed - 1
    batches.is_last_batch = False  # else Lightning counts the epoch again
    epoch_loop._batches_that_stepped -= 1  # the step of loggers; Lightning adds 1 when it continues


def ends_after_epoch(trainer: Any) -> bool:
    """Return whether `fit` ends with this epoch by itself, for example by EarlyStopping."""
    steps, epochs = trainer.max_steps, trainer.max_epochs
    if 0 <= steps <= trainer.global_step or 0 <= epochs <= trainer.current_epoch + 1:
        return True
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)
