"""One forward pass of a model, written down by torch.export.

On fake tensors: no values, no memory, any size of model. The batch is the one symbol; everything
else is as in the example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram, export
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.capture.batch import Batch, hint_size
from varuna.capture.cutpoint import require_all_met
from varuna.capture.explain import explained, watched
from varuna.capture.hollow import fake
from varuna.capture.opaque import LeafCall, leaves_marked
from varuna.capture.recorder import recording
from varuna.errors import CaptureError
from varuna.types import PrecisionName

LARGEST_BATCH = 1 << 15

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Trace:
    """What torch.export wrote down, and the model (on fake tensors) that it was written from."""

    exported: ExportedProgram
    model: nn.Module
    num_cuts: int
    leaf_calls: Sequence[LeafCall]
    batch: Batch


def trace(
    model: nn.Module,
    inputs: Mapping[str, object],
    batch: Batch,
    *,
    precision: PrecisionName,
    device: torch.device,
) -> Trace:
    """Traces a hollow model; a batch of one is fixed, since torch.export fixes sizes of 0 and 1 anyway."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    faked = fake(model, mode, device)
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
        recorder = stack.enter_context(recording(faked))
        stack.enter_context(explained(recorder, size))
        stack.enter_context(watched(recorder))
        stack.enter_context(leaves_marked(faked))
        stack.enter_context(_without_cache(faked))
        stack.enter_context(_giving_its_loss(faked))
        stack.enter_context(autocast(precision, device))
        exported = export(faked, (), example, dynamic_shapes=shapes, strict=False)
    require_all_met(faked, recorder)
    return Trace(exported, faked, recorder.num_cuts, tuple(recorder.leaf_calls), batch)


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


@contextmanager
def _giving_its_loss(model: nn.Module) -> Iterator[None]:
    """The loss alone leaves the graph: what only other outputs need is not computed."""
    hook = model.register_forward_hook(lambda _module, _args, output: find_loss(output))
    try:
        yield
    finally:
        hook.remove()


def find_loss(output: Any) -> Tensor:
    loss = output
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif isinstance(output, tuple | list) and not hasattr(output, "loss"):
        loss = output[0] if output else None
    elif not isinstance(output, Tensor):
        loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    raise CaptureError(
        f"the model's forward returned {_in_words(output)}; expected its loss, a floating-point "
        "tensor with no "
        "dimension that is the mean over the batch: as the output itself, as its first element, or as "
        '`.loss` / `["loss"]` (compute the loss inside forward; Hugging Face models do so when '
        "given `labels`)"
    )


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of " + (", ".join(map(str, value)) or "nothing")
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of " + (", ".join(_in_words(item) for item in value) or "nothing")
    return f"a {type(value).__name__}"
