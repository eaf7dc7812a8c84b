"""Costs of a chain of segments on a virtual clock: what is timed, in which order, and what is taken off."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.measure.virtual import (
    THREE_RUNS,
    VirtualAsyncStopwatch,
    VirtualClock,
    VirtualSegment,
    VirtualStopwatch,
)
from varuna.measure.memory import CountingMeter
from varuna.measure.segments import (
    HEAD_START,
    PARTS,
    ChainCosts,
    LinkedSegment,
    SegmentSamples,
    measure_calls,
    measure_chain,
    merge_size_costs,
    run_once,
)
from varuna.measure.stopwatch import LEAST_SECONDS, Effort, Stopwatch
from varuna.types import Duration, SizeCost

CALL = 0.001  # of every segment, also an empty one
FIRST = {
    "forward": 0.010,
    "forward_only": 0.008,
    "backward": 0.020,
    "backward_inputs": 0.012,
    "backward_weights": 0.009,
}
SECOND = {part: 3 * seconds for part, seconds in FIRST.items()}


class VirtualChain:
    """Two segments and empty ones, on one clock."""

    def __init__(self, enter_seconds: float | None = None) -> None:
        self.clock = VirtualClock()
        self.log: list[str] = []
        enter = None if enter_seconds is None else lambda: self.clock.advance(enter_seconds)
        self.segments = [
            VirtualSegment(self._timed(FIRST), "a", self.log),
            VirtualSegment(self._timed(SECOND, more=enter_seconds or 0.0), "b", self.log, enter),
        ]
        self.links = [
            LinkedSegment(self.segments[0], given=[torch.ones(2)]),
            LinkedSegment(self.segments[1], 0),
        ]
        self.stopwatch = VirtualStopwatch(self.clock)

    def _timed(self, seconds: Mapping[str, float], more: float = 0.0) -> Any:
        def run(part: str) -> None:
            entry = more if part.startswith("forward") else 0.0
            self.clock.advance(CALL + seconds[part] + entry)

        return run

    def empty(self) -> LinkedSegment:
        return LinkedSegment(
            VirtualSegment(self._timed(dict.fromkeys(PARTS, 0.0)), "-"), given=[torch.ones(2)]
        )

    def measure(self, held: int = 1, effort: Effort = THREE_RUNS, **options: Any) -> ChainCosts:
        return measure_chain(
            self.links,
            make_empty=self.empty,
            held=held,
            microbatch_size=4,
            stopwatch=self.stopwatch,
            make_meter=lambda: CountingMeter(torch.device("cpu")),
            effort=effort,
            **options,
        )


def seconds_of(cost: SizeCost) -> dict[str, float]:
    return {part: getattr(cost, part).seconds for part in PARTS}


def test_every_part_of_every_segment_comes_back_without_the_call() -> None:
    found = VirtualChain().measure()
    first, second = found.costs
    assert seconds_of(first) == pytest.approx(FIRST)
    assert seconds_of(second) == pytest.approx(SECOND)
    assert first.microbatch_size == second.microbatch_size == 4
    assert found.call_seconds == pytest.approx(CALL)


def test_segments_and_calls_add_up_to_the_time_of_a_stage() -> None:
    chain = VirtualChain()
    found = chain.measure()
    started = chain.clock.now
    run_once(chain.links, chain.stopwatch)
    taken = chain.clock.now - started
    parts = sum(cost.forward.seconds + cost.backward.seconds for cost in found.costs)
    assert parts + 4 * found.call_seconds == pytest.approx(taken)


def test_backwards_run_in_reverse_order_and_weights_after_all_inputs() -> None:
    chain = VirtualChain()
    chain.measure(effort=Effort(seconds=0.0, fewest=1, most=1, warmups=0))
    whole = ["forward a", "forward b", "backward b", "backward a"]
    split = [
        "forward a",
        "forward b",
        "backward_inputs b",
        "backward_inputs a",
        "backward_weights b",
        "backward_weights a",
    ]
    light = ["forward_only a", "forward_only b"]
    assert chain.log[: len(whole + split + light)] == whole + split + light  # the first, untimed round
    assert chain.log[-len(whole + split + light) :] == whole + split + light


def test_the_first_round_of_all_is_not_timed() -> None:
    chain = VirtualChain()
    usual = chain.segments[0]._run

    def slow_at_first(part: str) -> None:
        usual(part)
        if chain.log.count(f"{part} a") < 2:  # the very first run, and the one that counts bytes
            chain.clock.advance(30.0)

    chain.segments[0]._run = slow_at_first
    assert seconds_of(chain.measure().costs[0]) == pytest.approx(FIRST)


@pytest.mark.parametrize("held", [1, 2, 4])
def test_several_microbatches_are_held_and_none_is_left(held: int) -> None:
    chain = VirtualChain()
    found = chain.measure(held=held)
    assert [segment.most_held for segment in chain.segments] == [max(held, 1)] * 2
    assert [segment.held for segment in chain.segments] == [0, 0]
    assert seconds_of(found.costs[0]) == pytest.approx(FIRST), "does not depend on how many are held"


def test_backwards_that_do_not_run_in_two_parts_are_halved() -> None:
    chain = VirtualChain()
    (first, _), _ = chain.measure(in_two_parts=False)
    assert first.backward_inputs.seconds == first.backward_weights.seconds
    assert first.backward_inputs.seconds == pytest.approx(FIRST["backward"] / 2)
    # The bytes are counted in two parts all the same, once for each segment.
    assert chain.log.count("backward_weights a") == 1


def test_what_only_a_first_segment_recomputes_is_an_entry_cost() -> None:
    (first, second), _ = VirtualChain(enter_seconds=0.004).measure()
    assert first.entry_seconds == 0 and second.entry_seconds == pytest.approx(0.004)
    assert seconds_of(second) == pytest.approx(SECOND), "the entry is taken off forwards, not backwards"


def test_an_empty_segment_that_runs_alone_is_called_faster() -> None:
    clock = VirtualClock()
    empty = LinkedSegment(VirtualSegment(lambda part: clock.advance(2.0 if part == "forward" else 1.0)))
    empty = LinkedSegment(empty.segment, given=[torch.ones(2)])
    assert measure_calls(empty, stopwatch=VirtualStopwatch(clock), effort=THREE_RUNS) == pytest.approx(1.5)


def test_an_asynchronous_device_gets_a_head_start_and_its_own_clock_counts() -> None:
    host, device = VirtualClock(), VirtualClock()

    def run(part: str) -> None:
        host.advance(0.001)
        device.advance(0.010 if part == "forward" else 0.005)

    def run_empty(part: str) -> None:
        host.advance(0.001)

    stopwatch: Any = VirtualAsyncStopwatch(host, device)
    found = measure_chain(
        [LinkedSegment(VirtualSegment(run), given=[torch.ones(2)])],
        make_empty=lambda: LinkedSegment(VirtualSegment(run_empty), given=[torch.ones(2)]),
        held=1,
        microbatch_size=1,
        stopwatch=stopwatch,
        make_meter=lambda: CountingMeter(torch.device("cpu")),
        effort=THREE_RUNS,
    )
    assert found.costs[0].forward.seconds == pytest.approx(0.010), "no call is taken off"
    assert found.call_seconds == pytest.approx(0.001), "the host's time"
    # A whole round queues four calls of one millisecond.
    assert stopwatch.head_starts[0] == pytest.approx(HEAD_START * 0.004)


# ---------------------------------------------------------------- samples


def samples(*, is_async: bool, seconds: list[float], host: list[float]) -> SegmentSamples:
    return SegmentSamples(is_async, {"forward": seconds}, {"forward": host})


def test_on_a_processor_the_call_and_the_entry_are_taken_off() -> None:
    own = samples(is_async=False, seconds=[5.0, 5.0], host=[5.0, 5.0])
    empty = samples(is_async=False, seconds=[2.0], host=[2.0])
    assert own.cost("forward", empty, 0.5, 0.5).seconds == pytest.approx(5 - 2 - 0.5)


def test_work_of_a_device_counts_fully_though_the_host_is_as_busy() -> None:
    own = samples(is_async=True, seconds=[5.0, 5.0], host=[5.5, 6.0])
    empty = samples(is_async=True, seconds=[0.0], host=[2.0])
    assert own.cost("forward", empty, 0.0, 0.5).seconds == pytest.approx(5)


def test_a_host_that_queues_too_slowly_sets_the_pace_at_its_best() -> None:
    own = samples(is_async=True, seconds=[5.0, 5.0], host=[20.0, 9.0])
    empty = samples(is_async=True, seconds=[0.0], host=[2.0, 3.0])
    assert own.cost("forward", empty, 0.0, 0.5).seconds == pytest.approx(9 - 2)


def test_a_segment_cheaper_than_a_call_costs_the_least_time() -> None:
    own = samples(is_async=False, seconds=[1.0], host=[1.0])
    empty = samples(is_async=False, seconds=[2.0], host=[2.0])
    assert own.cost("forward", empty, 0.0, 0.5).seconds == LEAST_SECONDS


# ---------------------------------------------------------------- several ranks


def cost_of(seconds: float, spread: float, num_bytes: int) -> SizeCost:
    return SizeCost(
        microbatch_size=2,
        activation_bytes=num_bytes,
        working_bytes=2 * num_bytes,
        split_bytes=3 * num_bytes,
        entry_seconds=seconds / 10,
        **{part: Duration(seconds * (place + 1), spread) for place, part in enumerate(PARTS)},
    )


def test_ranks_are_merged_by_median_times_and_largest_bytes() -> None:
    merged = merge_size_costs([cost_of(1.0, 0.3, 10), cost_of(9.0, 0.1, 7), cost_of(2.0, 0.2, 5)])
    assert merged == cost_of(2.0, 0.2, 10)
    assert merge_size_costs([merged]) == merged


def test_a_stopwatch_is_not_asked_for_a_head_start_before_the_warmup() -> None:
    class Refusing(VirtualStopwatch):
        def head_start(self, seconds: float) -> bool:
            assert seconds > 0, "a head start is known only after the warm-up"
            return False

    chain = VirtualChain()
    chain.stopwatch = Refusing(chain.clock)
    assert isinstance(chain.stopwatch, Stopwatch)
    assert seconds_of(chain.measure().costs[0]) == pytest.approx(FIRST)
