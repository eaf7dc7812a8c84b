"""The model of a Trainer as a pipeline: wraps it, runs its updates, and returns its losses and outputs."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn

from varuna.capture.model.tied_weights import named_tensors
from varuna.environment import VarunaEnvironment
from varuna.execute.comm.collective import Collective
from varuna.hf.trainer.captured_loss import ALL_OUTPUTS, NUM_ITEMS, ComputeLoss, loss_in_forward
from varuna.hf.trainer.loss_watch import LossWatch
from varuna.hf.trainer.refusals import refuse_use
from varuna.train.loader import own_share
from varuna.train.outputs import whole_outputs
from varuna.train.varuna import Varuna
from varuna.train.wrap import choose_map, default_microbatch_size, hand_over, join_ranks
from varuna.types import PrecisionName, parse_stage_map

log = logging.getLogger("varuna")

SAMPLE_SIZE = 2
"""Samples of the first batch with which the model is captured."""


def find_batch_norm(model: nn.Module) -> str | None:
    """Return the name of a layer that normalizes over the samples of its input; None if there is none."""
    kinds = nn.modules.batchnorm._BatchNorm
    return next(
        (name for name, one in model.named_modules() if isinstance(one, kinds) and one.training), None
    )


@dataclass(frozen=True)
class PipelineSettings:
    """Options for wrapping the model, from the arguments of the trainer."""

    stages: int | None
    microbatch_size: int | None
    batch_size: int  # samples of an update
    device_batch_size: int  # samples of one batch of the Trainer
    precision: PrecisionName
    recompute: bool | None
    compile: bool
    seed: int
    device: torch.device
    saves: bool  # the trainer writes checkpoints, from which train() resumes
    options: Mapping[str, Any]  # of `Varuna`


@dataclass
class TrainerPipeline:
    """A wrapped model, from the first batch on. Every rank has the same batches."""

    settings: PipelineSettings
    model: Varuna | None = None
    source: nn.Module | None = None  # the script's model
    watch: LossWatch | None = None  # of the script's own loss
    grad_norm: float | None = None  # of the last update, if its step has clipped
    overflow: bool = False  # the last update must be skipped
    has_gradient: bool = False  # of batches since the last update
    _joined: Collective | None = field(default=None, repr=False)

    @property
    def collective(self) -> Any:
        """The ranks of the job: the session of the wrapped model, or a group of its own before."""
        if self.model is not None:
            return self.model._session
        if self._joined is None:
            self._joined = join_ranks()
        return self._joined

    @property
    def adds_up(self) -> bool:
        """Return whether the losses of two batches add up to the loss of both: they can be one step."""
        loss = self.wrapped._programs.sampled.captured.loss
        return bool(loss.sums[0]) and not loss.edits

    @property
    def num_stages(self) -> int:
        return len(self.wrapped.plan.stages)

    @property
    def wrapped(self) -> Varuna:
        assert self.model is not None, "the model is wrapped with the first batch"
        return self.model

    def wrap(
        self, model: nn.Module, inputs: Mapping[str, Any], compute_loss: ComputeLoss, *, is_own: bool
    ) -> None:
        """Wrap the script's model. All ranks call this with the same inputs. `is_own`: the script's loss."""
        settings, environment = self.settings, VarunaEnvironment.read(os.environ)
        check_launcher(settings, environment)
        stage_map = environment.stage_to_rank_map or choose_map(model, settings.stages, settings.device)
        size = environment.chunk_size or settings.microbatch_size
        model.train()
        norm = find_batch_norm(model)
        if size is None and norm is not None:
            size = settings.device_batch_size  # as in one process
        if size is None:
            tokens = tokens_of(inputs) if settings.device.type == "cpu" else None
            size = default_microbatch_size(stage_map, settings.batch_size, tokens)
            size = min(size, settings.device_batch_size)
        if norm is not None:
            self._warn_of_small_batches(norm, stage_map, size)
        options = {"recompute": settings.recompute, **settings.options}
        self.watch = LossWatch(compute_loss) if is_own else None
        with loss_in_forward(model, compute_loss, self.watch):
            self.model = Varuna(
                model,
                stage_map,
                sample_of(inputs),
                settings.batch_size,
                size,
                device=settings.device,
                precision=settings.precision,
                compile=settings.compile,
                seed=settings.seed,
                **options,
            )
        if settings.saves:
            self.model._saver.expect_no_store()
        self.model._requests.autosave.turn_off()  # a store belongs to one checkpoint folder, at one step
        self.source = model
        if self.num_stages > 1:
            hooked: Any = model  # torch gives one of the two no types
            hooked.register_forward_pre_hook(refuse_use)
            hooked.register_state_dict_pre_hook(refuse_use)

    def _warn_of_small_batches(self, norm: str, stage_map: str, size: int) -> None:
        """Warn on the first rank if BatchNorm sees fewer samples at once than in one process."""
        samples = self.settings.device_batch_size
        replicas = max(len(row) for row in parse_stage_map(stage_map))
        if (replicas > 1 or size < samples) and self.collective.rank == self.collective.ranks[0]:
            log.warning(
                "BatchNorm %s normalizes over micro-batches: at most %d samples of %d of a batch, so losses "
                "differ from those of one process (use as many stages as processes, and micro_batch=%d; "
                "or fix the statistics: a train() of the model that calls eval() of these layers)",
                norm,
                min(size, -(-samples // replicas)),
                samples,
                samples,
            )

    def adopt(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Give the optimizer and the script's model this stage's parameters; free those of other stages."""
        wrapped, model = self.wrapped, self.source
        assert model is not None
        if optimizer is not None and wrapped.optimizer is not optimizer:
            names: dict[Tensor, str] = {value: name for name, value in model.named_parameters()}
            hand_over(optimizer, names, wrapped)
            wrapped.set_optimizer(optimizer, init_loss_scale=2.0**16, min_loss_scale=None)
        source, state = wrapped._programs.sampled.source, wrapped._state
        segments = wrapped._programs.sampled.captured.graph.segments
        used = {name for segment in segments for name in segment.parameters}
        for name, shell in named_tensors(source.meta_model).items():
            canonical = source.canonical.get(name, name)
            if not isinstance(shell, nn.Parameter) or canonical not in used:
                continue
            owner, leaf = source.place(name)
            held = state.tensor(canonical) if canonical in state.canonical else shell
            assert isinstance(held, nn.Parameter)
            owner._parameters[leaf] = held
        if self.watch is not None:
            self.watch.start(model)  # with the weights where they will be

    def step(
        self,
        inputs: Mapping[str, Any],
        *,
        update: int,
        random_step: int,
        ends_update: bool,
        max_norm: float | None,
    ) -> float:
        """Run forward and backward of one batch of an update; `.grad` gets its gradient."""
        wrapped = self.wrapped
        wrapped.iteration, wrapped._trainer.random_step = update, random_step
        wrapped._update.ends = ends_update
        loss, overflow = wrapped.step(own_share(wrapped, inputs), max_norm)
        self.overflow |= overflow
        self.has_gradient = True
        self.grad_norm = wrapped.grad_norm if max_norm is not None else None
        return loss

    def clip(self, max_norm: float) -> float:
        """Clip the accumulated gradient of the whole model, and return its norm."""
        if self.grad_norm is not None:  # the only step of this update has done it
            return self.grad_norm
        wrapped = self.wrapped
        with wrapped._session.call("clip_grad_norm"), wrapped._report_errors("clip_grad_norm"):
            return wrapped._trainer.reducer.clip(max_norm)

    def check_loss(self) -> None:
        """Refuse a loss that has changed since it was captured."""
        if self.watch is not None:
            assert self.source is not None
            self.watch.check(self.source)

    def evaluate(self, inputs: Mapping[str, Any]) -> float:
        self.check_loss()
        return self.wrapped.evaluate(own_share(self.wrapped, inputs))

    def outputs(self, inputs: Mapping[str, Any]) -> Any:
        """Return the model's own outputs for all samples, on every rank, on the device of the labels.

        They are in float32, as those of a model that accelerate runs in autocast.
        """
        outputs = whole_outputs(self.wrapped, {**inputs, ALL_OUTPUTS: True}, self.settings.device)
        return outputs if self.settings.precision == "fp32" else convert_to_fp32(outputs)

    def patient(self) -> AbstractContextManager[None]:
        return nullcontext() if self.model is None else self.model._session.patient(15.0)

    def close(self) -> None:
        if self.model is not None:
            self.model.close()
            self.model = self.source = None


