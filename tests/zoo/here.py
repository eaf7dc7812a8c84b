"""Runs all stages of a model in one process, one after another, and compares them with the model.

Values that cross a cut are detached and become inputs of the next stage, as between processes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.zoo.trial import SEED, Case, batch_of, close, default_dtype, made, made_plain
from varuna import plain_randomness
from varuna.capture import Captured, Source, stage_state
from varuna.capture.model.batch import Batch
from varuna.capture.model.call_convention import StructuredCall
from varuna.plan.cut.blocks import partition
from varuna.types import Work

FINEST = 0


def run_here(case: Case, stages: Sequence[int] = (2, FINEST), sizes: Sequence[int] = (7,)) -> int:
    """Raise if any cut changes outputs, gradients or buffers; return the number of segments."""
    with default_dtype(case.dtype):
        model = made(case)
        source = Source(model, partition=partition)
        segments = 0
        for size in sizes:
            args, kwargs = batch_of(case, size, size)
            calling, leaves = StructuredCall.of(model, args, kwargs, grad_enabled=True)
            dims = case.options.get("batch_dims", {})
            batched = {
                name: dims.get(name, 0)
                for name, leaf in leaves.items()
                if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[dims.get(name, 0) or 0] == size
            }
            batch = Batch(size, {name: dim for name, dim in batched.items() if dim is not None})
            captured = source.capture(leaves, training=True, batch=batch, convention=calling)
            segments = captured.num_segments
            for count in stages:
                cuts = _cuts(segments, count)
                if cuts is not None:
                    _compare(case, source, captured, cuts, (args, kwargs), leaves, size)
        return segments


def _cuts(segments: int, stages: int) -> list[int] | None:
    if stages == FINEST:
        return list(range(segments + 1))
    if stages > segments:
        return None
    return [segments * i // stages for i in range(stages + 1)]


def _compare(
    case: Case,
    source: Source,
    captured: Captured,
    cuts: Sequence[int],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    leaves: dict[str, Any],
    size: int,
) -> None:
    place = f"cut at {list(cuts[1:-1]) if len(cuts) < 9 else 'every place'}, batch {size}"
    plain = made_plain(case)
    with plain_randomness(seed=SEED, step=2, batch_size=size):
        expected = plain(*call[0], **call[1])
    loss = case.loss(expected)
    if loss.requires_grad:
        loss.backward()
    results, stages = _forwards(source, captured, cuts, leaves)
    last = [value.detach().requires_grad_(value.requires_grad) for value in results]
    out = captured.structure.filled(last)
    ours, spec = pytree.tree_flatten(out)
    theirs, other = pytree.tree_flatten(expected)
    assert str(spec) == str(other), f"{place}: the outputs are nested as {spec}, expected {other}"
    for i, (mine, value) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(value, Tensor):
            close(mine.detach(), value.detach(), f"{place}: output {i}", atol=1e-6)
        else:
            assert mine == value, f"{place}: output {i} is {mine!r}, expected {value!r}"
    found: dict[str, Tensor] = {}
    own_loss = case.loss(out)
    if own_loss.requires_grad:
        own_loss.backward()
        grads: list[Tensor | None] = [value.grad for value in last]
        for program, state, received, sent in reversed(stages):
            pairs = [(v, g) for v, g in zip(sent, grads, strict=True) if g is not None and v.requires_grad]
            if pairs:
                torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
            grads = [value.grad for value in received]
            for name in program.state:
                tensor = state.tensor(name)
                if tensor.grad is not None:
                    found[name] = found[name] + tensor.grad if name in found else tensor.grad
                    tensor.grad = None
    named = dict(plain.named_parameters())
    largest = max(
        (float(p.grad.nan_to_num().abs().max()) for p in named.values() if p.grad is not None and p.numel()),
        default=0.0,
    )
    for name, parameter in named.items():
        if parameter.grad is None or not parameter.grad.any():
            assert name not in found or not found[name].any(), (
                f"{place}: {name} has a gradient, expected none"
            )
            continue
        assert name in found, f"{place}: {name} has no gradient"
        close(found[name], parameter.grad, f"{place}: the gradient of {name}", atol=1e-6 * largest + 1e-12)
    for program, state, _, _ in stages:
        for name in program.mutated:
            close(state.tensor(name), plain.get_buffer(name), f"{place}: the buffer {name}", atol=1e-6)


def _forwards(
    source: Source, captured: Captured, cuts: Sequence[int], leaves: dict[str, Any]
) -> tuple[Sequence[Tensor], list[Any]]:
    stages: list[Any] = []
    arrived: Sequence[Tensor] = ()
    for first, stop in pairwise(cuts):
        program = captured.carve(first, stop)
        _assert_held(captured, first, stop)
        state = stage_state(source, captured, first, stop, device="cpu")
        received = [
            value.detach().contiguous().clone().requires_grad_(spec.needs_grad)
            for value, spec in zip(arrived, program.received, strict=True)
        ]
        for value, spec in zip(received, program.received, strict=True):
            assert str(value.dtype) == f"torch.{spec.dtype}", f"{spec} arrived as {value.dtype}"
        arrived = program([state.tensor(n) for n in program.state], received, leaves, Work(SEED, 2, 0))
        stages.append((program, state, received, arrived))
    return arrived, stages


def _assert_held(captured: Captured, first: int, stop: int) -> None:
    """Assert that each stage holds the state it uses, and the first segment the unused state."""
    segments = captured.graph.segments
    parameters = {name for segment in segments for name in segment.parameters}
    used = set(captured.carve(0, captured.num_segments).state) & parameters
    held = {name for segment in segments[first:stop] for name in segment.parameters}
    assert held & used == set(captured.carve(first, stop).state) & parameters
