"""Saving and loading of VarunaTrainer: replaces the methods of transformers' Trainer that touch files."""

import os
from typing import Any

import torch
import transformers
from torch import nn

from varuna.hf.trainer import files
from varuna.hf.trainer.epoch_reader import EpochReader
from varuna.hf.trainer.one_process import own_rank
from varuna.hf.trainer.pipeline import TrainerPipeline
from varuna.hf.trainer.refusals import UnsupportedFeature
from varuna.hf.trainer.save_signal import ignore_signal


class TrainerCheckpoints(transformers.Trainer):
    """A Trainer whose model is a pipeline, as far as its files are concerned."""

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    _resume_folder: str | None = None  # to load when the model is wrapped
    _epoch: EpochReader | None = None  # that is being read
    _owner: files.FolderOwner | None = None  # of the folders that this call of train() writes
    _is_exiting = False  # the next start continues from the folder that is being saved
    _saved_folder: str | None = None  # the last complete one that this call of train() wrote or resumed

    @property
    def pipeline(self) -> TrainerPipeline:
        raise NotImplementedError

    def _save_and_exit(self) -> None:
        """Save a checkpoint folder and end this process. All ranks call it between two steps."""
        self._is_exiting = True
        self._save_checkpoint(self.model, None)
        ignore_signal()  # another one must not interrupt the end
        self.pipeline.close()
        raise SystemExit(0)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save checkpoint-N. A restart needs the training state, whatever `save_only_model` says."""
        folder = self._step_folder(trial)
        if self._is_exiting and folder == self._saved_folder:
            return
        files.begin_folder(self.pipeline, folder, self._owner)
        restarts = self._owner is not None or self._is_exiting
        if self.args.save_only_model and restarts:
            self._save_optimizer_and_scheduler(folder)
            self._save_rng_state(folder)
        super()._save_checkpoint(model, trial)
        if restarts or not self.args.save_only_model:
            self._saved_folder = folder

    def _step_folder(self, trial: Any = None) -> str:
        """Return the folder of the current step."""
        name = f"checkpoint-{self.state.global_step}"
        return os.path.realpath(os.path.join(self._get_output_dir(trial), name))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a Hugging Face folder: each stage writes its own files. All ranks call this."""
        folder = output_dir or self.args.output_dir
        if self.pipeline.model is None:
            if self.args.should_save:
                self._save(folder)
        else:
            files.save_model(self.pipeline, self.model, folder)
            if self.args.should_save:
                self._save_companions(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_companions(self, folder: str) -> None:
        """Save the tokenizer and the arguments beside the model, as Trainer does."""
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        files.save_training_state(self.pipeline, output_dir, self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the rank that reads the data
            super()._save_rng_state(output_dir)
            if self._epoch is not None:
                self._epoch.save_random_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a folder of transformers' Trainer; those of Varuna's store come later."""
        if files.has_store(resume_from_checkpoint):
            return
        if self.pipeline.model is not None:
            files.load_weights(self.pipeline, resume_from_checkpoint)
        elif any(parameter.is_meta for parameter in self.model.parameters()):
            raise UnsupportedFeature(
                f"{resume_from_checkpoint} has no store of Varuna, from which a model on `meta` could resume "
                "(build the model in memory, or start at step 0 from its weights, with "
                "initialize=hf_weights(folder) in varuna_options)"
            )
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if os.path.realpath(checkpoint) == self._step_folder():
            self._saved_folder = self._step_folder()
        if not files.has_store(checkpoint):
            if self.pipeline.model is None:  # optimizer.pt of transformers' Trainer has the whole model's
                super()._load_optimizer_and_scheduler(checkpoint)
            elif os.path.exists(os.path.join(checkpoint, "optimizer.pt")):
                raise UnsupportedFeature(
                    f"{checkpoint} has the optimizer state of one process, and the model is wrapped already "
                    "(make a new trainer to resume from it)"
                )
            return
        scheduler = os.path.join(checkpoint, "scheduler.pt")
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        self._resume_folder = checkpoint

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        files.load_weights(self.pipeline, self.state.best_model_checkpoint)

    def gather_model(self, rank: int = 0) -> nn.Module | None:
        """Return the whole trained model on the CPU of `rank`; None on other ranks. All ranks call this."""
        if self.pipeline.model is None:
            return self.model if own_rank() == rank else None
        found = self.pipeline.model.gather_model(rank)
        if found is not None:
            found.__class__ = type(self.model)
        return found