def sample_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first samples of a batch, with which the model is captured."""
    sizes = [value.shape[0] for value in inputs.values() if isinstance(value, Tensor) and value.dim()]
    largest = max(sizes, default=0)
    return {
        name: value[:SAMPLE_SIZE]
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == largest > 1
        else value
        for name, value in inputs.items()
    }


def tokens_of(inputs: Mapping[str, Any]) -> int | None:
    """Return the tokens of a sample, the length of `input_ids`; None for other inputs."""
    found = inputs.get("input_ids")
    return max(1, found.shape[1]) if isinstance(found, Tensor) and found.dim() == 2 else None


def join_batches(batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Concatenate batches of equal shapes and single values. Others stay batches of their own."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for number, batch in enumerate(batches):
        sizes = {v.shape[0] for v in batch.values() if isinstance(v, Tensor) and v.dim()}
        key: Any = number
        if len(sizes) == 1:
            key = tuple(
                (name, value.dtype, value.device, value.shape[1:] if value.dim() else value.item())
                if isinstance(value, Tensor)
                else (name, repr(value))
                for name, value in sorted(batch.items())
            )
        groups.setdefault(key, []).append(batch)
    return [_joined(group) for group in groups.values()]


def _joined(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = batches[0]
    if len(batches) == 1:
        return dict(first)
    return {
        name: torch.cat([batch[name] for batch in batches])
        if isinstance(value, Tensor) and value.dim()
        else value
        for name, value in first.items()
    }


def check_launcher(settings: PipelineSettings, environment: VarunaEnvironment) -> None:
    """Refuse a launcher whose batch or number of stages differs from the script's."""
    given = environment.batch_size
    if given is not None and given != settings.batch_size:
        raise ValueError(
            f"the launcher's batch size is {given}, but the TrainingArguments give {settings.batch_size}: "
            "per_device_train_batch_size × gradient_accumulation_steps is the batch of the whole job, in "
            f"every layout (start with --batch-size {settings.batch_size}, or change the arguments)"
        )
    stage_map = environment.stage_to_rank_map
    if stage_map and settings.stages is not None and settings.stages != len(parse_stage_map(stage_map)):
        raise ValueError(
            f"stages={settings.stages}, but the launcher has chosen the map {stage_map!r} (set --nstages "
            "there)"
        )


def loss_inputs(inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
    """Return a batch with the number of items that its loss is divided by, as an input."""
    found = dict(inputs.items())
    if num_items is not None:
        found[NUM_ITEMS] = torch.as_tensor(num_items).cpu()
    return found
