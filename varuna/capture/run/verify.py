"""Verifies a capture: compares loss and gradients of the carved programs with the model's own."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture.model.call_convention import find_loss
from varuna.capture.model.tied_weights import canonical_names, named_tensors
from varuna.capture.run.captured import Captured
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.run.program import SpanProgram
from varuna.capture.trace.trace import autocast, without_kv_cache
from varuna.errors import CaptureError
from varuna.types import Work

_WORK = Work(seed=0, step=0, first_sample=0)


def check_capture(model: nn.Module, captured: Captured, inputs: Mapping[str, object]) -> None:
    """Raise if the captured model, as one stage or cut everywhere, differs from the model itself."""
    tensors = named_tensors(model)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = {name: module.training for name, module in model.named_modules()}
    rng = torch.get_rng_state()
    try:
        if not model.training:
            model.train()
        expected = _eager(model, captured, inputs)
        n = captured.num_segments
        for cuts in ([0, n], list(range(n + 1))):
            _restore(model, buffers)
            _compare(expected, _carved(tensors, captured, inputs, cuts), captured, cuts)
    finally:
        _restore(model, buffers)
        for name, module in model.named_modules():
            module.training = modes[name]
        torch.set_rng_state(rng)


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


Results = tuple[Tensor, dict[str, Tensor]]
"""The loss, and the gradients by canonical name."""


def _eager(model: nn.Module, captured: Captured, inputs: Mapping[str, Any]) -> Results:
    name, dim = next(iter(captured.batch_dims.items()))
    draws = plain_randomness.of(_WORK, batch_size=inputs[name].shape[dim], shared=captured.shared_draws)
    with without_kv_cache(model), draws, autocast(captured.precision, captured.device):
        loss = find_loss(model(**inputs))
    named = model.named_parameters(remove_duplicate=False)
    trained = {name: p for name, p in named if p.requires_grad and loss.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True) if trained else ()
    canonical_name = canonical_names(captured.graph.ties)
    found: dict[str, Tensor] = {}
    for name, grad in zip(trained, grads, strict=True):
        canonical = canonical_name.get(name, name)
        if grad is None:
            continue
        # Two names of one Parameter give its gradient twice; two tied by declaration give two halves.
        same = canonical in found and trained[name] is trained[canonical]
        found[canonical] = grad if canonical not in found or same else found[canonical] + grad
    return loss.detach(), found


def _carved(
    tensors: Mapping[str, Tensor], captured: Captured, inputs: Mapping[str, object], cuts: Sequence[int]
) -> Results:
    stages: list[tuple[SpanProgram, list[Tensor], list[Tensor], tuple[Tensor, ...]]] = []
    sent: tuple[Tensor, ...] = ()
    for first, stop in pairwise(cuts):
        program = captured.carve(first, stop).to(next(iter(tensors.values())).device if tensors else "cpu")
        received = [
            value.detach().contiguous().requires_grad_(spec.needs_grad)
            for value, spec in zip(sent, program.received, strict=True)
        ]
        state = [tensors[name] for name in program.state]
        sent = program(state, received, inputs, _WORK)
        stages.append((program, state, received, sent))
    loss = sent[0].detach()
    grads: list[Tensor | None] = [torch.ones_like(loss)]
    found: dict[str, Tensor] = {}
    for program, state, received, sent in reversed(stages):
        outputs = [
            (value, grad)
            for value, grad in zip(sent, grads, strict=True)
            if grad is not None and value.requires_grad
        ]
        wanted = [t for t in (*state, *received) if t.requires_grad]
        if not wanted or not outputs:  # nothing in this segment is trained
            grads = [None] * len(received)
            continue
        computed = torch.autograd.grad(
            [value for value, _ in outputs], wanted, [grad for _, grad in outputs], allow_unused=True
        )
        by_tensor = {id(tensor): grad for tensor, grad in zip(wanted, computed, strict=True)}
        grads = [by_tensor.get(id(value)) for value in received]
        for name, tensor in zip(program.state, state, strict=True):
            grad = by_tensor.get(id(tensor))
            if grad is not None:
                found[name] = found[name] + grad if name in found else grad
    return loss, found


def _compare(expected: Results, found: Results, captured: Captured, cuts: Sequence[int]) -> None:
    (loss, grads), (found_loss, found_grads) = expected, found
    tolerance = 1e-5 if captured.precision == "fp32" else 2e-2
    # Gradients that cancel to nearly 0 are compared with the usual size of this model's gradients.
    usual = 0.01 * max(map(_largest, grads.values()), default=0.0)
    differences = {"the loss": (_difference(found_loss, loss), abs(float(loss)))}
    for name, grad in grads.items():
        other = found_grads.get(name)
        difference = _largest(grad) if other is None else _difference(other, grad)
        differences[name] = (difference, max(_largest(grad), usual))
    for name in found_grads.keys() - grads.keys():  # the model itself has no gradient for them
        differences[name] = (_largest(found_grads[name]), usual)
    worst = max(differences, key=lambda name: differences[name][0] / (differences[name][1] + 1e-12))
    difference, scale = differences[worst]
    if not difference <= tolerance * scale + 1e-9:
        raise CaptureError(
            f"the captured model, cut at {list(cuts[1:-1]) or 'no place'}, differs from the model itself: "
            f"{worst} by {difference:.3g} where its largest value is {scale:.3g} (allowed: {tolerance:g} of "
            "it). Check that forward depends only on its inputs and parameters, not on a Python counter or "
            "on numpy's random numbers."
        )


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def _difference(a: Tensor, b: Tensor) -> float:
    if not a.numel():
        return 0.0
    difference = (a.detach() - b.detach()).abs()
    difference[a.isnan() & b.isnan()] = 0  # both overflowed
    return float(difference.nan_to_num(nan=float("inf")).max())
