"""Seeds of random operations: a mask depends on (seed, step, sample, ordinal) alone.

It does not depend on depth, width, rank or micro-batch size. The `ordinal` numbers the random operations of
a model in the order in which they run. Each sample draws from a generator seeded for it:

    seed_of(work, samples[i], ordinal)              a value of sample i
    seed_of(work, SHARED, ordinal)                  a value that all samples share
    seed_of(work, first_sample, ordinal)            a value that cannot be divided by sample

The names of `dropout`, `draw`, `draw_in_place` and their keywords enter a model's fingerprint: keep them.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna.types import Work

SHARED = -1

SampleDim = tuple[int, int]
"""The dimension of a tensor along which the samples lie, and the size of each sample there."""


class DrawDims(NamedTuple):
    """The dimensions of the samples in the tensors of one random operation; None: it has no samples."""

    arguments: tuple[int | None, ...]
    results: tuple[int | None, ...]

    @property
    def is_shared(self) -> bool:
        """True if all samples share the draw."""
        return all(dim is None for dim in (*self.arguments, *self.results))


def seed_of(work: Work, sample: int, ordinal: int) -> int:
    packed = struct.pack("<qqqq", work.seed, work.step, sample, work.first_ordinal + ordinal)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dropout(x: Tensor, p: float, work: Work, ordinal: int, dim: int | None, per_sample: int) -> Tensor:
    """Apply dropout with a separate mask for each sample; `dim` None: one mask for all samples."""
    if p >= 1.0:
        return x * 0.0
    mask = _mask(x, 1.0 - p, work, ordinal, dim, per_sample)
    # The backward keeps only the mask of bools: one byte for each element.
    return (x * mask).mul_(1.0 / (1.0 - p))


def _mask(x: Tensor, keep: float, work: Work, ordinal: int, dim: int | None, per_sample: int) -> Tensor:
    if dim is None:
        return _kept([seed_of(work, SHARED, ordinal)], x.numel(), keep, x.device).view(x.shape)
    samples = x.shape[dim] // per_sample
    inner = (*x.shape[:dim], per_sample, *x.shape[dim + 1 :])
    seeds = [seed_of(work, sample, ordinal) for sample in work.samples(samples)]
    kept = _kept(seeds, math.prod(inner), keep, x.device)
    return kept.view(samples, *inner).movedim(0, dim).reshape(x.shape)


_generator = cache(torch.Generator)


def _kept(seeds: Sequence[int], count: int, keep: float, device: torch.device) -> Tensor:
    """Return a row of bools for each seed, true with probability `keep` (to the nearest 1/65536).

    Sixteen bits decide one element, so each number drawn decides four: faster than bernoulli_.
    """
    generator = _generator(device)
    bits = torch.empty((len(seeds), -(-count // 4)), dtype=torch.int64, device=device)
    for seed, row in zip(seeds, bits.unbind(0), strict=True):
        generator.manual_seed(seed)
        row.random_(-(2**63), None, generator=generator)
    limit = max(round(keep * 65536) - 32769, -32768)
    return (bits.view(torch.int16)[:, :count] <= limit).contiguous()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def draw(
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    work: Work,
    ordinal: int,
    *,
    parts: Sequence[SampleDim | None],
    results: Sequence[SampleDim | None] | None,
    num_samples: int | None,
) -> Any:
    """Run any random operation once for each sample.

    `parts` holds the sample dimension of each leaf of (args, kwargs), `results` those of the outputs. If
    `num_samples` is None, all samples share one draw. If `results` is None, the operation cannot be divided
    by sample and runs once for the whole micro-batch.
    """
    leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
    placed = next((leaf for leaf in leaves if isinstance(leaf, torch.device | Tensor)), torch.device("cpu"))
    device = placed.device if isinstance(placed, Tensor) else placed
    kernel: AbstractContextManager[None] = nullcontext()
    if getattr(operation, "__name__", "").startswith("scaled_dot_product_attention"):
        if device.type == "cpu" and (num_samples in (None, 1) or results is not None):
            sample_dim = parts[0] if results is not None or num_samples is None else (0, leaves[0].shape[0])
            return _attention(args, kwargs, work, ordinal, None if num_samples is None else sample_dim)
        leaves = [_with_dense_rows(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        kernel = _one_attention_kernel(args, kwargs)
    with kernel:
        if num_samples is None or results is None:
            sample = SHARED if num_samples is None else work.first_sample
            with _seeded(seed_of(work, sample, ordinal), device):
                return operation(*args, **kwargs)
        outputs = []
        for i, sample in enumerate(work.samples(num_samples)):
            own = [_of_sample(leaf, dim, i) for leaf, dim in zip(leaves, parts, strict=True)]
            own_args, own_kwargs = pytree.tree_unflatten(own, structure)
            with _seeded(seed_of(work, sample, ordinal), device):
                outputs.append(operation(*own_args, **own_kwargs))
    joined = [
        torch.cat(values, dim=dim[0]) if dim is not None else values[0]
        for dim, *values in zip(results, *map(pytree.tree_leaves, outputs), strict=True)
    ]
    return pytree.tree_unflatten(joined, pytree.tree_structure(outputs[0]))


def _attention(
    args: Sequence[Any], kwargs: Mapping[str, Any], work: Work, ordinal: int, sample_dim: SampleDim | None
) -> Tensor:
    given = bound(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs)
    p = given.pop("dropout_p")
    dim, per_sample = sample_dim if sample_dim is not None else (None, 0)
    return attention(**given, drop=lambda weights: dropout(weights, p, work, ordinal, dim, per_sample))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Callable[[Tensor], Tensor],
) -> Tensor:
    """Compute attention as torch documents it, for CPUs, where no fused kernel can `drop` weights."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query * (scale or 1 / math.sqrt(query.shape[-1]))) @ key.transpose(-2, -1)
    if scores.dtype in (torch.bfloat16, torch.float16):
        scores = scores.float()
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # Rows that are masked completely give 0, where a plain softmax would give NaN.
    weights = torch._safe_softmax(scores, -1)
    return drop(weights).to(value.dtype) @ value


