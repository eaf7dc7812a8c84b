"""Schedules as people and as torch read them."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    _validate_schedule,
)

from varuna.errors import ScheduleError
from varuna.schedule import NAMES, build, from_csv, grid, to_csv
from varuna.types import Instruction, Schedule

GOLDEN = Path(__file__).parent / "golden"


def golden(name: str) -> str:
    return (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_grid_and_the_csv_read_as_they_did(name: str) -> None:
    """V22: printable as a grid."""
    schedule = build(name, stages=3, microbatches=4)
    assert grid(schedule) == golden(f"{name}-3x4.txt")
    assert to_csv(schedule) == golden(f"{name}-3x4.csv")


def test_the_grid_shows_recomputes_fewer_micro_batches_than_stages_and_wide_numbers() -> None:
    few = build("1f1b", stages=4, microbatches=2, recompute=(True,) * 4)
    assert grid(few) == golden("1f1b-recompute-4x2.txt")
    assert grid(build("1f1b", stages=2, microbatches=12)) == golden("1f1b-2x12.txt")


def test_a_schedule_that_deadlocks_has_no_grid() -> None:
    rows = tuple(
        tuple(Instruction(stage, op, microbatch) for op, microbatch in row)  # type: ignore[arg-type]
        for stage, row in enumerate(
            [
                [("F", 0), ("B", 0), ("F", 1), ("B", 1)],
                [("F", 0), ("F", 1), ("B", 0), ("B", 1)],
            ]
        )
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        grid(Schedule("bad", rows, (2, 2), opportunistic=False))


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_csv_written_and_read_gives_the_same_rows_without_recomputes(
    name: str, stages: int, microbatches: int, recompute: bool
) -> None:
    """V22: reads and writes torch's pipeline CSV."""
    schedule = build(name, stages=stages, microbatches=microbatches, recompute=(recompute,) * stages)
    read = from_csv(to_csv(schedule))
    assert read.rows == build(name, stages=stages, microbatches=microbatches).rows
    assert not read.opportunistic
    assert all(found <= limit for found, limit in zip(read.limits, schedule.limits, strict=True))


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 12))
def test_torch_reads_our_csv_and_finds_it_valid(name: str, stages: int, microbatches: int) -> None:
    """V22: torch's own parser and validator."""
    lines = to_csv(build(name, stages=stages, microbatches=microbatches)).splitlines()
    actions = {rank: [_Action.from_str(cell) for cell in line.split(",")] for rank, line in enumerate(lines)}
    placed = _validate_schedule(actions, stages, stages, microbatches)
    assert placed == {stage: stage for stage in range(stages)}


@pytest.mark.parametrize("name", NAMES)
def test_torchs_runtime_loads_our_csv_and_we_read_what_it_writes(name: str, tmp_path: Path) -> None:
    """V22: there and back through torch's own files."""
    ours = build(name, stages=4, microbatches=6)
    (tmp_path / "ours.csv").write_text(to_csv(ours))
    runtime = torch_runtime(stages=4, microbatches=6)
    runtime._load_csv(str(tmp_path / "ours.csv"))
    assert set(runtime.pipeline_order_with_comms) == {0, 1, 2, 3}
    runtime._dump_csv(str(tmp_path / "theirs.csv"), format="compute_only")
    assert from_csv((tmp_path / "theirs.csv").read_text()).rows == ours.rows


def torch_runtime(*, stages: int, microbatches: int) -> _PipelineScheduleRuntime:
    """A runtime on the last rank, with only what loading a schedule needs of its stage."""

    class Stage:
        group_size = num_stages = stages
        group_rank = stage_index = stages - 1
        is_first, is_last, has_backward = False, True, True
        submod = torch.nn.Identity()
        stage_index_to_group_rank = {stage: stage for stage in range(stages)}  # noqa: RUF012
        device = torch.device("cpu")

    return _PipelineScheduleRuntime([Stage()], microbatches, loss_fn=lambda *_: None)  # type: ignore[list-item]


def test_empty_cells_are_time_spent_waiting() -> None:
    read = from_csv("0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n")
    assert [" ".join(map(str, row)) for row in read.rows] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert read.limits == (2, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0F0,0X0,0B0\n", r"row 0, cell 1, '0X0'.*like 0F0"),
        ("0F0,0B0\n1F0,1RECV_B0,1B0\n", r"row 1, cell 1, '1RECV_B0'.*compute-only"),
        ("0F0,0B\n", r"row 0, cell 1, '0B'"),
        ("0F0,-1B0\n", r"row 0, cell 1, '-1B0'"),
        ("0F0,0B0\n0F0,0B0\n", r"row 1, cell 0, '0F0': stage 0 in the row of rank 1"),
        ("0F0,0B0,2F0,2B0\n1F0,1B0\n", r"row 0, cell 2, '2F0': stage 2 in the row of rank 0"),
        ("0F0,0F1,0B1,0B0\n", r"stage 0, position 2, 0B1: expected B0 here"),
        ("", "no rows"),
        ("0F0,0B0\n\n", "stage 1 runs no forward"),
    ],
)
def test_what_cannot_be_read_is_named_by_row_and_cell(text: str, complaint: str) -> None:
    """V22"""
    with pytest.raises(ScheduleError, match=complaint):
        from_csv(text)
