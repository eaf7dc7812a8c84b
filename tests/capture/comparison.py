"""Shared by the capture tests: compares carved programs, run one after another, with the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source, plain_randomness, stage_state
from varuna.types import Work


def eager(
    model: nn.Module, inputs: Mapping[str, Any], batch: int, autocast: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the plain model, by name."""
    model = copy.deepcopy(model)
    with (
        plain_randomness(seed=7, step=2, batch_size=batch),
        torch.autocast("cpu", dtype=autocast, enabled=autocast is not None),
    ):
        output = model(**inputs)
    loss = output if isinstance(output, Tensor) else output["loss"] if hasattr(output, "keys") else output[0]
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = dict(model.named_buffers())
    return loss.detach(), {**grads, **{f"buffer {name}": value for name, value in buffers.items()}}


def chained(
    source: Source, captured: Captured, cuts: Sequence[int], inputs: Mapping[str, Any], first_sample: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the same from stages that exchange only the tensors of the specs, each with its own state."""
    found: dict[str, Tensor] = {}
    stages = []
    arrived: tuple[Tensor, ...] = ()
    for first, stop in pairwise(cuts):
        program = captured.carve(first, stop)
        state = stage_state(source, captured, first, stop, device="cpu")
        received = [
            value.detach().contiguous().requires_grad_(spec.needs_grad)
            for value, spec in zip(arrived, program.received, strict=True)
        ]
        for value, spec in zip(received, program.received, strict=True):
            assert str(value.dtype) == f"torch.{spec.dtype}", spec
        arrived = program(
            [state.tensor(n) for n in program.state], received, inputs, Work(7, 2, first_sample)
        )
        stages.append((program, state, received, arrived))
    loss = arrived[0]
    grads: list[Tensor | None] = [torch.ones_like(loss)]
    for _, state, received, sent in reversed(stages):
        # Frozen weights count as trainable when tracing, so a value with `needs_grad` may require none.
        pairs = [(value, grad) for value, grad in zip(sent, grads, strict=True) if value.requires_grad]
        if pairs:
            torch.autograd.backward(
                [v for v, _ in pairs], [torch.zeros_like(v) if g is None else g for v, g in pairs]
            )
        grads = [value.grad for value in received]
        for name in state.canonical:
            grad = state.tensor(name).grad
            if grad is not None:
                found[name] = found[name] + grad if name in found else grad
        for name, buffer in state.named_buffers():
            found[f"buffer {name}"] = buffer
    return loss.detach(), found


def assert_same(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    batch: int,
    layouts: Sequence[Sequence[int]] | None = None,
    source: Source | None = None,
    autocast: torch.dtype | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> Captured:
    """Assert that every layout gives the loss, gradients and buffers of the plain model."""
    source = source or Source(model)
    captured = source.capture(inputs, training=True)
    n = captured.num_segments
    loss, grads = eager(model, inputs, batch, autocast)
    for cuts in layouts or [[0, n], list(range(n + 1))]:
        ours, found = chained(source, captured, cuts, inputs)
        torch.testing.assert_close(ours, loss, rtol=rtol, atol=atol)
        for name, grad in grads.items():
            torch.testing.assert_close(
                found[name],
                grad,
                rtol=rtol,
                atol=atol,
                msg=lambda m, name=name, cuts=cuts: f"{name} at {cuts}: {m}",
            )
    return captured
