"""The check finds each kind of fault, and says where."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from varuna.errors import ScheduleError
from varuna.schedule import NAMES, build, check
from varuna.types import Instruction, Schedule


def schedule(*rows: str, limits: tuple[int, ...] = ()) -> Schedule:
    """One text per stage: "F0 B0"."""
    read = tuple(
        tuple(Instruction(stage, cell[0], int(cell[1:])) for cell in row.split())  # type: ignore[arg-type]
        for stage, row in enumerate(rows)
    )
    return Schedule("by hand", read, limits or (9,) * len(rows), opportunistic=False)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("", "stage 0 runs no forward"),
        ("F0 F1 B0", "the backward of micro-batch 1 is missing"),
        ("F0 F2 B0 B2", "position 1, 0F2: expected F1 here"),
        ("F0 F0 B0", "position 1, 0F0: it runs twice"),
        ("F0 B0 B0", "position 2, 0B0: it runs twice"),
        ("B0 F0", "position 0, 0B0: its forward has not run yet"),
        ("F1 F0 B0 B1", "position 0, 0F1: expected F0 here"),
        ("F0 F1 B1 B0", "position 2, 0B1: expected B0 here"),
        ("F0 F1 F2 B0 B1 B2", "position 2, 0F2: the stage would hold 3 micro-batches, its limit is 2"),
        ("R0 F0 B0", "position 0, 0R0: its forward has not run yet"),
        ("F0 R0 B0", "position 1, 0R0: the recompute is not needed"),
        ("F0 F1 B0 R0 B1", "position 3, 0R0: its backward has already run"),
        ("F0 F1 R0 R0 B0 B1", "position 3, 0R0: it runs twice"),
        ("F0 F1 R0 R1 B0 B1", "position 3, 0R1: the backward of micro-batch 0 comes first"),
        ("F0 I0", "the weight part W0 is missing"),
        ("F0 W0 I0", "position 1, 0W0: its input part"),
        ("F0 B0 W0", "position 2, 0W0: its input part"),
        ("F0 I0 W0 W0", "position 3, 0W0: it runs twice"),
        ("F0 I0 B0 W0", "position 2, 0B0: it runs twice"),
    ],
)
def test_a_fault_in_a_row_is_named_with_its_place(row: str, fault: str) -> None:
    """V22"""
    with pytest.raises(ScheduleError) as error:
        check(schedule(row, limits=(2,)))
    assert fault in str(error.value)


@pytest.mark.parametrize("row", ["F0 B0", "F0 F1 R0 B0 R1 B1", "F0 F1 I0 B1 W0", "F0 I0 W0 F1 B1"])
def test_a_good_row_passes(row: str) -> None:
    check(schedule(row, limits=(2,)))


def test_a_deadlock_is_named_with_who_waits_for_what() -> None:
    """V22"""
    with pytest.raises(ScheduleError) as error:
        check(schedule("F0 B0 F1 B1", "F0 F1 B0 B1"))
    assert "stage 0 waits at 0B0 for stage 1 to run the backward of 0" in str(error.value)
    assert "stage 1 waits at 1F1 for stage 0 to run F1" in str(error.value)


def test_stages_must_agree_on_the_number_of_micro_batches() -> None:
    with pytest.raises(ScheduleError, match="stage 1 runs 1 micro-batches and stage 0 runs 2"):
        check(schedule("F0 F1 B0 B1", "F0 B0"))


def test_an_instruction_in_another_stages_row_is_found() -> None:
    first, second = schedule("F0 B0", "F0 B0").rows
    with pytest.raises(ScheduleError, match="stage 0, position 0, 1F0: it belongs to stage 1"):
        check(Schedule("swapped", (second, first), (1, 1), opportunistic=False))


def test_rows_and_limits_must_be_there_and_match() -> None:
    with pytest.raises(ScheduleError, match="no rows"):
        check(Schedule("empty", (), (), opportunistic=False))
    with pytest.raises(ScheduleError, match="1 rows and 2 limits"):
        check(schedule("F0 B0", limits=(1, 1)))


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 8), st.booleans(), st.data())
def test_losing_or_doubling_any_instruction_is_found(
    name: str, stages: int, microbatches: int, recompute: bool, data: st.DataObject
) -> None:
    good = build(name, stages=stages, microbatches=microbatches, recompute=(recompute,) * stages)
    stage = data.draw(st.integers(0, stages - 1))
    row = good.rows[stage]
    position = data.draw(st.integers(0, len(row) - 1))
    copies = data.draw(st.sampled_from([0, 2]))
    assume(copies or row[position].op != "R")  # a stage may do without any one recompute
    damaged = row[:position] + row[position : position + 1] * copies + row[position + 1 :]
    rows = (*good.rows[:stage], damaged, *good.rows[stage + 1 :])
    with pytest.raises(ScheduleError):
        check(Schedule(name, rows, good.limits, opportunistic=good.opportunistic))
