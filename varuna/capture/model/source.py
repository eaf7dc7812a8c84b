"""A model to capture, possibly several times: for training and evaluation, and for each shape of inputs."""

import logging
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn

from varuna.capture.graph.attention_masks import Meaning
from varuna.capture.graph.flat_graph import FlatGraph, flatten
from varuna.capture.model.adapters import refuse_changing_adapters
from varuna.capture.model.attributes import ModelAttributes, full_name
from varuna.capture.model.batch import Batch, find_batch, input_signature
from varuna.capture.model.call_convention import CallConvention, LossChoice
from varuna.capture.model.copies import meta_copy
from varuna.capture.model.hooks import BackwardHooks
from varuna.capture.model.lengths import DynamicDims, sizes_of
from varuna.capture.model.quantized import make_quantized_traceable
from varuna.capture.model.tied_weights import canonical_names, find_ties
from varuna.capture.run.capture_cache import CaptureCache, TracedModel
from varuna.capture.run.captured import Captured
from varuna.capture.trace.attributes import AttributeLog
from varuna.capture.trace.cutpoint import cutpoints
from varuna.capture.trace.opaque_module import is_opaque, opaque
from varuna.capture.trace.refusals import DataDependentError
from varuna.capture.trace.trace import Trace, TraceRequest, trace
from varuna.errors import CaptureError, list_some
from varuna.observe.progress_bar import CaptureProgress
from varuna.types import Partition, PrecisionName

log = logging.getLogger("varuna")


