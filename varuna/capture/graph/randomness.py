"""Randomness belongs to the sample: a mask depends on (seed, step, sample, which random operation), and on
nothing else. Not on the depth, the width, the rank, nor the micro-batch size.

The operations of a model that draw are numbered in the order in which they run: the `ordinal`. Each
sample of a micro-batch draws on its own, from a generator that is seeded for it:

    seed_of(work, samples[i], ordinal)              what belongs to sample i
    seed_of(work, SHARED, ordinal)                  what all samples share
    seed_of(work, first_sample, ordinal)            what cannot be taken apart by sample
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from varuna.capture.graph.dropout_attention import attention
from varuna.types import Work

SHARED = -1
_generators: dict[torch.device, torch.Generator] = {}


Part = tuple[int, int]
"""How a tensor (or a size) belongs to the samples: a dimension, and how much of it is each sample's."""


def seed_of(work: Work, sample: int, ordinal: int) -> int:
    packed = struct.pack("<qqqq", work.seed, work.step, sample, work.first_ordinal + ordinal)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def dropout(x: Tensor, p: float, work: Work, ordinal: int, dim: int | None, per_sample: int) -> Tensor:
    """Dropout whose mask is drawn for each sample by itself; `dim` None: one mask that all share."""
    if p >= 1.0:
        return x * 0.0
    mask = _mask(x, 1.0 - p, work, ordinal, dim, per_sample)
    # A mask of bools is all that the backward pass keeps: one byte for each element.
    return (x * mask).mul_(1.0 / (1.0 - p))


def _mask(x: Tensor, keep: float, work: Work, ordinal: int, dim: int | None, per_sample: int) -> Tensor:
    if dim is None:
        return _kept([seed_of(work, SHARED, ordinal)], x.numel(), keep, x.device).view(x.shape)
    samples = x.shape[dim] // per_sample
    inner = (*x.shape[:dim], per_sample, *x.shape[dim + 1 :])
    seeds = [seed_of(work, sample, ordinal) for sample in work.samples(samples)]
    kept = _kept(seeds, math.prod(inner), keep, x.device)
    return kept.view(samples, *inner).movedim(0, dim).reshape(x.shape)


def _kept(seeds: Sequence[int], count: int, keep: float, device: torch.device) -> Tensor:
    """For each seed a row of bools, true with the probability `keep` (to the nearest 1/65536).

    Sixteen bits decide on one element, so each number drawn decides on four: faster than bernoulli_.
    """
    generator = _generator(device)
    words = torch.empty((len(seeds), -(-count // 4)), dtype=torch.int64, device=device)
    for seed, row in zip(seeds, words.unbind(0), strict=True):
        generator.manual_seed(seed)
        row.random_(-(2**63), None, generator=generator)
    limit = max(round(keep * 65536) - 32769, -32768)
    return (words.view(torch.int16)[:, :count] <= limit).contiguous()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def draw(
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    work: Work,
    ordinal: int,
    *,
    parts: Sequence[Part | None],
    results: Sequence[Part | None] | None,
    num_samples: int | None,
) -> Any:
    """Runs any operation that draws, once for each sample.

    `parts` says for each leaf of (args, kwargs) how it belongs to the samples, `results` the same
    for what comes out. Where `num_samples` is None all share one draw; where `results` is None the
    operation cannot be taken apart, and runs once for the whole micro-batch.
    """
    leaves, structure = pytree.tree_flatten((list(args), dict(kwargs)))
    device = _device_of(leaves)
    if device.type == "cpu" and getattr(operation, "__name__", "").startswith("scaled_dot_product_attention"):
        part = parts[0] if results is not None or num_samples is None else (0, leaves[0].shape[0])
        if num_samples in (None, 1) or results is not None:
            return _attention(args, kwargs, work, ordinal, None if num_samples is None else part)
    if num_samples is None or results is None:
        sample = SHARED if num_samples is None else work.first_sample
        with seeded(seed_of(work, sample, ordinal), device):
            return operation(*args, **kwargs)
    outputs: list[list[Any]] = []
    shape = None
    for i, sample in enumerate(work.samples(num_samples)):
        own = [_own(leaf, part, i) for leaf, part in zip(leaves, parts, strict=True)]
        own_args, own_kwargs = pytree.tree_unflatten(own, structure)
        with seeded(seed_of(work, sample, ordinal), device):
            result = operation(*own_args, **own_kwargs)
        flat, shape = pytree.tree_flatten(result)
        outputs.append(flat)
    joined = [
        torch.cat([flat[k] for flat in outputs], dim=part[0]) if part is not None else outputs[0][k]
        for k, part in enumerate(results)
    ]
    assert shape is not None
    return pytree.tree_unflatten(joined, shape)


def _attention(
    args: Sequence[Any], kwargs: Mapping[str, Any], work: Work, ordinal: int, part: Part | None
) -> Tensor:
    given = bound(torch.ops.aten.scaled_dot_product_attention.default, args, kwargs)
    p = given.pop("dropout_p")
    dim, per_sample = part if part is not None else (None, 0)
    return attention(**given, drop=lambda weights: dropout(weights, p, work, ordinal, dim, per_sample))


def draw_in_place(operation: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """What an operation that overwrites its first argument would leave there; the argument stays as it is."""
    return draw(lambda x, *more, **kwargs: operation(x.clone(), *more, **kwargs), *args, **how)


def _own(leaf: Any, part: Part | None, i: int) -> Any:
    if part is None:
        return leaf
    dim, per_sample = part
    return leaf.narrow(dim, i * per_sample, per_sample) if isinstance(leaf, Tensor) else per_sample


def _device_of(leaves: Sequence[Any]) -> torch.device:
    for leaf in leaves:
        if isinstance(leaf, torch.device):
            return leaf
        if isinstance(leaf, Tensor):
            return leaf.device
    return torch.device("cpu")


def _generator(device: torch.device) -> torch.Generator:
    if device not in _generators:
        _generators[device] = torch.Generator(device)
    return _generators[device]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The device's own generator at a seed, and afterwards as it was."""
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
    """The arguments of an operation by the names in its schema, defaults included."""
    found: dict[str, Any] = {}
    for i, argument in enumerate(operation._schema.arguments):
        if i < len(args):
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that may draw does so with these arguments: not in eval mode, nor with p = 0."""
    values = bound(operation, args, kwargs)
    if values.get("train", True) is False or values.get("training", True) is False:
        return False
    if "dropout" in operation._schema.name and values.get("p") == 0:
        return False
    return not (values.get("dropout_p", 1) == 0 or values.get("dropout", 1) == 0)
