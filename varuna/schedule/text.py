"""Schedules as text: a grid to read, and the CSV of torch's pipelining."""

import csv
import io
import re
from itertools import accumulate

from varuna.errors import ScheduleError
from varuna.schedule.check import check
from varuna.schedule.play import UNITS, play
from varuna.types import Instruction, Op, Schedule

_CELL = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def grid(schedule: Schedule) -> str:
    """Return a table with time across and stages down.

    Rows run in their strict order; F, R, I and W take one unit, B takes two. A dot is a unit of waiting.
    An opportunistic schedule runs like this when nothing is late.
    """
    check(schedule)
    starts = play(schedule.rows).starts
    lines = []
    for row, begun in zip(schedule.rows, starts, strict=True):
        cells: list[str] = []
        for instruction, start in zip(row, begun, strict=True):
            cells.extend("." * (start - len(cells)))
            name = f"{instruction.op}{instruction.microbatch}"
            cells.append(name)
            cells.extend(["-" * len(name)] * (UNITS[instruction.op] - 1))
        lines.append(cells)
    ruler = [str(unit) if unit % 5 == 0 else "" for unit in range(max(map(len, lines)))]
    longest = max(len(cell) for cells in (ruler, *lines) for cell in cells)
    label = len(f"stage {len(lines) - 1}")
    order = "preferred order" if schedule.opportunistic else "order"
    num_microbatches = sum(i.op == "F" for i in schedule.rows[0])
    table = [("time", ruler), *((f"stage {stage}", cells) for stage, cells in enumerate(lines))]
    return "\n".join(
        [
            f"{schedule.name}: {order} of {len(lines)} stages, {num_microbatches} micro-batches, "
            f"held at most {', '.join(map(str, schedule.limits))}",
            *(
                f"{name:<{label}}  {' '.join(cell.ljust(longest) for cell in cells)}".rstrip()
                for name, cells in table
            ),
            "",
        ]
    )


def to_csv(schedule: Schedule) -> str:
    """Return the compute-only CSV of `torch.distributed.pipelining`: a row per rank, cells like 2F0.

    Torch has no instruction for a recompute, so every R is left out. An opportunistic schedule is
    written in its preferred order, which is then fixed.
    """
    return "".join(",".join(str(i) for i in row if i.op != "R") + "\n" for row in schedule.rows)


def from_csv(text: str) -> Schedule:
    """Read the CSV of `to_csv` or torch: one stage per rank; empty cells are waiting time.

    The result is checked and strict. Its limits are the most that its rows hold.
    """
    rows = tuple(
        tuple(_read_cell(cell, row=rank, column=column) for column, cell in enumerate(cells) if cell.strip())
        for rank, cells in enumerate(csv.reader(io.StringIO(text)))
    )
    held = (accumulate(((i.op == "F") - (i.op in "BI") for i in row), initial=0) for row in rows)
    schedule = Schedule("csv", rows, tuple(map(max, held)), opportunistic=False)
    check(schedule)
    return schedule


def _read_cell(cell: str, *, row: int, column: int) -> Instruction:
    where = f"row {row}, cell {column}, {cell.strip()!r}"
    match = _CELL.fullmatch(cell.strip())
    if match is None:
        raise ScheduleError(
            f"{where}: expected a stage, one of F, B, I, W and a micro-batch, like {row}F0 "
            "(a file with SEND, RECV or other actions must be written compute-only)"
        )
    stage, microbatch = int(match[1]), int(match[3])
    if stage != row:
        raise ScheduleError(
            f"{where}: stage {stage} in the row of rank {row} (expected one stage per rank, in order)"
        )
    op: Op = match[2]  # type: ignore[assignment]  # the pattern matches nothing else
    return Instruction(stage, op, microbatch)
