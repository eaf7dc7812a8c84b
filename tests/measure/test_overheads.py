"""The engine's overhead, recovered from steps with a known cost on a virtual clock."""

import pytest

from tests.measure.virtual import VirtualClock, VirtualStopwatch
from varuna.measure.overheads import FEW, MANY, STEPS, WARMUPS, measure_overheads
from varuna.types import Overheads


class VirtualEngine:
    """A step costs a fixed time, and a time for each of the two instructions of a micro-batch."""

    def __init__(self, step_seconds: float, instruction_seconds: float) -> None:
        self.clock = VirtualClock()
        self.step_seconds = step_seconds
        self.instruction_seconds = instruction_seconds
        self.calls: list[str] = []

    def step(self, count: int) -> None:
        self.calls.append(f"step {count}")
        self.clock.advance(self.step_seconds + 2 * count * self.instruction_seconds)

    def compute(self) -> None:
        self.calls.append("compute")
        self.clock.advance(100.0)

    def measure(self, slow: float = 0.0, fast: float = 0.0, quantile: float = 0.5) -> Overheads:
        return measure_overheads(
            self.step,
            compute=self.compute,
            slow_call_seconds=slow,
            fast_call_seconds=fast,
            stopwatch=VirtualStopwatch(self.clock),
            quantile=quantile,
        )


def test_both_costs_of_a_linear_engine_are_recovered_exactly() -> None:
    found = VirtualEngine(step_seconds=0.003, instruction_seconds=0.00005).measure()
    assert found.step_seconds == pytest.approx(0.003)
    assert found.instruction_seconds == pytest.approx(0.00005)


def test_each_step_follows_a_computation_that_is_not_timed() -> None:
    engine = VirtualEngine(0.001, 0.0001)
    engine.measure()
    assert engine.calls == ["compute", f"step {FEW}", "compute", f"step {MANY}"] * (STEPS + WARMUPS)


def test_calls_are_slower_between_segments_and_the_difference_counts() -> None:
    found = VirtualEngine(0.003, 0.00005).measure(slow=0.00003, fast=0.00001)
    assert found.instruction_seconds == pytest.approx(0.00007)
    assert found.step_seconds == pytest.approx(0.003), "calls are part of instructions, not of the step"


def test_overheads_are_never_negative() -> None:
    assert VirtualEngine(0.0, 0.0).measure(slow=0.0, fast=1.0) == Overheads(0.0, 0.0)


def test_slow_first_steps_do_not_count() -> None:
    engine = VirtualEngine(0.003, 0.00005)
    usual = engine.step

    def slow_at_first(count: int) -> None:
        usual(count)
        if len(engine.calls) <= 4 * WARMUPS:
            engine.clock.advance(50.0)

    engine.step = slow_at_first  # type: ignore[method-assign]
    found = engine.measure(quantile=1.0)  # the slowest of all runs that count
    assert found.step_seconds == pytest.approx(0.003)