class Source:
    """Keeps the model's code and shapes on `meta`, and only a weak reference to its values."""

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_dims: Mapping[str, int | None] | None = None,
        dynamic_dims: DynamicDims | None = None,
        shared_weights: Sequence[tuple[str, str]] | None = None,
        precision: PrecisionName = "fp32",
        device_type: str = "cpu",
        partition: Partition | None = None,
        loss: LossChoice = None,
        watch: CaptureProgress | None = None,  # shows the progress of a capture
    ) -> None:
        """`partition` cuts a model that has no CutPoints; without it, such a model is one segment."""
        self._watch = watch
        self.convention = CallConvention(loss)
        BackwardHooks(model).refuse()
        refuse_changing_adapters(model)
        make_quantized_traceable(model)
        self.ties = find_ties(model, shared_weights)
        self.canonical = canonical_names(self.ties)
        self.meta_model = meta_copy(model)
        # Weak: the caller may free the model and its values once the stages have their own.
        self._model = weakref.ref(model)
        self.precision: PrecisionName = precision
        self.device = torch.device(device_type)
        self._batch_dims = dict(batch_dims or {})
        self.attributes = ModelAttributes(model, self.meta_model)
        self._partition = None if any(cutpoints(model)) else partition
        self._partitioned: Captured | None = None  # the capture that the partition has cut
        self._dynamic_dims = dict(dynamic_dims or {})
        self._caches: dict[Hashable, CaptureCache] = {}  # by changed attributes
        self.num_traces = 0
        self._kept: set[tuple[str, str]] = set()  # attributes that forward sets to tensors

    def batch(self, inputs: Mapping[str, object]) -> Batch:
        return find_batch(inputs, self._batch_dims)

    def signature(self, inputs: Mapping[str, object], batch: Batch | None = None) -> Hashable:
        """Return everything about the inputs that a capture depends on."""
        return input_signature(inputs, batch or self.batch(inputs))

    def capture(
        self,
        inputs: Mapping[str, object],
        *,
        training: bool,
        batch: Batch | None = None,
        convention: CallConvention | None = None,
        precision: PrecisionName | None = None,
    ) -> Captured:
        """Capture the model for these inputs, or return the earlier capture for inputs of this form.

        With one sample, pass `batch`: a leading 1 does not show whether an input is batched or shared.
        """
        convention = convention or self.convention
        convention.check(self.meta_model, inputs)
        batch = batch or self.batch(inputs)
        request = TraceRequest(inputs, batch, convention, precision or self.precision, self.device)
        return self._cache.get(request, training)

    @property
    def _cache(self) -> CaptureCache:
        """The captures with the model's current attributes."""
        key, recent = self.attributes.key, self.attributes.recent
        if key not in self._caches:
            self._caches = {known: cache for known, cache in self._caches.items() if known in recent}
            self._caches[key] = CaptureCache(self._traced, self._weight_sizes, self._dynamic_dims)
        return self._caches[key]

    def _traced(self, request: TraceRequest, training: bool) -> TracedModel:
        doubled: Captured | None = None
        if request.batch.size == 1:
            # Shapes with one sample do not show what belongs to it; those with two samples do.
            doubled = self._capture_doubled(request, training)
        elif self._partition is not None and self._partitioned is None and not training:
            # The partition cuts a capture in training mode; others follow it.
            self._cache.get(request, training=True)
        self.attributes.apply(training=training)
        with _all_trainable(self.meta_model):
            traced = self._trace(request)
        self._watch_attributes(traced.attributes)
        partition = None if traced.num_cuts else self._partition
        self.num_traces += 1
        varying = sorted({f"{name}[{dim}]" for name, dim in traced.guards.symbols})
        log.info(
            "capture %d of the model (%s): sizes that may vary: %s",
            self.num_traces,
            "training" if training else "evaluation",
            list_some(varying) if varying else "the batch size alone",
        )
        momentum = _momentum(self.meta_model)
        structure, guards = traced.structure, traced.guards

        def build(flat: FlatGraph, masks: tuple[Meaning | None, ...] | None) -> Captured:
            captured = Captured(
                flat,
                request,
                ties=self.ties,
                shared_draws=doubled.shared_draws if doubled is not None and training else frozenset(),
                momentum=momentum,
                structure=structure,
                guards=guards,
                masks=masks,
                partition=partition,
                cut_like=None if partition is None else self._partitioned,
                doubled=doubled,
            )
            if partition is not None:
                self._partitioned = self._partitioned or captured
            return captured

        flattened = partial(flatten, traced, self.canonical, request.batch.dims)
        return TracedModel(guards, flattened, build, request)

    def _capture_doubled(self, request: TraceRequest, training: bool) -> Captured:
        """Return the capture with every sample twice, in which the same sizes vary."""
        doubled = _doubled(request)
        found = self._cache.get(replace(doubled, lengths=()), training)
        if found.guards.symbols.keys() != {place for group in request.lengths for place in group.places}:
            found = self._traced(doubled, training).at(sizes_of(doubled.inputs, doubled.batch))
        return found

    def _weight_sizes(self) -> set[int]:
        tensors = (*self.meta_model.parameters(), *self.meta_model.buffers())
        return {size for tensor in tensors for size in tensor.shape}

    def _trace(self, request: TraceRequest) -> Trace:
        """Trace the model; make experts that loop over data opaque, since they treat each token alone."""
        try:
            return trace(self.meta_model, request, self._watch)
        except DataDependentError as error:
            kind = type(self.meta_model.get_submodule(error.module))
            experts = [m for m in self.meta_model.modules() if type(m) is kind and not is_opaque(m)]
            if not kind.__name__.endswith("Experts") or not experts:
                raise
        log.info("%s loops over data and cannot be traced: it stays eager", kind.__name__)
        for module in experts:
            opaque(module)
        return self._trace(request)

    def _watch_attributes(self, found: AttributeLog) -> None:
        """Compare the attributes that forward reads at each step, without those that it changes itself."""
        changed = found.changed
        self.attributes.watch(
            {path: {n for n in names if (path, n) not in changed} for path, names in found.reads.items()}
        )
        new = found.kept - self._kept
        if new:
            self._kept |= new
            names = sorted(full_name(path, name) for path, name in new)
            log.warning(
                "forward sets %s to tensors, which a captured model does not do: do not read them after a "
                "step (return them as outputs)",
                list_some(names),
            )

    @property
    def is_freed(self) -> bool:
        """True if the script has dropped the model."""
        return self._model() is None

    def on_meta(self, name: str) -> bool:
        return self.value(name).device.type == "meta"

    def value(self, name: str) -> Tensor:
        """Return the model's tensor of this name, not a copy."""
        model = self._model()
        if model is None:
            raise CaptureError(
                f"the values of {name!r} are needed, but the captured model has been freed. Build the stages "
                "while it exists, or pass its values with initialize=."
            )
        return _look_up(model, name)

    def place(self, name: str) -> tuple[nn.Module, str]:
        """Return the module of the model that holds a tensor, and the tensor's name there."""
        path, _, leaf = name.rpartition(".")
        return (self._model() or self.meta_model).get_submodule(path), leaf

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(_look_up(self.meta_model, name).shape)

    def dtype(self, name: str) -> torch.dtype:
        return _look_up(self.meta_model, name).dtype

    @property
    def training_flags(self) -> Mapping[str, bool]:
        """Return each module's `training` when the model was wrapped."""
        return self.attributes.modes_by_path

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor with this canonical name."""
        return next((group for group in self.ties if group[0] == name), (name,))


@contextmanager
def _all_trainable(model: nn.Module) -> Iterator[None]:
    """Unfreeze all parameters within the block: a script may unfreeze any of them between two steps."""
    frozen = [
        p for p in model.parameters() if not p.requires_grad and (p.is_floating_point() or p.is_complex())
    ]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _look_up(model: nn.Module, name: str) -> Tensor:
    found = attrgetter(name)(model)
    assert isinstance(found, Tensor)
    return found


def _doubled(request: TraceRequest) -> TraceRequest:
    """Return the request with every sample twice."""
    dims = request.batch.dims
    inputs = dict(request.inputs)
    for name, dim in dims.items():
        value = inputs[name]
        assert isinstance(value, Tensor)
        inputs[name] = torch.cat([value, value], dim=dim)
    return replace(request, inputs=inputs, batch=Batch(2, dims))


def _momentum(model: nn.Module) -> dict[str, float | None]:
    return {
        f"{name}.{statistic}" if name else statistic: module.momentum
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for statistic in ("running_mean", "running_var")
        if getattr(module, statistic) is not None
    }
