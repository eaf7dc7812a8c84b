"""`VarunaTrainer`: transformers' Trainer over stages and replicas, with the results of one process."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from varuna.environment import VarunaEnvironment
from varuna.errors import CheckpointError
from varuna.execute.comm.collective import RankFailure
from varuna.hf.trainer import files
from varuna.hf.trainer.captured_loss import NUM_BATCHES, ModelProxy
from varuna.hf.trainer.data import TrainerData, plain_preparation
from varuna.hf.trainer.epoch_reader import kept_random_state
from varuna.hf.trainer.one_process import PRECISIONS, alone, given, set_one_process
from varuna.hf.trainer.pipeline import (
    PipelineSettings,
    TrainerPipeline,
    join_batches,
    loss_inputs,
)
from varuna.hf.trainer.reader import SharedReader, plain_batch
from varuna.hf.trainer.refusals import (
    UnsupportedFeature,
    refuse_arguments,
    refuse_kind,
    refuse_model,
    refuse_stages,
    refuse_trainer,
)
from varuna.hf.trainer.save_signal import saving_on_signal
from varuna.hf.trainer.sft_loss import (
    has_plain_loss,
    has_sft_loss,
    load_on_cpu,
    sft_loss,
    sft_num_items,
)


class StageOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The optimizer of this stage; skips an update whose gradients overflowed in fp16."""

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: TrainerPipeline) -> None:
        super().__init__(optimizer, device_placement=False)
        self._pipeline = pipeline

    def step(self, closure: Any = None) -> None:
        if not self._pipeline.has_gradient and len(self._pipeline.collective.ranks) > 1:
            raise UnsupportedFeature(
                "training_step has computed no gradient with VarunaTrainer: ranks would differ (an own "
                "training_step must call super().training_step; compute_loss may be your own)"
            )
        self._is_overflow, self._pipeline.overflow = self._pipeline.overflow, False
        self._pipeline.has_gradient = False
        if not self._is_overflow:
            self.optimizer.step()


