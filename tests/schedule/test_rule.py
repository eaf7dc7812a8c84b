"""The scheduling rule against a direct reading of its description."""

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from varuna.schedule import NAMES, Cursor, build
from varuna.schedule.rule import BACKWARD, FORWARD, WAIT, WEIGHT, choose
from varuna.types import Instruction, Schedule


class NaiveStage:
    """Keeps the instructions that are left as a list, and searches it for each decision."""

    def __init__(
        self, row: Sequence[Instruction], *, stage: int, stages: int, limit: int, free: bool
    ) -> None:
        self.left = list(row)
        self.first, self.last = stage == 0, stage == stages - 1
        self.limit, self.free = limit, free
        self.done: list[Instruction] = []

    def next(self, activations: int, gradients: int) -> Instruction | None:
        if not self.left:
            return None
        chosen = self._choose(activations, gradients)
        if chosen is not None:
            self.left.remove(chosen)
            self.done.append(chosen)
        return chosen

    def _choose(self, activations: int, gradients: int) -> Instruction | None:
        head = self.left[0]

        def arrived(i: Instruction) -> bool:
            if i.op == "F":
                return self.first or activations > i.microbatch
            return i.op == "W" or self.last or gradients > i.microbatch

        if arrived(head) or (head.op == "R" and not self.free):
            return head
        if not self.free:
            return None
        forwarded = {i.microbatch for i in self.done if i.op == "F"}
        returned = {i.microbatch for i in self.done if i.op in "BI"}
        backward = next((i for i in self.left if i.op in "RBI"), None)
        forward = next((i for i in self.left if i.op == "F"), None)
        weight = next((i for i in self.left if i.op == "W"), None)
        ready = backward is not None and backward.microbatch in forwarded
        if backward is not None and ready and arrived(backward):
            return backward
        if forward is not None and arrived(forward) and len(forwarded - returned) < self.limit:
            return forward
        if weight is not None and weight.microbatch in returned:
            return weight
        if backward is not None and ready and backward.op == "R":
            return backward
        return None


@st.composite
def stages_with_arrivals(draw: st.DrawFn) -> tuple[Schedule, int, list[tuple[int, int]]]:
    """A schedule, one of its stages, and what arrives before each decision."""
    stages = draw(st.integers(1, 5))
    recompute = draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    name = draw(st.sampled_from(NAMES))
    built = build(name, stages=stages, microbatches=draw(st.integers(1, 8)), recompute=recompute)
    schedule = Schedule(name, built.rows, built.limits, opportunistic=draw(st.booleans()))
    steps = st.tuples(st.integers(0, 2), st.integers(0, 2))
    return schedule, draw(st.integers(0, stages - 1)), draw(st.lists(steps, min_size=80, max_size=80))


@given(stages_with_arrivals())
def test_cursor_chooses_what_the_description_says(case: tuple[Schedule, int, list[tuple[int, int]]]) -> None:
    """Whatever arrives when: the same instructions, and the same waits."""
    schedule, stage, steps = case
    row, limit, stages = schedule.rows[stage], schedule.limits[stage], len(schedule.rows)
    num_microbatches = sum(i.op == "F" for i in row)
    cursor = Cursor(row, stage=stage, stages=stages, limit=limit, opportunistic=schedule.opportunistic)
    naive = NaiveStage(row, stage=stage, stages=stages, limit=limit, free=schedule.opportunistic)
    activations = gradients = 0
    for more_activations, more_gradients in steps:
        activations = min(num_microbatches, activations + more_activations)
        # A gradient can arrive only for a micro-batch that this stage has sent on.
        sent = sum(i.op == "F" for i in naive.done)
        gradients = min(sent, gradients + more_gradients)
        expected = naive.next(activations, gradients)
        assert cursor.next(activations, gradients) == expected
        assert cursor.finished == (not naive.left)
        forwards = sum(i.op == "F" for i in naive.done)
        assert cursor.held == forwards - sum(i.op in "BI" for i in naive.done)


def test_strict_order_never_leaves_the_head() -> None:
    """Every combination of arrivals gives the head or WAIT; a recompute needs no gradient."""
    heads = {FORWARD: (0, 5, 7), BACKWARD: (5, 0, 7), WEIGHT: (5, 7, 0)}
    for head, positions in heads.items():
        for activation, gradient, recompute in product((False, True), repeat=3):
            found = choose(*positions, 9, activation, gradient, recompute, False, 1, 4, 1)
            allowed = {FORWARD: activation, BACKWARD: gradient or recompute, WEIGHT: True}[head]
            assert found == (head if allowed else WAIT)


def test_overtaking_prefers_backward_then_forward_then_weight_then_recompute() -> None:
    late_forward = (0, 5, 7, 9, False)
    assert choose(*late_forward, True, False, True, 1, 4, 1) == BACKWARD
    assert choose(*late_forward, False, False, True, 1, 4, 1) == WEIGHT
    assert choose(*late_forward, False, True, True, 1, 4, 1) == WEIGHT
    assert choose(*late_forward, False, True, True, 1, 4, 0) == BACKWARD  # the recompute
    assert choose(*late_forward, False, False, True, 1, 4, 0) == WAIT
    late_backward = (5, 0, 7, 9)
    assert choose(*late_backward, True, False, True, True, 1, 4, 1) == FORWARD
    assert choose(*late_backward, True, False, True, True, 4, 4, 1) == WEIGHT  # the limit is reached
    assert choose(*late_backward, True, False, True, True, 4, 4, 0) == BACKWARD
    assert choose(*late_backward, True, False, False, True, 4, 4, 0) == WAIT


def test_nothing_is_chosen_that_is_not_left() -> None:
    """All pointers at the end: the stage is finished. A backward without its forward never runs."""
    assert choose(9, 9, 9, 9, True, True, False, True, 0, 4, 0) == WAIT
    assert choose(9, 9, 9, 9, True, True, False, False, 0, 4, 0) == WAIT
    assert choose(0, 5, 9, 9, False, True, True, True, 0, 4, 0) == WAIT
    assert choose(9, 5, 3, 9, True, False, False, True, 2, 4, 0) == WEIGHT  # the head is a weight part
