"""Validates a schedule before anything runs it."""

from collections.abc import Sequence

from varuna.errors import ScheduleError
from varuna.schedule.play import play
from varuna.types import Instruction, Schedule


def check(schedule: Schedule) -> None:
    """Raise a ScheduleError that names the first fault: of each row alone, then a deadlock of all rows."""
    if not schedule.rows:
        raise ScheduleError("the schedule has no rows (expected one per stage)")
    if len(schedule.limits) != len(schedule.rows):
        raise ScheduleError(
            f"the schedule has {len(schedule.rows)} rows and {len(schedule.limits)} limits "
            "(expected one limit per row)"
        )
    counts = [
        _count_microbatches(stage, row, limit=limit)
        for stage, (row, limit) in enumerate(zip(schedule.rows, schedule.limits, strict=True))
    ]
    for stage, count in enumerate(counts):
        if count != counts[0]:
            raise ScheduleError(
                f"stage {stage} runs {count} micro-batches and stage 0 runs {counts[0]} "
                "(every stage must run every micro-batch)"
            )
    stuck = play(schedule.rows).stuck
    if stuck:
        waits = "; ".join(_describe_wait(head) for head in stuck.values())
        raise ScheduleError(f"the rows deadlock: {waits} (move the instructions they wait for forward)")


def _count_microbatches(stage: int, row: Sequence[Instruction], *, limit: int) -> int:
    """Return the number of micro-batches of a row; raise a ScheduleError if it breaks a rule."""
    forwards = backwards = weights = 0
    split: list[int] = []  # micro-batches with separate input and weight parts, in the order of their I
    recomputed = -1
    before: Instruction | None = None
    for position, instruction in enumerate(row):
        op, microbatch = instruction.op, instruction.microbatch
        fault = ""
        if instruction.stage != stage:
            fault = f"it belongs to stage {instruction.stage}, but is in the row of stage {stage}"
        elif op == "F":
            if microbatch != forwards:
                fault = _out_of_order("F", microbatch, forwards)
            elif forwards - backwards == limit:
                fault = f"the stage would hold {limit + 1} micro-batches, its limit is {limit}"
            forwards += 1
        elif op == "W":
            if weights == len(split) or microbatch != split[weights]:
                twice = microbatch in split[:weights]
                fault = "it runs twice" if twice else "its input part, or the W before it, has not run yet"
            weights += 1
        elif op == "R":
            if microbatch >= forwards:
                fault = "its forward has not run yet"
            elif microbatch < backwards:
                fault = "its backward has already run (a recompute must come before it)"
            elif microbatch == recomputed:
                fault = "it runs twice"
            elif microbatch != backwards:
                fault = f"the backward of micro-batch {backwards} comes first (recompute only the next one)"
            elif before is not None and before.op == "F" and before.microbatch == microbatch:
                fault = "the recompute is not needed: its forward ran just before"
            recomputed = microbatch
        else:
            if microbatch != backwards:
                fault = _out_of_order(op, microbatch, backwards)
            elif microbatch >= forwards:
                fault = "its forward has not run yet"
            backwards += 1
            if op == "I":
                split.append(microbatch)
        if fault:
            raise ScheduleError(f"stage {stage}, position {position}, {instruction}: {fault}")
        before = instruction

    if not forwards:
        raise ScheduleError(f"stage {stage} runs no forward (expected F0, F1, ...)")
    if backwards < forwards:
        raise ScheduleError(f"stage {stage}: the backward of micro-batch {backwards} is missing")
    if weights < len(split):
        raise ScheduleError(f"stage {stage}: the weight part W{split[weights]} is missing")
    return forwards


def _out_of_order(op: str, found: int, expected: int) -> str:
    if found < expected:
        return "it runs twice"
    return f"expected {op}{expected} here (links deliver in the order of micro-batches)"


def _describe_wait(head: Instruction) -> str:
    if head.op == "F":
        return f"stage {head.stage} waits at {head} for stage {head.stage - 1} to run F{head.microbatch}"
    return (
        f"stage {head.stage} waits at {head} for stage {head.stage + 1} "
        f"to run the backward of {head.microbatch}"
    )
