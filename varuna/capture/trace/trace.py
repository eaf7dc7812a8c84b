"""One forward pass of a model, written down by torch.export.

On fake tensors: no values, no memory, any size of model. The batch is the one symbol; everything
else is as in the example.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.capture.model.batch import Batch, hint_size
from varuna.capture.model.call_convention import CallConvention, OutputStructure
from varuna.capture.model.copies import fake_copy
from varuna.capture.trace.cutpoint import require_all_met
from varuna.capture.trace.opaque_module import RecordedCall, leaves_marked
from varuna.capture.trace.operation_cache import OperationCache
from varuna.capture.trace.patches import quick
from varuna.capture.trace.recorder import recording
from varuna.capture.trace.refusals import model_line, refusals_explained, watched
from varuna.observe.progress_bar import Watch
from varuna.types import PrecisionName

log = logging.getLogger("varuna")

LARGEST_BATCH = 1 << 15

LOW_PRECISION: dict[PrecisionName, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trace:
    """What torch.export wrote down, and the model (on fake tensors) that it was written from."""

    exported: ExportedProgram
    model: nn.Module
    num_cuts: int
    leaf_calls: Sequence[RecordedCall]
    batch: Batch
    structure: OutputStructure
    gradients: frozenset[str]  # inputs that a gradient goes back to


@torch.inference_mode(False)
@torch.enable_grad()
def trace(
    model: nn.Module,
    inputs: Mapping[str, object],
    batch: Batch,
    *,
    precision: PrecisionName,
    device: torch.device,
    convention: CallConvention,
    watch: Watch | None = None,
) -> Trace:
    """Traces a hollow model; a batch of one is fixed, since torch.export fixes sizes of 0 and 1 anyway.

    With gradients, whatever the caller is about: where there are none, a `no_grad` of the model would not
    show, and what is captured for an evaluation may be trained by the next call.
    """
    attempt = functools.partial(
        _trace, model, inputs, batch, precision=precision, device=device, convention=convention, watch=watch
    )
    try:
        return attempt(repeats=True)
    except Exception as error:  # the model's own as well: what torch itself says of it is what counts
        log.debug("traced again, without repeats: %r", error)
        return attempt(repeats=False)


def _trace(
    model: nn.Module,
    inputs: Mapping[str, object],
    batch: Batch,
    *,
    precision: PrecisionName,
    device: torch.device,
    convention: CallConvention,
    watch: Watch | None,
    repeats: bool,
) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    faked = fake_copy(model, mode, device)
    size = 1 if batch.size == 1 else hint_size(inputs)
    example: dict[str, Any] = {}
    shapes: dict[str, dict[int, Any] | None] = {}
    # A bound, for some kernels of CUDA are chosen by size, and such a choice would count as a fixed batch.
    symbol = Dim("batch", min=2, max=max(LARGEST_BATCH, batch.size))
    for name, value in inputs.items():
        shapes[name] = None
        example[name] = value
        if isinstance(value, Tensor):
            shape = list(value.shape)
            if name in batch.dims:
                shape[batch.dims[name]] = size
                if size > 1:
                    shapes[name] = {batch.dims[name]: symbol}
            with mode:
                example[name] = torch.empty(shape, dtype=value.dtype, device=device)
    with ExitStack() as stack:
        tell = stack.enter_context(watch(num_running(faked))) if watch is not None else None
        recorder = stack.enter_context(recording(faked, tell))
        stack.enter_context(refusals_explained(recorder, size))
        stack.enter_context(leaves_marked(faked))
        stack.enter_context(_without_cache(faked))
        stack.enter_context(convention.adapted(faked, inputs))
        repeating: AbstractContextManager[Any] = OperationCache(model_line) if repeats else nullcontext()
        stack.enter_context(_running_in([watched(recorder), repeating], faked))
        stack.enter_context(autocast(precision, device))
        stack.enter_context(warnings.catch_warnings())
        # Recurrent modules list their weights anew: that is no state of theirs.
        warnings.filterwarnings("ignore", message=r"The tensor attributes? self\..*_flat_weights")
        stack.enter_context(quick(model_line))
        exported = export(faked, (), example, dynamic_shapes=shapes, strict=False)
    require_all_met(faked, recorder)
    return Trace(
        exported,
        faked,
        recorder.num_cuts,
        tuple(recorder.leaf_calls),
        batch,
        convention.structure(),
        convention.gradients,
    )


@contextmanager
def _running_in(contexts: Sequence[AbstractContextManager[Any]], model: nn.Module) -> Iterator[None]:
    """The innermost contexts in which torch.export runs the model, the last one innermost."""
    original = model.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            return original(*args, **kwargs)

    model.forward = forward
    try:
        yield
    finally:
        model.forward = original


def num_running(model: nn.Module) -> int:
    """How many of its modules may run: lists and dictionaries of others do not."""
    return sum(not isinstance(module, nn.ModuleList | nn.ModuleDict) for module in model.modules())


def autocast(precision: PrecisionName, device: torch.device) -> Any:
    """The precision that a program is captured and run under."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, LOW_PRECISION[precision])


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Hugging Face models keep keys and values for generation unless told otherwise."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {id(config): config for config in found if hasattr(config, "use_cache")}
    before = {key: config.use_cache for key, config in configs.items()}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for key, config in configs.items():
            config.use_cache = before[key]
