"""Traces one forward pass of a model with torch.export.

The trace uses fake tensors: no values, no memory, any model size. The batch size is a symbol, and so are the
sizes that vary from call to call; all other sizes are those of the example.
"""

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.capture.model.batch import Batch, hint_size
from varuna.capture.model.call_convention import CallConvention, OutputStructure
from varuna.capture.model.copies import fake_copy
from varuna.capture.model.lengths import LengthGroup, sizes_of
from varuna.capture.trace import patches
from varuna.capture.trace.attributes import AttributeLog
from varuna.capture.trace.batch_ranges import Range, trace_ranges
from varuna.capture.trace.batch_rows import require_all_joined
from varuna.capture.trace.custom_function import recorded_functions
from varuna.capture.trace.cutpoint import require_all_met
from varuna.capture.trace.data_branches import ModelCheck
from varuna.capture.trace.host_randomness import refused_host_randomness
from varuna.capture.trace.opaque_module import RecordedCall, leaves_marked
from varuna.capture.trace.operation_cache import OperationCache
from varuna.capture.trace.parameter_changes import ParameterChanges
from varuna.capture.trace.recorder import TraceRecorder, recording
from varuna.capture.trace.refusals import (
    BatchRangeError,
    KnownBranches,
    decide_number,
    explained_failures,
    model_line,
    refused_gradient_call,
)
from varuna.capture.trace.size_guards import SizeGuards, guards_of
from varuna.capture.trace.symbolic_sizes import symbolic_lengths, unify
from varuna.observe.progress_bar import CaptureProgress
from varuna.types import PrecisionName

log = logging.getLogger("varuna")

