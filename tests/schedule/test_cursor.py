"""The cursor against a little world: random durations, random links, every schedule."""

import heapq
import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.schedule import NAMES, Cursor, build
from varuna.types import Instruction, Schedule


class World:
    """Plays a schedule with seeded durations and link delays; links are FIFO."""

    def __init__(
        self, schedule: Schedule, *, seed: int, delay: float = 3.0, compute_jitter: float = 1.0
    ) -> None:
        self.rng = random.Random(seed)
        self.delay, self.compute_jitter = delay, compute_jitter
        self.stages = len(schedule.rows)
        self.cursors = [
            Cursor(row, stage=stage, stages=self.stages, limit=limit, opportunistic=schedule.opportunistic)
            for stage, (row, limit) in enumerate(zip(schedule.rows, schedule.limits, strict=True))
        ]
        self.done: list[list[Instruction]] = [[] for _ in schedule.rows]
        self.most_held = [0] * self.stages
        self.arrived = {"activation": [0] * self.stages, "gradient": [0] * self.stages}
        self.link_free: dict[tuple[str, int], float] = {}
        self.idle = [True] * self.stages
        self.events: list[tuple[float, int, str, int, Instruction]] = []
        self.num_events = 0
        self.now = 0.0

    def run(self) -> "World":
        for stage in range(self.stages):
            self.start(stage)
        while self.events:
            self.now, _, kind, stage, instruction = heapq.heappop(self.events)
            if kind == "done":
                self.idle[stage] = True
                self.send(instruction)
            else:
                self.arrived[kind][stage] += 1
            self.start(stage)
        return self

    def start(self, stage: int) -> None:
        if not self.idle[stage]:
            return
        cursor = self.cursors[stage]
        instruction = cursor.next(self.arrived["activation"][stage], self.arrived["gradient"][stage])
        if instruction is None:
            assert cursor.finished or cursor.waiting_for()[1] >= self.arrived[cursor.waiting_for()[0]][stage]
            return
        self.idle[stage] = False
        self.done[stage].append(instruction)
        self.most_held[stage] = max(self.most_held[stage], cursor.held)
        unit = 2.0 if instruction.op == "B" else 1.0
        self.post(self.now + unit + self.rng.random() * self.compute_jitter, "done", stage, instruction)

    def send(self, instruction: Instruction) -> None:
        if instruction.op == "F" and instruction.stage + 1 < self.stages:
            self.travel("activation", instruction.stage + 1, instruction)
        elif instruction.op in "BI" and instruction.stage > 0:
            self.travel("gradient", instruction.stage - 1, instruction)

    def travel(self, kind: str, to: int, instruction: Instruction) -> None:
        arrival = max(self.link_free.get((kind, to), 0.0), self.now + self.rng.random() * self.delay)
        self.link_free[kind, to] = arrival
        self.post(arrival, kind, to, instruction)

    def post(self, when: float, kind: str, stage: int, instruction: Instruction) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (when, self.num_events, kind, stage, instruction))


def run_rows(row: str, *, stage: int = 0) -> list[Instruction]:
    return [Instruction(stage, cell[0], int(cell[1:])) for cell in row.split()]  # type: ignore[arg-type]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Schedule, World]:
    stages = draw(st.integers(1, 6))
    recompute = draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    name = draw(st.sampled_from(NAMES))
    built = build(name, stages=stages, microbatches=draw(st.integers(1, 12)), recompute=recompute)
    schedule = Schedule(name, built.rows, built.limits, opportunistic=draw(st.booleans()))
    delay = draw(st.sampled_from([0.0, 0.5, 3.0, 30.0]))
    return schedule, World(schedule, seed=draw(st.integers(0, 2**16)), delay=delay)


@given(worlds())
def test_every_instruction_runs_exactly_once_whatever_is_late(case: tuple[Schedule, World]) -> None:
    """V19, V22: no deadlock, nothing lost, nothing twice; strict and opportunistic alike."""
    schedule, world = case
    world.run()
    for cursor, done, row in zip(world.cursors, world.done, schedule.rows, strict=True):
        assert cursor.finished
        assert Counter(done) == Counter(row)


@given(worlds())
def test_no_more_micro_batches_are_held_than_the_limit_allows(case: tuple[Schedule, World]) -> None:
    """V19: activation memory per stage is bounded."""
    schedule, world = case
    world.run()
    assert all(most <= limit for most, limit in zip(world.most_held, schedule.limits, strict=True))