class VarunaTrainer(TrainerData):
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
        refuse_kind(type(self))
        self._layout = (stages, micro_batch, dict(varuna_options or {}))
        self._pipeline: TrainerPipeline | None = None
        self._update: list[dict[str, Any]] = []  # batches of the current update
        self._num_steps = 0  # of the current update
        given_model, args = (
            named.get(name, positional[index] if len(positional) > index else None)
            for index, name in enumerate(("model", "args"))
        )
        refuse_model(given_model)  # before transformers starts to distribute it
        if args is not None:
            refuse_arguments(args)
            set_one_process(args)
            if isinstance(given_model, str):
                load_on_cpu(args)
        super().__init__(*positional, **named)
        refuse_trainer(self)
        refuse_model(self.model)

    # ------------------------------------------------------------ one process for transformers

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        set_one_process(self.args)
        with alone(cpu=bool(self.args.use_cpu)):
            super().create_accelerator_and_postprocess()
        if self.accelerator.dispatch_batches:  # the first rank reads for all anyway
            self.accelerator.dataloader_config.dispatch_batches = None

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
            precision=PRECISIONS[given(args, "mixed_precision")],
            recompute=True if recompute else None,
            compile=bool(given(args, "torch_compile")),
            seed=args.seed,
            device=args.device,
            saves=str(getattr(args.save_strategy, "value", args.save_strategy)) != "no",
            options=options,
        )

    # ------------------------------------------------------------ training

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers' Trainer does. In a managed job that was restarted, continue by itself."""
        if trial is not None:
            self.hyperparameter_search()
        refuse_model(self.model)
        environment = VarunaEnvironment.read(os.environ)
        self._owner = files.next_owner(environment, self.args.output_dir)
        if resume_from_checkpoint is not None and not isinstance(resume_from_checkpoint, bool):
            resume_from_checkpoint = os.fspath(resume_from_checkpoint)
        if resume_from_checkpoint or self._owner is not None:
            resume_from_checkpoint = self._find_folder(resume_from_checkpoint, environment.resume_step)
        self._saved_folder = None
        with saving_on_signal(
            self._save_and_exit,
            is_wrapped=lambda: self._pipeline is not None and self._pipeline.model is not None,
            is_managed=self._owner is not None,
        ):
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _find_folder(self, given: str | bool | None, resume_step: int | None) -> str | None:
        """Return the checkpoint folder from which all ranks resume. The first rank chooses it."""
        output_dir, collective = self.args.output_dir, self.pipeline.collective

        def find() -> str | None:
            if collective.rank != collective.ranks[0]:
                return None
            return files.find_folder(output_dir, given, self._owner, resume_step)

        def failure(failures: Sequence[RankFailure], own: Exception | None) -> Exception:
            return CheckpointError(f"no checkpoint can be chosen in {output_dir}: {failures[0].message}")

        folder: str | None = collective.agree(find, failure, str | None)[0]
        if given and folder is None:
            raise ValueError(
                f"resume_from_checkpoint=True, but {output_dir} has no complete checkpoint (pass False to "
                "start at step 0)"
            )
        return folder

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
        batches = self._read_batches(epoch_iterator, num_batches)
        num_items = self._get_num_items_in_batch(batches, device)
        self._update, self._num_steps, self.pipeline.grad_norm = [], 0, None
        self.current_gradient_accumulation_steps = len(batches)
        if batches and self.pipeline.model is None:
            with kept_random_state():  # training_step prepares this batch again
                prepared = self._prepared(batches[0])
            self._wrap(prepared, num_items)
            self._use_optimizer()
        return batches, num_items

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """End the training. A resume with no update left wraps and loads the model with a batch now."""
        if self.pipeline.model is None:
            self._epoch = None
            loader: Any = self.callback_handler.train_dataloader
            self.get_batch_samples(iter(loader), 1, self.args.device)
        if self._resume_folder is not None:
            raise ValueError(
                f"{self._resume_folder} cannot be loaded: the training data has no batch, with which the "
                "model is wrapped (pass the data of the training)"
            )
        ended: Any = super()
        return ended._finalize_training(trial, num_train_samples, start_time)

    def _wrap(self, inputs: Mapping[str, Any], num_items: Any) -> None:
        refuse_model(self.model)  # model_init may have made it after the start
        self._set_signature_columns_if_needed()  # from the model's own forward
        is_known = has_plain_loss(self) or has_sft_loss(self)
        is_own = not is_known or self.compute_loss_func is not None
        self.pipeline.wrap(self.model, self._inputs(inputs, num_items), self._loss, is_own=is_own)
        refuse_stages(self.args, self.pipeline.num_stages)

    def _use_optimizer(self) -> None:
        self.pipeline.adopt(self.optimizer.optimizer)
        if self._resume_folder is not None:
            files.load_training_state(self.pipeline, self._resume_folder)
            self._resume_folder = None

    def _inputs(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """Return the inputs of the captured loss: a batch, and the numbers that its loss is divided by."""
        divisor = sft_num_items(self, inputs, num_items) if has_sft_loss(self) else num_items
        found = loss_inputs(inputs, divisor)
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            accepts = self.model_accepts_loss_kwargs and num_items is not None
            is_scaled = accepts or self.compute_loss_func is not None
        if not is_scaled and self.args.gradient_accumulation_steps > 1:
            found[NUM_BATCHES] = torch.tensor(float(self.current_gradient_accumulation_steps))
        return found

    def _loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Compute the loss as Trainer does. This is what is captured."""
        if has_sft_loss(self):
            return sft_loss(self, model, inputs, num_items)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        assert isinstance(loss, Tensor)
        return loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run a batch through all stages; the batches of an update together, if their losses add up."""
        if not model.training:
            model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if "_total_train_tokens" in self.__dict__:  # of SFTTrainer, whose compute_loss counts them
            mine: Any = self
            mine._total_train_tokens += int(inputs["attention_mask"].sum())
            mine._metrics["train"]["num_tokens"] = [mine._total_train_tokens]
        self._update.append(self._inputs(self._prepared(inputs), num_items_in_batch))
        self.pipeline.check_loss()
        pipeline, count = self.pipeline, self.current_gradient_accumulation_steps
        is_last = self._num_steps + len(self._update) == count
        joins = count > 1 and NUM_BATCHES not in self._update[0] and pipeline.adds_up
        loss = 0.0
        if is_last or not joins:
            batches = join_batches(self._update) if joins else self._update
            # A stream that ends within an update leaves a gradient, to which Trainer adds the next one's.
            starts = not self._num_steps and not pipeline.has_gradient
            ends = is_last and self.accelerator.sync_gradients
            whole = ends and len(batches) == 1 and starts
            update = self.state.global_step
            first = update * self.args.gradient_accumulation_steps + self._num_steps
            for number, batch in enumerate(batches):
                loss += pipeline.step(
                    batch,
                    update=update,
                    random_step=first + number,
                    ends_update=ends and number == len(batches) - 1,
                    max_norm=self._max_norm if whole else None,
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

        reader: Any = SharedReader(dataloader, collective, self.accelerator)
        return super().evaluation_loop(reader, *args, **options)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        labels = [inputs.get(name) for name in self.label_names]
        inputs = self._prepared(inputs)
        if self.pipeline.model is None:
            self._wrap_for_evaluation(inputs)
        has_labels = bool(labels) and all(label is not None for label in labels)
        if prediction_loss_only and has_plain_loss(self) and has_labels:
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            loss = self.pipeline.evaluate(loss_inputs(inputs, num_items))
            return torch.tensor(loss, device=self.args.device), None, None
        through: Any = ModelProxy(self.model, self._outputs)
        with plain_preparation(self):
            found: tuple[Tensor | None, Any, Any] = super().prediction_step(
                through, plain_batch(inputs), prediction_loss_only, ignore_keys
            )
        return found

    def _outputs(self, **inputs: Any) -> Any:
        plain = {name: value for name, value in inputs.items() if name != "fused_lm_head"}
        if "fused_lm_head" not in inputs:
            return self.pipeline.outputs(plain)
        from varuna.hf.trainer.fused_head import fused_outputs

        labels = plain.pop("labels")
        return fused_outputs(self.pipeline.outputs(plain).logits, labels)

    def _wrap_for_evaluation(self, inputs: Mapping[str, Any]) -> None:
        """Wrap a model that is evaluated before it was trained."""
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        if self.label_names and not all(inputs.get(name) is not None for name in self.label_names):
            raise UnsupportedFeature(
                f"predict was called before train or evaluate, with a batch without {self.label_names}: the "
                "model is cut along its loss (call evaluate() once before, or give the test set labels)"
            )
        self._wrap(inputs, self._get_num_items_in_batch([inputs], self.args.device))
        if isinstance(self.optimizer, StageOptimizer):  # in train(), as with eval_on_start
            self._use_optimizer()
        else:
            self.pipeline.adopt(self.optimizer)  # the script's, or None
