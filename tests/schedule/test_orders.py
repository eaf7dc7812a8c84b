"""Properties of every order, for any number of stages and micro-batches."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.errors import ScheduleError
from varuna.schedule import NAMES, build, check, held, limit, row
from varuna.schedule.play import UNITS, play
from varuna.types import Schedule

names = st.sampled_from(NAMES)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    stages = draw(st.integers(1, 8))
    recompute = draw(st.one_of(st.just(()), st.tuples(*[st.booleans()] * stages)))
    return build(draw(names), stages=stages, microbatches=draw(st.integers(1, 20)), recompute=recompute)


def num_microbatches(schedule: Schedule) -> int:
    return sum(instruction.op == "F" for instruction in schedule.rows[0])


@given(schedules())
def test_every_micro_batch_runs_forward_and_backward_once_and_in_order(schedule: Schedule) -> None:
    """V22"""
    expected = list(range(num_microbatches(schedule)))
    for instructions in schedule.rows:
        assert [i.microbatch for i in instructions if i.op == "F"] == expected
        assert [i.microbatch for i in instructions if i.op in "BI"] == expected
        halves = [i.microbatch for i in instructions if i.op == "I"]
        assert [i.microbatch for i in instructions if i.op == "W"] == halves


@given(schedules())
def test_every_order_passes_the_check(schedule: Schedule) -> None:
    """V22: dependency-valid, within its limits, free of deadlock."""
    check(schedule)


@given(names, st.integers(1, 8), st.integers(1, 20), st.booleans())
def test_a_row_built_alone_is_the_row_of_the_whole(
    name: str, stages: int, microbatches: int, recompute: bool
) -> None:
    whole = build(name, stages=stages, microbatches=microbatches, recompute=(recompute,) * stages)
    for stage in range(stages):
        size = {"stage": stage, "stages": stages, "microbatches": microbatches}
        assert row(name, **size, recompute=recompute) == whole.rows[stage]
        assert limit(name, **size) == whole.limits[stage]


@given(names, st.integers(1, 8), st.integers(1, 20))
def test_a_recompute_comes_right_before_its_backward_unless_its_forward_did(
    name: str, stages: int, microbatches: int
) -> None:
    """V22: R before B where used."""
    schedule = build(name, stages=stages, microbatches=microbatches, recompute=(True,) * stages)
    for instructions in schedule.rows:
        before = {(b.op, b.microbatch): (a.op, a.microbatch) for a, b in pairwise(instructions)}
        for microbatch in range(microbatches):
            op = "B" if ("B", microbatch) in before else "I"
            assert before[op, microbatch] in {("R", microbatch), ("F", microbatch)}
            assert before.get(("R", microbatch)) != ("F", microbatch)


def test_recompute_is_chosen_per_stage() -> None:
    """V19"""
    schedule = build("1f1b", stages=3, microbatches=4, recompute=(True, False, True))
    assert [sum(i.op == "R" for i in instructions) for instructions in schedule.rows] == [4, 0, 0]


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("gpipe", (9, 9, 9, 9)),
        ("1f1b", (4, 3, 2, 1)),
        ("zero-bubble", (4, 3, 2, 1)),
        ("zero-bubble-2x", (7, 5, 3, 1)),
        ("varuna", (9, 7, 5, 1)),
    ],
)
def test_the_micro_batches_held_are_bounded(name: str, limits: tuple[int, ...]) -> None:
    """V19: activation memory per stage is bounded, whatever the number of micro-batches."""
    if name != "gpipe":
        assert build(name, stages=4, microbatches=100).limits == limits
    assert build(name, stages=4, microbatches=9).limits == limits
    assert build(name, stages=4, microbatches=1).limits == (1, 1, 1, 1)


@given(st.sampled_from([("zero-bubble", 1), ("zero-bubble-2x", 2)]), st.integers(1, 8), st.integers(1, 40))
def test_zero_bubble_keeps_no_more_alive_than_1f1b_does_on_its_first_stage_or_twice_that(
    schedule: tuple[str, int], stages: int, microbatches: int
) -> None:
    """V19: a weight part keeps its micro-batch alive too, so its lag counts."""
    name, times = schedule
    for stage, instructions in enumerate(build(name, stages=stages, microbatches=microbatches).rows):
        alive = most = most_deferred = deferred = 0
        for i in instructions:
            alive += (i.op == "F") - (i.op == "W")
            deferred += (i.op == "I") - (i.op == "W")
            most, most_deferred = max(most, alive), max(most_deferred, deferred)
        assert most <= times * stages
        assert most == held(name, stage=stage, stages=stages, microbatches=microbatches)
        assert most_deferred <= times * stage + 1


def test_an_unknown_name_is_answered_with_the_names() -> None:
    with pytest.raises(ScheduleError, match=r"'2f2b'.*varuna, 1f1b, gpipe, zero-bubble"):
        build("2f2b", stages=2, microbatches=2)


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-1, 3)])
def test_no_stages_or_no_micro_batches_are_refused(stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="at least one stage"):
        limit("1f1b", stage=0, stages=stages, microbatches=microbatches)
    with pytest.raises(ScheduleError):
        build("1f1b", stages=stages, microbatches=microbatches)


def test_a_stage_outside_the_pipeline_and_recompute_of_the_wrong_length_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stage 3 does not exist: stages are 0 to 2"):
        row("1f1b", stage=3, stages=3, microbatches=2)
    with pytest.raises(ScheduleError, match="2 entries for 3 stages"):
        build("1f1b", stages=3, microbatches=2, recompute=(True, False))


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_thousand_micro_batches_are_built_and_checked(name: str) -> None:
    """V22: M up to 100,000."""
    schedule = build(name, stages=4, microbatches=100_000, recompute=(True,) * 4)
    check(schedule)
    assert num_microbatches(schedule) == 100_000


@given(st.integers(1, 8), st.integers(0, 20))
def test_with_unit_times_every_order_takes_what_its_paper_says(stages: int, more: int) -> None:
    """V19: zero-bubble waits a third as long as 1f1b does, in the same number of micro-batches held."""
    microbatches = stages + more

    def units(name: str) -> int:
        rows = build(name, stages=stages, microbatches=microbatches).rows
        starts = play(rows).starts
        return max(begun[-1] + UNITS[row[-1].op] for begun, row in zip(starts, rows, strict=True))

    assert units("gpipe") == units("1f1b") == units("varuna") == 3 * microbatches + 3 * (stages - 1)
    assert units("zero-bubble") == 3 * microbatches + (stages - 1)


@given(st.integers(1, 8), st.integers(0, 20))
def test_with_twice_the_memory_no_stage_waits_once_it_has_begun(stages: int, more: int) -> None:
    """V19: so one step can follow the other without a gap, each stage a forward later than the one before."""
    microbatches = 2 * stages - 1 + more
    rows = build("zero-bubble-2x", stages=stages, microbatches=microbatches).rows
    for stage, begun in enumerate(play(rows).starts):
        assert begun == list(range(stage, stage + 3 * microbatches))
