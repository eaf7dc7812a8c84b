"""Builds the order of instructions of each stage.

In every order forwards run by micro-batch index, and so do backwards. The rest of the library relies on
this: a link is a FIFO, and the number of arrived messages identifies them.

    gpipe           all forwards, then all backwards
    1f1b            one forward for each stage from here to the end, then one backward, one forward
    varuna          prefers the order of 1f1b; instructions that are ready overtake late ones
    zero-bubble     the order of 1f1b with the backward in two parts; the second part fills the gaps
    zero-bubble-2x  the same with twice the memory: no stage waits between its first forward and its last
                    weight part, so steps follow each other without a gap
"""

from collections.abc import Iterator
from itertools import count
from typing import get_args

from varuna.errors import ScheduleError
from varuna.types import Instruction, Op, Schedule, ScheduleName

NAMES: tuple[str, ...] = get_args(ScheduleName)


def build(name: str, *, stages: int, microbatches: int, recompute: tuple[bool, ...] = ()) -> Schedule:
    """Build the whole schedule; `recompute` has one flag per stage, or is empty for no recompute."""
    _validate(name, stage=0, stages=stages, microbatches=microbatches)
    if recompute and len(recompute) != stages:
        raise ScheduleError(
            f"recompute has {len(recompute)} entries for {stages} stages (give one per stage, or none at all)"
        )
    flags = recompute or (False,) * stages
    sizes = [{"stage": stage, "stages": stages, "microbatches": microbatches} for stage in range(stages)]
    return Schedule(
        name=name,
        rows=tuple(row(name, **size, recompute=flag) for size, flag in zip(sizes, flags, strict=True)),
        limits=tuple(limit(name, **size) for size in sizes),
        opportunistic=opportunistic(name),
    )


def row(
    name: str, *, stage: int, stages: int, microbatches: int, recompute: bool = False
) -> tuple[Instruction, ...]:
    """Return the instructions of one stage, without building the others."""
    numbers: dict[str, Iterator[int]] = {op: count() for op in get_args(Op)}
    letters = ops(name, stage=stage, stages=stages, microbatches=microbatches, recompute=recompute)
    return tuple(Instruction(stage, op, next(numbers[op])) for op in letters)  # type: ignore[arg-type]


def ops(name: str, *, stage: int, stages: int, microbatches: int, recompute: bool = False) -> str:
    """Return the order of one stage in letters: "FFBFBB". The n-th of each letter is micro-batch n."""
    _validate(name, stage=stage, stages=stages, microbatches=microbatches)
    ahead, lag = _ahead(name, stage, stages, microbatches), _lag(name, stage)
    if lag is None:
        order = "F" * ahead + "BF" * (microbatches - ahead) + "B" * ahead
    else:
        order = _split(microbatches, ahead=ahead, lag=lag)
    if recompute and recomputes(name, stage=stage, stages=stages, microbatches=microbatches):
        return order.replace("B", "RB").replace("I", "RI")
    return order


def recomputes(name: str, *, stage: int, stages: int, microbatches: int) -> bool:
    """Return whether a stage with recompute runs R: a backward right after its forward needs none."""
    return _ahead(name, stage, stages, microbatches) > 1


def limit(name: str, *, stage: int, stages: int, microbatches: int) -> int:
    """Return how many micro-batches the stage may hold between their forward and their backward."""
    _validate(name, stage=stage, stages=stages, microbatches=microbatches)
    to_the_end = stages - stage
    bounds = {
        "gpipe": microbatches,
        "1f1b": to_the_end,
        "zero-bubble": to_the_end,
        "zero-bubble-2x": 2 * to_the_end - 1,
        # A larger limit lets a stage run ahead while a gradient is late. Simulated with link delays
        # that vary by one forward (P=8, M=64; ideal 192): 1x 416, 1.5x 311, 2x+1 261, 3x 239, no limit
        # 233. With half the delay, 2x+1 is within 1% of 3x. The last stage never waits for a gradient.
        "varuna": 2 * to_the_end + 1 if to_the_end > 1 else 1,
    }
    return min(microbatches, bounds[name])


def held(name: str, *, stage: int, stages: int, microbatches: int) -> int:
    """Return how many micro-batches the stage may keep in memory, until their weight part is done."""
    between = limit(name, stage=stage, stages=stages, microbatches=microbatches)
    return min(microbatches, between + (_lag(name, stage) or 0))


def half_done(name: str, *, stage: int, microbatches: int) -> int:
    """Return how many micro-batches may at most be between their input part and their weight part."""
    lag = _lag(name, stage)
    return 0 if lag is None else min(microbatches, lag + 1)


def splits(name: str) -> bool:
    """Return whether the backward is in two parts."""
    return _lag(name, 0) is not None


def opportunistic(name: str) -> bool:
    """Return whether ready instructions may overtake late ones.

    zero-bubble is strict: a weight part that runs early fills a gap that the order needs later, and
    steady pipelines get slower (P=4, M=8: 30 units instead of 27).
    """
    return name == "varuna"


def _ahead(name: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the number of forwards before the first backward."""
    to_the_end = stages - stage
    bounds = {"gpipe": microbatches, "zero-bubble-2x": 2 * to_the_end - 1}
    return min(microbatches, bounds.get(name, to_the_end))


def _lag(name: str, stage: int) -> int | None:
    """Return by how many micro-batches weight parts are deferred; None if backwards are in one part."""
    return {"zero-bubble": stage, "zero-bubble-2x": 2 * stage}.get(name)


def _split(microbatches: int, *, ahead: int, lag: int) -> str:
    """Return the order of ZB-H1 or ZB-H2, "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).

    H1 defers each weight part by as many micro-batches as there are stages before this one: 1f1b holds
    that many fewer forwards here. So `ahead + lag` never exceeds the number of stages.

    H2 runs 2(P - s) - 1 forwards, enough work until the first gradient is back. It defers 2s weight
    parts, so that the last gradient reaches stage 0 when it has nothing else to do. Every stage then
    works without a gap, and `ahead + lag` is 2P - 1 on all of them.
    """
    lag = min(lag, microbatches)
    last_forward_after = microbatches - ahead  # input parts; then no forward is left
    both = min(lag, last_forward_after)
    steady = "IWF" * (last_forward_after - lag) if lag < last_forward_after else "I" * (lag - both)
    rest = microbatches - max(lag, last_forward_after)
    return "F" * ahead + "IF" * both + steady + "IW" * rest + "W" * lag


def _validate(name: str, *, stage: int, stages: int, microbatches: int) -> None:
    if name not in NAMES:
        raise ScheduleError(f"unknown schedule {name!r} (choose one of {', '.join(NAMES)})")
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one micro-batch, but got {stages} and {microbatches}"
        )
    if not 0 <= stage < stages:
        raise ScheduleError(f"stage {stage} does not exist: stages are 0 to {stages - 1}")
