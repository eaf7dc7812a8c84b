"""`VarunaTrainer`: transformers' Trainer over pipeline stages and replicas, with the results of one process."""

import math
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from varuna.environment import VarunaEnvironment
from varuna.execute.comm.values import PlainValue
from varuna.hf import trainer_files
from varuna.hf.captured_loss import NUM_BATCHES, ModelProxy
from varuna.hf.one_process import alone, given, own_rank, set_one_process
from varuna.hf.pipeline import (
    PipelineSettings,
    TrainerPipeline,
    join_batches,
    loss_inputs,
)
from varuna.hf.reader import BatchMessage, SharedReader, plain_batch, read_batches
from varuna.hf.trainer_refusals import UnsupportedFeature, refuse_arguments, refuse_model, refuse_trainer


class StageOptimizer(AcceleratedOptimizer):
    """The optimizer of this stage; skips an update whose gradients overflowed in fp16."""

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: TrainerPipeline) -> None:
        super().__init__(optimizer, device_placement=False)
        self._pipeline = pipeline

    def step(self, closure: Any = None) -> None:
        self._is_overflow, self._pipeline.overflow = self._pipeline.overflow, False
        if not self._is_overflow:
            self.optimizer.step()


class VarunaTrainer(transformers.Trainer):
    """transformers' Trainer for a model that is cut into pipeline stages and replicated over all processes.

    Change the import, and start the script with `varuna run` or torchrun:

        from varuna.hf import VarunaTrainer as Trainer

    `per_device_train_batch_size × gradient_accumulation_steps` is the batch of the whole job: the processes
    together are one device. `stages` and `micro_batch` choose the layout, unless the launcher has; without
    them, the number of stages is the smallest that fits. `varuna_options` are further options of `Varuna`.
    """

    def __init__(
        self,
        *positional: Any,
        stages: int | None = None,
        micro_batch: int | None = None,
        varuna_options: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._layout = (stages, micro_batch, dict(varuna_options or {}))
        self._pipeline: TrainerPipeline | None = None
        self._update: list[dict[str, Any]] = []  # batches of the current update
        self._num_steps = 0  # of the current update
        self._resume_folder: str | None = None
        args = named.get("args", positional[1] if len(positional) > 1 else None)
        if args is not None:
            refuse_arguments(args)
            set_one_process(args)
        super().__init__(*positional, **named)
        refuse_trainer(self)
        refuse_model(self.model)

    # ------------------------------------------------------------ one process for transformers

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        set_one_process(self.args)
        with alone(cpu=bool(self.args.use_cpu)):
            super().create_accelerator_and_postprocess()

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        return {**super()._build_accelerator_args(**options), "device_placement": False}

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank moves its stage to its device."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    def hyperparameter_search(self, *_args: Any, **_options: Any) -> Any:
        raise UnsupportedFeature("hyperparameter_search is not supported (start one job for each trial)")

    @property
    def pipeline(self) -> TrainerPipeline:
        """The wrapped model, once the first batch was read."""
        if self._pipeline is None or self._pipeline.source not in (None, self.model):
            if self._pipeline is not None:  # model_init has made another model
                self._pipeline.close()
            self._pipeline = TrainerPipeline(self._settings())
        return self._pipeline

    def _settings(self) -> PipelineSettings:
        args, (stages, micro_batch, options) = self.args, self._layout
        recompute = given(args, "gradient_checkpointing")
        if getattr(self.model, "is_gradient_checkpointing", False):
            self.model.gradient_checkpointing_disable()
            recompute = True
        return PipelineSettings(
            stages=stages,
            microbatch_size=micro_batch,
            batch_size=self._train_batch_size * args.gradient_accumulation_steps,
            device_batch_size=self._train_batch_size,
            precision="fp16" if args.fp16 else "bf16" if args.bf16 else "fp32",
            recompute=True if recompute else None,
            compile=bool(given(args, "torch_compile")),
            seed=args.seed,
            device=args.device,
            options=options,
        )

    # ------------------------------------------------------------ training

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers' Trainer does. In a managed job that was restarted, continue by itself."""
        if trial is not None:
            self.hyperparameter_search()
        refuse_model(self.model)
        generation = VarunaEnvironment.read(os.environ).generation
        if not resume_from_checkpoint and generation is not None and generation > 1:
            resume_from_checkpoint = self._agree(trainer_files.newest_folder(self.args.output_dir))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, self._save_and_exit)
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _agree(self, value: str | None) -> str | None:
        """Return the first rank's value on all ranks."""
        collective = self.pipeline.collective
        found: str | None = collective.broadcast(value, collective.ranks[0], str | None)
        return found

    def _save_and_exit(self, _signal: int, _frame: Any) -> None:
        """Save a checkpoint folder and end this process. All ranks call it between two steps."""
        self._save_checkpoint(self.model, None)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self.pipeline.close()
        raise SystemExit(0)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        if not isinstance(self.optimizer, StageOptimizer):
            self.optimizer = StageOptimizer(self.optimizer, self.pipeline)
        self.accelerator._optimizers.append(self.optimizer)
        self.accelerator._models.append(self.model)
        self.create_scheduler(num_training_steps=max_steps)
        self.model_wrapped = self.model
        if resume_from_checkpoint is not None:
            self._load_optimizer_and_scheduler(resume_from_checkpoint)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        if self.pipeline.model is not None:
            self._use_optimizer()
        return self.model, train_dataloader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Read the batches of an update on the first rank, and return them on all ranks."""

        def read() -> BatchMessage:
            batches = map(plain_batch, islice(epoch_iterator, num_batches))
            return BatchMessage(PlainValue(list(batches)))

        with self.pipeline.patient():
            batches = read_batches(self.pipeline.collective, read).batches.value
        num_items = self._get_num_items_in_batch(batches, device)
        self._update, self._num_steps, self.pipeline.grad_norm = [], 0, None
        self.current_gradient_accumulation_steps = len(batches)
        if batches and self.pipeline.model is None:
            self._wrap(batches[0], num_items)
            self._use_optimizer()
        return batches, num_items

    def _wrap(self, inputs: Mapping[str, Any], num_items: Any) -> None:
        self._set_signature_columns_if_needed()  # from the model's own forward
        self.pipeline.wrap(self.model, self._inputs(inputs, num_items), self._loss)

    def _use_optimizer(self) -> None:
        self.pipeline.adopt(self.optimizer.optimizer)
        if self._resume_folder is not None:
            trainer_files.load_training_state(self.pipeline, self._resume_folder)
            self._resume_folder = None

    def _inputs(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """Return the inputs of the captured loss: a batch, and the numbers that its loss is divided by."""
        found = loss_inputs(inputs, num_items)
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            accepts = self.model_accepts_loss_kwargs and num_items is not None
            is_scaled = accepts or self.compute_loss_func is not None
        if not is_scaled and self.args.gradient_accumulation_steps > 1:
            found[NUM_BATCHES] = torch.tensor(float(self.current_gradient_accumulation_steps))
        return found

    def _loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Compute the loss as Trainer does. This is what is captured."""
        if type(self).compute_loss.__module__.startswith("trl."):
            # The same loss without its fused head, which keeps the model from being cut.
            inputs["use_cache"] = False
            compute: Any = super(_trl_base(type(self)), self).compute_loss
        else:
            compute = self.compute_loss
        loss = compute(model, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, Tensor)
        return loss

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run a batch through all stages; the batches of an update together, if their losses add up."""
        if not model.training:
            model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        self._update.append(self._inputs(inputs, num_items_in_batch))
        pipeline, count = self.pipeline, self.current_gradient_accumulation_steps
        is_last = self._num_steps + len(self._update) == count
        joins = count > 1 and NUM_BATCHES not in self._update[0] and pipeline.adds_up
        loss = 0.0
        if is_last or not joins:
            batches = join_batches(self._update) if joins else self._update
            whole = is_last and len(batches) == 1 and not self._num_steps
            first = self.state.global_step * self.args.gradient_accumulation_steps + self._num_steps
            for number, batch in enumerate(batches):
                loss += pipeline.step(
                    batch, iteration=first + number, max_norm=self._max_norm if whole else None
                )
            self._num_steps += len(self._update)
            self._update = []
        return torch.tensor(loss, device=self.args.device)

    @property
    def _max_norm(self) -> float:
        return self.args.max_grad_norm if self.args.max_grad_norm > 0 else math.inf

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return torch.tensor(self.pipeline.clip(self._max_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | None = None) -> Tensor:
        return torch.tensor(self.pipeline.clip(math.inf)) if grad_norm is None else grad_norm

    # ------------------------------------------------------------ evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **options: Any) -> Any:
        def collective() -> Any:
            return self.pipeline.collective

        reader = SharedReader(dataloader, collective, self.accelerator.gradient_state)
        return super().evaluation_loop(reader, *args, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        labels = [inputs.get(name) for name in self.label_names]
        if self.pipeline.model is None:
            self._wrap_for_evaluation(inputs)
        is_own = type(self).compute_loss is transformers.Trainer.compute_loss
        if prediction_loss_only and is_own and labels and all(label is not None for label in labels):
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            loss = self.pipeline.evaluate(loss_inputs(inputs, num_items))
            return torch.tensor(loss, device=self.args.device), None, None
        through: Any = ModelProxy(self.model, self._outputs)
        found: tuple[Tensor | None, Any, Any] = super().prediction_step(
            through, plain_batch(inputs), prediction_loss_only, ignore_keys
        )
        return found

    def _outputs(self, **inputs: Any) -> Any:
        plain = {name: value for name, value in inputs.items() if name != "fused_lm_head"}
        if "fused_lm_head" not in inputs:
            return self.pipeline.outputs(plain)
        from varuna.hf.fused_head import fused_outputs

        labels = plain.pop("labels")
        return fused_outputs(self.pipeline.outputs(plain).logits, labels.cpu())

    def _wrap_for_evaluation(self, inputs: Mapping[str, Any]) -> None:
        """Wrap a model that is evaluated before it was trained."""
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        if self.label_names and not all(inputs.get(name) is not None for name in self.label_names):
            raise UnsupportedFeature(
                f"predict was called before train or evaluate, with a batch without {self.label_names}: the model "
                "is cut along its loss (call evaluate() once before, or give the test set labels)"
            )
        self._wrap(inputs, self._get_num_items_in_batch([inputs], self.args.device))
        self.pipeline.adopt(None)

    # ------------------------------------------------------------ checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as a Hugging Face folder: each stage writes its own files. All ranks call this."""
        folder = output_dir or self.args.output_dir
        if self.pipeline.model is None:
            if self.args.should_save:
                self._save(folder)
        else:
            trainer_files.save_model(self.pipeline, self.model, folder)
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
        trainer_files.save_training_state(self.pipeline, output_dir, self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the rank that reads the data
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a folder of transformers' Trainer; those of Varuna's store come later."""
        if trainer_files.has_store(resume_from_checkpoint):
            return
        if self.pipeline.model is not None:
            trainer_files.load_weights(self.pipeline, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not trainer_files.has_store(checkpoint):
            if self.pipeline.model is None:  # optimizer.pt of transformers' Trainer has the whole model's
                super()._load_optimizer_and_scheduler(checkpoint)
            elif os.path.exists(os.path.join(checkpoint, "optimizer.pt")):
                raise UnsupportedFeature(
                    f"{checkpoint} has the optimizer state of one process, and the model is wrapped already (make "
                    "a new trainer to resume from it)"
                )
            return
        scheduler = os.path.join(checkpoint, "scheduler.pt")
        self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
        self._resume_folder = checkpoint

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        trainer_files.load_weights(self.pipeline, self.state.best_model_checkpoint)

    def gather_model(self, rank: int = 0) -> nn.Module | None:
        """Return the whole trained model on the CPU of `rank`; None on other ranks. All ranks call this."""
        if self.pipeline.model is None:
            return self.model if own_rank() == rank else None
        found = self.pipeline.model.gather_model(rank)
        if found is not None:
            found.__class__ = type(self.model)
        return found


def _trl_base(kind: type) -> type:
    """Return the class of trl whose compute_loss is left out."""
    return next(one for one in kind.__mro__ if "compute_loss" in vars(one) and one.__module__.startswith("trl."))
