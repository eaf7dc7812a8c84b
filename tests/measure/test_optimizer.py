"""An optimizer's cost: a line through two measured steps, and the bytes of its state counted by hand."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.measure.virtual import THREE_RUNS, VirtualClock, VirtualStopwatch
from varuna.measure import optimizer as module
from varuna.measure.optimizer import (
    NO_OPTIMIZER,
    WeightShape,
    first_weights,
    measure_optimizer,
    merge_optimizer_costs,
)
from varuna.types import OptimizerCost

FEW = [WeightShape((10,), torch.float32)]
MANY = [WeightShape((10,), torch.float32), WeightShape((30, 3), torch.float32)]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES", 8)


class VirtualOptimizer(torch.optim.SGD):
    """A step takes `fixed` seconds, and `per_element` for each weight."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], clock: VirtualClock, fixed: float, per_element: float
    ) -> None:
        super().__init__(parameters, lr=0.1)
        self.clock, self.fixed, self.per_element = clock, fixed, per_element

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [p for group in self.param_groups for p in group["params"]]
        assert all(weight.grad is not None for weight in weights), "every step has gradients"
        self.clock.advance(self.fixed + self.per_element * sum(weight.numel() for weight in weights))


def measure(
    fixed: float = 0.0, per_element: float = 0.0, finish_seconds: float = 0.0, **options: Any
) -> OptimizerCost:
    clock = VirtualClock()
    given: dict[str, Any] = {"few": FEW, "many": MANY, **options}
    return measure_optimizer(
        options.get("make", lambda parameters: VirtualOptimizer(parameters, clock, fixed, per_element)),
        given["few"],
        given["many"],
        device=torch.device("cpu"),
        finish=lambda weights: clock.advance(finish_seconds * len(weights)),
        stopwatch=VirtualStopwatch(clock),
        effort=THREE_RUNS,
    )


def test_fixed_time_and_time_per_element_are_recovered() -> None:
    cost = measure(fixed=0.002, per_element=1e-5)
    assert cost.name == "VirtualOptimizer"
    assert cost.fixed_seconds == pytest.approx(0.002)
    assert cost.seconds_per_element == pytest.approx(1e-5)


def test_finishing_the_gradients_counts_as_part_of_the_step() -> None:
    # One tensor of 10 elements, then two of 100: 1 ms for each tensor makes 1 ms over 90 elements.
    cost = measure(finish_seconds=0.001)
    assert cost.seconds_per_element == pytest.approx(0.001 / 90)
    assert cost.fixed_seconds + 10 * cost.seconds_per_element == pytest.approx(0.001)


def test_a_line_that_falls_or_starts_below_zero_becomes_proportional() -> None:
    falling = measure(fixed=0.002)
    assert falling.fixed_seconds == 0.0 and falling.seconds_per_element == pytest.approx(0.002 / 100)
    clock_per_square = VirtualClock()

    class Quadratic(VirtualOptimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            elements = sum(p.numel() for group in self.param_groups for p in group["params"])
            clock_per_square.advance(1e-6 * elements**2)

    cost = measure_optimizer(
        lambda parameters: Quadratic(parameters, clock_per_square, 0.0, 0.0),
        FEW,
        MANY,
        device=torch.device("cpu"),
        finish=lambda _: None,
        stopwatch=VirtualStopwatch(clock_per_square),
        effort=THREE_RUNS,
    )
    assert cost.fixed_seconds == 0.0
    assert cost.seconds_per_element == pytest.approx(1e-6 * 100**2 / 100)


def test_equal_numbers_of_elements_give_a_proportional_cost() -> None:
    cost = measure(fixed=0.5, per_element=1e-3, few=MANY)
    assert cost.fixed_seconds == 0.0 and cost.seconds_per_element == pytest.approx(0.6 / 100)


@pytest.mark.parametrize(
    ("make", "bytes_per_element"),
    [
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0.0),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 4.0),
        # Two moments of four bytes, and a step counter of four bytes for each of the two tensors.
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1), 8.0 + 2 * 4 / 100),
    ],
)
def test_the_state_is_counted_by_its_bytes(make: Any, bytes_per_element: float) -> None:
    assert measure(make=make).state_bytes_per_element == pytest.approx(bytes_per_element)


def test_a_model_without_trained_weights_has_no_optimizer() -> None:
    assert measure(few=[], many=[]) == OptimizerCost(NO_OPTIMIZER, 0.0, 0.0, 0.0)


def test_ranks_are_merged_by_their_medians() -> None:
    costs = [OptimizerCost("Adam", fixed, each, 8.0) for fixed, each in [(1.0, 9.0), (5.0, 2.0), (3.0, 4.0)]]
    assert merge_optimizer_costs(costs) == OptimizerCost("Adam", 3.0, 4.0, 8.0)


def shapes(*sizes: int) -> list[WeightShape]:
    return [WeightShape((size,), torch.float32) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "elements", "chosen"),
    [
        ((5, 5, 5), 10, (5, 5)),
        ((50, 5), 10, (50,)),
        ((5, 50, 1), 10, (5,)),
        ((), 10, ()),
        ((5, 5), 99, (5, 5)),
    ],
)
def test_the_first_weights_within_the_limit_are_taken_but_at_least_one(
    sizes: Sequence[int], elements: int, chosen: Sequence[int]
) -> None:
    assert first_weights(shapes(*sizes), elements) == shapes(*chosen)
