"""A model to be captured, perhaps several times: train and eval, and every shape of inputs that comes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor, nn

from varuna.capture.graph.flat_graph import flatten
from varuna.capture.model.batch import Batch, describe, find_batch
from varuna.capture.model.call_convention import CallConvention
from varuna.capture.model.copies import meta_copy
from varuna.capture.model.tied_weights import canonical_names, find_ties
from varuna.capture.run.captured import Captured
from varuna.capture.trace.cutpoint import cutpoints
from varuna.capture.trace.opaque_module import is_opaque, opaque
from varuna.capture.trace.refusals import DependsOnData
from varuna.capture.trace.trace import Trace, trace
from varuna.errors import CaptureError
from varuna.observe.progress_bar import Watch
from varuna.types import Partition, PrecisionName

log = logging.getLogger("varuna")


class Source:
    """Keeps the model's code and shapes, and none of its values."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        precision: PrecisionName = "fp32",
        device_type: str = "cpu",
        partition: Partition | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`partition` cuts a model without CutPoints; without it, such a model is one segment.

        `watch` shows how far a capture is.
        """
        self._watch = watch
        self.ties = find_ties(model, shared_weights)
        self.canonical = canonical_names(self.ties)
        self.meta_model = meta_copy(model)
        # Weakly: its maker may let go of the model, and its values with it, once the stages have theirs.
        self._model = weakref.ref(model)
        self.precision: PrecisionName = precision
        self.device = torch.device(device_type)
        self._batch_dims = dict(batch_dims or {})
        self._flags = {name: module.training for name, module in model.named_modules()}
        self._partition = None if any(cutpoints(model)) else partition
        self._first: Captured | None = None  # that was cut by the partition
        self._captured: dict[Hashable, Captured] = {}
        self._shared_draws: dict[Hashable, frozenset[int]] = {}

    def batch(self, inputs: Mapping[str, object]) -> Batch:
        """Which of the inputs are batched, and how many samples they hold."""
        return find_batch(inputs, self._batch_dims)

    def signature(self, inputs: Mapping[str, object], batch: Batch | None = None) -> Hashable:
        """All of the inputs that a capture depends on: another signature needs another capture."""
        return describe(inputs, batch or self.batch(inputs))

    def capture(
        self,
        inputs: Mapping[str, object],
        *,
        training: bool,
        batch: Batch | None = None,
        convention: CallConvention | None = None,
        precision: PrecisionName | None = None,
    ) -> Captured:
        """`batch` says what one sample cannot show: which leading 1 is a batch and which is shared."""
        convention = convention or CallConvention()
        convention.check(self.meta_model, inputs)
        batch = batch or self.batch(inputs)
        precision = precision or self.precision
        key = (describe(inputs, batch), training, convention.key, precision)
        if key not in self._captured:
            self._captured[key] = self._capture(inputs, batch, training, convention, precision)
        return self._captured[key]

    def _capture(
        self,
        inputs: Mapping[str, object],
        batch: Batch,
        training: bool,
        convention: CallConvention,
        precision: PrecisionName,
    ) -> Captured:
        shared: frozenset[int] = frozenset()
        if batch.size == 1 and training:
            # With one sample no shape tells which draws are its own: the capture with several knows.
            shared = self.capture(
                _doubled(inputs, batch),
                training=True,
                batch=Batch(2, batch.dims),
                convention=convention,
                precision=precision,
            ).shared_draws
        elif self._partition is not None and self._first is None and not training:
            # Which is the one that is cut.
            self.capture(inputs, training=True, batch=batch, convention=convention, precision=precision)
        self._set_mode(training)
        traced = self._trace(inputs, batch, convention, precision)
        flat = flatten(traced, self.canonical)
        partition = None if traced.num_cuts else self._partition
        captured = Captured(
            flat,
            batch,
            ties=self.ties,
            shared_draws=shared,
            momentum=_momentum(self.meta_model),
            precision=precision,
            device=self.device,
            structure=traced.structure,
            partition=partition,
            alike=None if partition is None else self._first,
        )
        if partition is not None:
            self._first = self._first or captured
        return captured

    def _trace(
        self, inputs: Mapping[str, object], batch: Batch, convention: CallConvention, precision: PrecisionName
    ) -> Trace:
        try:
            return trace(
                self.meta_model,
                inputs,
                batch,
                precision=precision,
                device=self.device,
                convention=convention,
                watch=self._watch,
            )
        except DependsOnData as error:
            if not self._keep_experts_whole(error.module):
                raise
        return self._trace(inputs, batch, convention, precision)

    def _keep_experts_whole(self, path: str) -> bool:
        """Experts that loop over those that were chosen: each token is looked at alone, so they may."""
        kind = type(self.meta_model.get_submodule(path))
        alike = [
            module for module in self.meta_model.modules() if type(module) is kind and not is_opaque(module)
        ]
        if not kind.__name__.endswith("Experts") or not alike:
            return False
        log.info("%s loops over data: each stays whole, and runs as it is", kind.__name__)
        for module in alike:
            opaque(module)
        return True

    def on_meta(self, name: str) -> bool:
        return self._tensor(name).device.type == "meta"

    def value(self, name: str) -> Tensor:
        """The value that the model has for a name; not a copy."""
        return self._tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(_look_up(self.meta_model, name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return _look_up(self.meta_model, name).dtype

    def _tensor(self, name: str) -> Tensor:
        model = self._model()
        if model is None:
            raise CaptureError(
                f"the values of {name!r} are asked for, but the model that was captured is gone "
                "(make the stages while it is there, or pass initialize= with its values)"
            )
        return _look_up(model, name)

    def _set_mode(self, training: bool) -> None:
        """Trains what trained when the model came; a model that came in eval mode trains whole."""
        for name, module in self.meta_model.named_modules():
            module.training = training and (self._flags[name] or not self._flags[""])


def _look_up(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found = getattr(model.get_submodule(path), leaf)
    assert isinstance(found, Tensor)
    return found


def _doubled(inputs: Mapping[str, object], batch: Batch) -> dict[str, object]:
    return {
        name: torch.cat([value, value], dim=batch.dims[name])
        if isinstance(value, Tensor) and name in batch.dims
        else value
        for name, value in inputs.items()
    }


def _momentum(model: nn.Module) -> dict[str, float | None]:
    return {
        f"{name}.{statistic}" if name else statistic: module.momentum
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for statistic in ("running_mean", "running_var")
        if getattr(module, statistic) is not None
    }
