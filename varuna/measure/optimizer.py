"""Times an optimizer's step, on tensors of the model's own shapes, and counts what it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from varuna.measure.stopwatch import Effort, Stopwatch, typical
from varuna.types import OptimizerCost

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Finish = Callable[[Sequence[nn.Parameter]], None]
"""What is done to the gradients of a step before the optimizer: scaled, looked through for overflows."""


CACHE_BYTES = 32 << 20
"""Of other things pass through a processor's caches between two of its steps."""
NO_OPTIMIZER = "none"
"""Of a model in which nothing trains."""


class Form(NamedTuple):
    """A weight without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def measure_optimizer(
    make: MakeOptimizer,
    few: Sequence[Form],
    many: Sequence[Form],
    *,
    device: torch.device,
    finish: Finish,
    stopwatch: Stopwatch,
    effort: Effort,
) -> OptimizerCost:
    """A line through two points: some of the model's tensors, and as many as there is room for."""
    if not many:
        return OptimizerCost(NO_OPTIMIZER, 0.0, 0.0, 0.0)
    name, less, state_bytes, fewer = _step(make, few, device, finish, stopwatch, effort)
    _, more, state_bytes, total = _step(make, many, device, finish, stopwatch, effort)
    slope = (more - less) / (total - fewer) if total > fewer else 0.0
    fixed = less - slope * fewer
    if slope <= 0 or fixed < 0:
        slope, fixed = more / total, 0.0
    return OptimizerCost(name, fixed, slope, state_bytes / total)


def merge(costs: Sequence[OptimizerCost]) -> OptimizerCost:
    """One optimizer as several ranks have found it."""
    return OptimizerCost(
        costs[0].name,
        median(cost.fixed_seconds for cost in costs),
        median(cost.seconds_per_element for cost in costs),
        costs[0].state_bytes_per_element,
    )


def _step(
    make: MakeOptimizer,
    forms: Sequence[Form],
    device: torch.device,
    finish: Finish,
    stopwatch: Stopwatch,
    effort: Effort,
) -> tuple[str, float, int, int]:
    """(its name, seconds, bytes of its state, elements)."""
    weights = [nn.Parameter(torch.full(shape, 0.01, dtype=dtype, device=device)) for shape, dtype in forms]
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    optimizer = make(weights)
    other_things = torch.zeros(CACHE_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)

    def run() -> float:
        other_things.add_(1)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        begin = stopwatch.mark()
        finish(weights)
        optimizer.step()
        optimizer.zero_grad()
        end = stopwatch.mark()
        stopwatch.settle()
        return stopwatch.seconds(begin, end)

    warm = [run() for _ in range(effort.warmups)]
    seconds = typical([run() for _ in range(effort.runs(min(warm)))], effort.quantile)
    kept = (value for state in optimizer.state.values() for value in state.values())
    state_bytes = sum(value.nbytes for value in kept if isinstance(value, Tensor))
    return type(optimizer).__name__, seconds, state_bytes, sum(w.numel() for w in weights)