@given(worlds())
def test_links_see_micro_batches_in_order_and_a_recompute_serves_the_next_backward(
    case: tuple[Schedule, World],
) -> None:
    for done in case[1].run().done:
        for kinds in ("F", "BI", "W"):
            order = [i.microbatch for i in done if i.op in kinds]
            assert order == sorted(order)
        backwards = [i for i in done if i.op in "RBI"]
        for recompute, after in pairwise(backwards):
            if recompute.op == "R":
                assert (after.op in "BI", after.microbatch) == (True, recompute.microbatch)
        for position, i in enumerate(done):
            assert i.op == "F" or Instruction(i.stage, "F", i.microbatch) in done[:position]
            assert i.op != "W" or Instruction(i.stage, "I", i.microbatch) in done[:position]


@given(worlds())
def test_a_strict_cursor_gives_the_row_as_it_is_written(case: tuple[Schedule, World]) -> None:
    schedule, world = case
    if not schedule.opportunistic:
        assert world.run().done == [list(row) for row in schedule.rows]


@given(st.integers(2, 6), st.integers(1, 12), st.integers(0, 2**16))
def test_a_forward_without_recompute_is_followed_by_its_backward(
    stages: int, microbatches: int, seed: int
) -> None:
    """Overtaking must not part them: nothing would be left to run the backward on."""
    schedule = build("varuna", stages=stages, microbatches=microbatches, recompute=(True,) * stages)
    for done in World(schedule, seed=seed).run().done:
        recomputed = {i.microbatch for i in done if i.op == "R"}
        for position, i in enumerate(done):
            if i.op == "B" and i.microbatch not in recomputed:
                assert done[position - 1] == Instruction(i.stage, "F", i.microbatch)


def test_late_gradients_are_overtaken_by_forwards_up_to_the_limit() -> None:
    """V19: while a gradient is late, the stage runs a forward that is ready."""
    cursor = Cursor(run_rows("F0 B0 F1 B1 F2 B2"), stage=0, stages=2, limit=2, opportunistic=True)
    assert [str(cursor.next(0, 0)) for _ in range(3)] == ["0F0", "0F1", "None"]
    assert cursor.waiting_for() == ("gradient", 0)
    assert [str(cursor.next(0, 1)) for _ in range(3)] == ["0B0", "0F2", "None"]
    assert [str(cursor.next(0, 3)) for _ in range(2)] == ["0B1", "0B2"]
    assert cursor.finished


def test_late_activations_are_overtaken_by_backwards_then_weight_parts() -> None:
    row = run_rows("F0 F1 I0 F2 I1 W0 W1 I2 W2", stage=1)
    cursor = Cursor(row, stage=1, stages=3, limit=2, opportunistic=True)
    assert [str(cursor.next(2, 0)) for _ in range(3)] == ["1F0", "1F1", "None"]
    assert [str(cursor.next(2, 2)) for _ in range(5)] == ["1I0", "1I1", "1W0", "1W1", "None"]
    assert cursor.waiting_for() == ("activation", 2)


def test_a_recompute_runs_ahead_of_its_gradient_only_where_nothing_else_is_ready() -> None:
    row = run_rows("F0 R0 B0 F1 R1 B1")
    cursor = Cursor(row, stage=0, stages=2, limit=2, opportunistic=True)
    assert [str(cursor.next(0, 0)) for _ in range(4)] == ["0F0", "0F1", "0R0", "None"]


def test_a_strict_stage_waits_for_the_head_of_its_row() -> None:
    cursor = Cursor(run_rows("F0 B0 F1 B1"), stage=0, stages=2, limit=2, opportunistic=False)
    assert [str(cursor.next(0, 0)) for _ in range(2)] == ["0F0", "None"]
    assert cursor.waiting_for() == ("gradient", 0)


def test_a_single_stage_waits_for_nothing() -> None:
    schedule = build("varuna", stages=1, microbatches=3)
    cursor = Cursor(schedule.rows[0], stage=0, stages=1, limit=1, opportunistic=True)
    assert " ".join(str(cursor.next(0, 0)) for _ in range(6)) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert cursor.finished and cursor.next(0, 0) is None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [4, 8])
def test_with_late_links_the_opportunistic_order_is_faster_than_strict_1f1b(
    stages: int, recompute: bool
) -> None:
    """V20, in played time: by a fifth and more, for every one of these seeds."""

    def seconds(name: str, seed: int) -> float:
        size = {"stages": stages, "microbatches": 8 * stages}
        schedule = build(name, **size, recompute=(recompute,) * stages)
        return World(schedule, seed=seed, delay=3.0, compute_jitter=0.1).run().now

    assert all(seconds("varuna", seed) < 0.8 * seconds("1f1b", seed) for seed in range(5))
