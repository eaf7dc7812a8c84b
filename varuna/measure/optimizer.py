"""Time of an optimizer step and size of its state, measured on tensors with the model's shapes."""

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from varuna.measure.stopwatch import Effort, Stopwatch, typical
from varuna.types import OptimizerCost

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
FinishGradients = Callable[[Sequence[nn.Parameter]], None]
"""Prepares the gradients for the optimizer: scales them and looks for overflows."""

CACHE_BYTES = 32 << 20
"""Bytes that are touched between two steps on a CPU, so that the caches hold other data."""
NO_OPTIMIZER = "none"
"""Optimizer name of a model without trained parameters."""


class WeightShape(NamedTuple):
    """Shape and dtype of a weight."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def measure_optimizer(
    make: MakeOptimizer,
    few: Sequence[WeightShape],
    many: Sequence[WeightShape],
    *,
    device: torch.device,
    finish: FinishGradients,
    stopwatch: Stopwatch,
    effort: Effort,
) -> OptimizerCost:
    """Measure steps on few and on many weights, and draw a line through the two points."""
    if not many:
        return OptimizerCost(NO_OPTIMIZER, 0.0, 0.0, 0.0)
    small = _measure_step(make, few, device, finish, stopwatch, effort)
    large = _measure_step(make, many, device, finish, stopwatch, effort)
    more = large.num_elements - small.num_elements
    slope = (large.seconds - small.seconds) / more if more > 0 else 0.0
    fixed = small.seconds - slope * small.num_elements
    if slope <= 0 or fixed < 0:
        slope, fixed = large.seconds / large.num_elements, 0.0
    return OptimizerCost(large.name, fixed, slope, large.state_bytes / large.num_elements)


def merge_optimizer_costs(costs: Sequence[OptimizerCost]) -> OptimizerCost:
    """Merge what several ranks measured of one optimizer: the medians."""
    return OptimizerCost(
        costs[0].name,
        median(cost.fixed_seconds for cost in costs),
        median(cost.seconds_per_element for cost in costs),
        costs[0].state_bytes_per_element,
    )


def first_weights(shapes: Sequence[WeightShape], elements: int) -> list[WeightShape]:
    """Return the first shapes that together have at most `elements`, but at least one shape."""
    chosen: list[WeightShape] = []
    for shape in shapes:
        if chosen and sum(other.numel for other in [*chosen, shape]) > elements:
            break
        chosen.append(shape)
    return chosen


class _OptimizerStep(NamedTuple):
    name: str
    seconds: float
    state_bytes: int
    num_elements: int


def _measure_step(
    make: MakeOptimizer,
    shapes: Sequence[WeightShape],
    device: torch.device,
    finish: FinishGradients,
    stopwatch: Stopwatch,
    effort: Effort,
) -> _OptimizerStep:
    weights = [nn.Parameter(torch.full(shape, 0.01, dtype=dtype, device=device)) for shape, dtype in shapes]
    gradients = [torch.full_like(weight, 1e-3) for weight in weights]
    optimizer = make(weights)
    other_data = torch.zeros(CACHE_BYTES if device.type == "cpu" else 0, dtype=torch.uint8)

    def run() -> float:
        other_data.add_(1)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        start = stopwatch.mark()
        finish(weights)
        optimizer.step()
        optimizer.zero_grad()
        stop = stopwatch.mark()
        stopwatch.synchronize()
        return stopwatch.seconds(start, stop)

    warm = [run() for _ in range(effort.warmups)]
    seconds = typical([run() for _ in range(effort.runs(min(warm)))], effort.quantile)
    values = (value for state in optimizer.state.values() for value in state.values())
    state_bytes = sum(value.nbytes for value in values if isinstance(value, Tensor))
    return _OptimizerStep(type(optimizer).__name__, seconds, state_bytes, sum(w.numel() for w in weights))