@contextmanager
def _one_attention_kernel(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Let torch choose the kernel of fused attention by shapes and dtypes alone: each draws another mask.

    Torch takes cuDNN's only if the attention mask needs no gradient, and so not again where the forward is
    recomputed. It also looks at the strides of the last dimensions, which `_with_dense_rows` makes equal:
    they change where a value crosses a cut.
    """
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if mask is None:
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _with_dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.clone(memory_format=torch.contiguous_format)


def draw_in_place(operation: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of an operation that overwrites its first argument, without overwriting it."""
    return draw(lambda x, *more, **kwargs: operation(x.clone(), *more, **kwargs), *args, **options)


def _of_sample(leaf: Any, sample_dim: SampleDim | None, i: int) -> Any:
    if sample_dim is None:
        return leaf
    dim, per_sample = sample_dim
    return leaf.narrow(dim, i * per_sample, per_sample) if isinstance(leaf, Tensor) else per_sample


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the device's default generator, and restore its state afterwards."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    else:
        generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)


def bound(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by the names in its schema, with defaults."""
    arguments = operation._schema.arguments
    defaults = {
        argument.name: argument.default_value for argument in arguments if argument.has_default_value()
    }
    names = [argument.name for argument in arguments]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a random operation draws with these arguments: not in eval mode, nor with p = 0."""
    values = bound(operation, args, kwargs)
    if values.get("train", True) is False or values.get("training", True) is False:
        return False
    if "dropout" in operation._schema.name and values.get("p") == 0:
        return False
    return not (values.get("dropout_p", 1) == 0 or values.get("dropout", 1) == 0)