LOW_PRECISION: dict[PrecisionName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TraceRequest:
    inputs: Mapping[str, object]
    batch: Batch
    convention: CallConvention
    precision: PrecisionName
    device: torch.device
    lengths: tuple[LengthGroup, ...] = ()  # sizes that vary; others are those of the inputs


@dataclass(frozen=True)
class Trace:
    exported: ExportedProgram
    num_cuts: int
    leaf_calls: Sequence[RecordedCall]
    checks: Sequence[ModelCheck]
    structure: OutputStructure
    gradients: frozenset[str]  # inputs that get a gradient
    attributes: AttributeLog
    guards: SizeGuards


@torch.inference_mode(False)
@torch.enable_grad()
def trace(model: nn.Module, request: TraceRequest, watch: CaptureProgress | None = None) -> Trace:
    """Trace a model on `meta`. A batch of one sample is a fixed size: torch.export fixes sizes 0 and 1.

    Gradients are always enabled: without them a `no_grad` of the model would not show in the graph, and a
    graph that is captured for evaluation may be trained later.
    """
    # Bounded: CUDA chooses some kernels by size, and such a choice would count as a fixed batch size.
    sizes = 2, max(1 << 15, request.batch.size)

    def trace_range(sizes: Range) -> Trace:
        reuse = True
        try:
            traced = _trace(model, request, sizes, watch, reuse=reuse)
        except BatchRangeError:
            raise
        except Exception as error:  # errors of the model too: report the one that torch itself raises
            log.debug("tracing again without the operation cache: %r", error)
            reuse = False
            traced = _trace(model, request, sizes, watch, reuse=reuse)
        if traced.attributes.counted:
            _trace(model, request, sizes, None, reuse=reuse, counted=traced.attributes.counted)
        return traced

    traced: Trace = trace_ranges(sizes, trace_range)
    return traced


def _trace(
    model: nn.Module,
    request: TraceRequest,
    sizes: Range,
    watch: CaptureProgress | None,
    *,
    reuse: bool,
    counted: Set[tuple[str, str]] = frozenset(),
) -> Trace:
    """`counted`: numbers that forward changes; refuse them if its results depend on them."""
    inputs, convention, device = request.inputs, request.convention, request.device
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    faked = fake_copy(model, mode, device)
    lengths = [group.size for group in request.lengths]
    size = 1 if request.batch.size == 1 else hint_size(inputs, *sizes, others=lengths)
    with mode:
        example, shapes = _example(request, size, sizes)
    attributes = AttributeLog(faked)
    with ExitStack() as stack:
        stack.enter_context(attributes.watched_numbers(counted))
        containers = nn.ModuleList | nn.ModuleDict  # these do not run
        num_modules = sum(not isinstance(module, containers) for module in faked.modules())
        on_progress = stack.enter_context(watch(num_modules)) if watch is not None else None
        recorder = stack.enter_context(recording(faked, on_progress))
        recorder.varying_lengths = bool(request.lengths)
        stack.enter_context(explained_failures(recorder, size))
        stack.enter_context(leaves_marked(faked))
        stack.enter_context(without_kv_cache(faked))
        stack.enter_context(convention.adapted(faked, inputs))
        cache: AbstractContextManager[Any] = OperationCache(model_line) if reuse else nullcontext()
        stack.enter_context(_adapted_calls(faked, request, recorder, cache, attributes))
        stack.enter_context(autocast(request.precision, device))
        stack.enter_context(warnings.catch_warnings())
        # `Source` reports them by name. Recurrent modules list their weights again; this is not state.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\.")
        stack.enter_context(patches.fast_export(model_line))
        stack.enter_context(patches.no_grad_in_autocast())
        if request.lengths:
            stack.enter_context(symbolic_lengths(model_line))
        exported = export(faked, (), example, dynamic_shapes=shapes, strict=False)
    require_all_met(faked, recorder)
    require_all_joined(recorder.lists)
    return Trace(
        exported,
        recorder.num_cuts,
        tuple(recorder.leaf_calls),
        tuple(recorder.checks),
        convention.structure(),
        convention.gradients,
        attributes,
        guards_of(exported, request.lengths, sizes_of(inputs, request.batch)),
    )


def _example(
    request: TraceRequest, size: int, sizes: Range
) -> tuple[dict[str, Any], dict[str, dict[int, Any] | None]]:
    """Return the example inputs with a batch of `size`, and the symbolic dimensions of each."""
    inputs, batch = request.inputs, request.batch
    symbol = Dim("batch", min=sizes[0], max=sizes[1])
    example: dict[str, Any] = dict(inputs)
    shapes: dict[str, dict[int, Any] | None] = dict.fromkeys(inputs)
    varying = {place: group.size for group in request.lengths for place in group.places}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            shape = [varying.get((name, dim), own) for dim, own in enumerate(value.shape)]
            dims = {dim: Dim.AUTO for dim in range(value.dim()) if (name, dim) in varying}
            if name in batch.dims:
                shape[batch.dims[name]] = size
                if size > 1:
                    dims[batch.dims[name]] = symbol
            shapes[name] = dims or None
            example[name] = torch.empty(shape, dtype=value.dtype, device=request.device)
    return example, shapes


def _adapted_calls(
    model: nn.Module,
    request: TraceRequest,
    recorder: TraceRecorder,
    cache: AbstractContextManager[Any],
    attributes: AttributeLog,
) -> AbstractContextManager[Any]:
    """Handle the calls of a model that torch.export would silently drop, or reject without need."""
    original, cudnn = model.forward, torch.backends.cudnn.enabled

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        unify(kwargs, request.lengths, request.batch)
        with (
            refused_host_randomness(model),
            patches.unchecked_distributions(),
            recorded_functions(recorder),
            patches.gradient_calls(functools.partial(refused_gradient_call, recorder)),
            patches.symbolic_len(),
            patches.simplified_min(),
            patches.skipped_moves(),
            patches.stable_sets(model),
            patches.kept_attention_masks(),
            patches.recurrent_precision(cudnn),
            patches.number_conditions(functools.partial(decide_number, recorder)),
            KnownBranches(recorder, ParameterChanges(model)),
            cache,
            attributes.recorded(),
        ):
            return original(*args, **kwargs)

    return patch.object(model, "forward", forward)


def autocast(precision: PrecisionName, device: torch.device) -> Any:
    """Return the autocast context in which a program is captured and run."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, LOW_PRECISION[precision])


@contextmanager
def without_kv_cache(model: nn.Module) -> Iterator[None]:
    """Switch off the key-value cache that Hugging Face models fill by default."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    with ExitStack() as stack:
        for config in configs.values():
            stack.enter_context(patch.object(config, "use_cache", False))
        yield
