"""Writes down, for each stage, which instruction comes after which.

Every order keeps two rules that the rest of the library leans on: forwards run by micro-batch
index, and so do backwards. A link is then a plain FIFO, and a count of what has arrived says what.

    gpipe           all forwards, then all backwards
    1f1b            as many forwards as there are stages from here on, then one backward, one forward
    varuna          the order of 1f1b as a preference: what is late is overtaken by what is ready
    zero-bubble     the order of 1f1b with the backward in two parts; the second part fills the gaps
    zero-bubble-2x  the same with twice the memory: no stage waits between its first forward and its last
                    weight part, so that steps follow each other without a gap
"""

from collections.abc import Iterator
from itertools import count
from typing import get_args

from varuna.errors import ScheduleError
from varuna.types import Instruction, Op, Schedule, ScheduleName

NAMES: tuple[str, ...] = get_args(ScheduleName)
OPPORTUNISTIC = frozenset({"varuna"})


def build(name: str, *, stages: int, microbatches: int, recompute: tuple[bool, ...] = ()) -> Schedule:
    """The whole schedule; `recompute` has one claim per stage, or is empty where none recomputes."""
    _refuse_nonsense(name, stage=0, stages=stages, microbatches=microbatches)
    if recompute and len(recompute) != stages:
        raise ScheduleError(
            f"recompute has {len(recompute)} entries for {stages} stages (give one per stage, or none at all)"
        )
    spans = range(stages)
    return Schedule(
        name=name,
        rows=tuple(
            row(
                name,
                stage=stage,
                stages=stages,
                microbatches=microbatches,
                recompute=bool(recompute) and recompute[stage],
            )
            for stage in spans
        ),
        limits=tuple(limit(name, stage=stage, stages=stages, microbatches=microbatches) for stage in spans),
        opportunistic=opportunistic(name),
    )


def row(
    name: str, *, stage: int, stages: int, microbatches: int, recompute: bool = False
) -> tuple[Instruction, ...]:
    """One stage's instructions, without building the other stages'."""
    numbers: dict[str, Iterator[int]] = {op: count() for op in get_args(Op)}
    letters = ops(name, stage=stage, stages=stages, microbatches=microbatches, recompute=recompute)
    return tuple(Instruction(stage, op, next(numbers[op])) for op in letters)  # type: ignore[arg-type]


def ops(name: str, *, stage: int, stages: int, microbatches: int, recompute: bool = False) -> str:
    """One stage's order in letters: "FFBFBB". The n-th of each letter is that of micro-batch n."""
    _refuse_nonsense(name, stage=stage, stages=stages, microbatches=microbatches)
    ahead, lag = _ahead(name, stage, stages, microbatches), _lag(name, stage)
    order = _whole(microbatches, ahead=ahead) if lag is None else _split(microbatches, ahead=ahead, lag=lag)
    if recompute and recomputes(name, stage=stage, stages=stages, microbatches=microbatches):
        return order.replace("B", "RB").replace("I", "RI")
    return order


def recomputes(name: str, *, stage: int, stages: int, microbatches: int) -> bool:
    """Whether a stage that is told to recompute does: a backward right after its forward needs none."""
    return _ahead(name, stage, stages, microbatches) > 1


def limit(name: str, *, stage: int, stages: int, microbatches: int) -> int:
    """How many micro-batches the stage may hold between their forward and their backward."""
    _refuse_nonsense(name, stage=stage, stages=stages, microbatches=microbatches)
    to_the_end = stages - stage
    bounds = {
        "gpipe": microbatches,
        "1f1b": to_the_end,
        "zero-bubble": to_the_end,
        "zero-bubble-2x": 2 * to_the_end - 1,
        # Room to run ahead while a gradient is late. Played with links whose delays vary by one
        # forward (P=8, M=64; ideal 192): 1x 416, 1.5x 311, 2x+1 261, 3x 239, no bound 233; with
        # half that, 2x+1 is within 1% of 3x. The last stage never waits for a gradient.
        "varuna": 2 * to_the_end + 1 if to_the_end > 1 else 1,
    }
    return min(microbatches, bounds[name])


def held(name: str, *, stage: int, stages: int, microbatches: int) -> int:
    """How many micro-batches the stage may keep in memory: up to their weight part, where it comes later."""
    between = limit(name, stage=stage, stages=stages, microbatches=microbatches)
    return min(microbatches, between + (_lag(name, stage) or 0))


def half_done(name: str, *, stage: int, microbatches: int) -> int:
    """Of how many micro-batches the stage has done only the first part of the backward, at most."""
    lag = _lag(name, stage)
    return 0 if lag is None else min(microbatches, lag + 1)


def splits(name: str) -> bool:
    """Whether the backward is in two parts."""
    return _lag(name, 0) is not None


def opportunistic(name: str) -> bool:
    """Whether the order is a preference rather than a command.

    zero-bubble is not: within 1f1b's memory, a weight part run early fills a gap that the order has
    already a use for, and steady pipelines lose by it (P=4, M=8: 30 units instead of 27).
    """
    return name in OPPORTUNISTIC


def _ahead(name: str, stage: int, stages: int, microbatches: int) -> int:
    """How many forwards come before the first backward."""
    to_the_end = stages - stage
    bounds = {"gpipe": microbatches, "zero-bubble-2x": 2 * to_the_end - 1}
    return min(microbatches, bounds.get(name, to_the_end))


def _lag(name: str, stage: int) -> int | None:
    """By how many micro-batches the weight part comes later; None where the backward is in one part."""
    return {"zero-bubble": stage, "zero-bubble-2x": 2 * stage}.get(name)


def _whole(microbatches: int, *, ahead: int) -> str:
    return "F" * ahead + "BF" * (microbatches - ahead) + "B" * ahead


def _split(microbatches: int, *, ahead: int, lag: int) -> str:
    """ZB-H1 and ZB-H2 of "Zero Bubble Pipeline Parallelism" (Qi et al., 2023).

    H1: a stage puts off each weight part by as many micro-batches as there are stages before it: what
    1f1b saves there in waiting forwards. So `ahead + lag` never exceeds the number of stages.

    H2: enough forwards to work until the first gradient is back, 2(P - s) - 1 units after they begin;
    and enough weight parts put off, 2s, that the last gradient is back at stage 0 when it has nothing
    else to do. Every stage then works without a gap, and `ahead + lag` is 2P - 1 on all of them.
    """
    lag = min(lag, microbatches)
    last_forward_after = microbatches - ahead  # input parts; from then on no forward is left
    both = min(lag, last_forward_after)
    steady = "IWF" * (last_forward_after - lag) if lag < last_forward_after else "I" * (lag - both)
    rest = microbatches - max(lag, last_forward_after)
    return "F" * ahead + "IF" * both + steady + "IW" * rest + "W" * lag


def _refuse_nonsense(name: str, *, stage: int, stages: int, microbatches: int) -> None:
    if name not in NAMES:
        raise ScheduleError(f"there is no schedule {name!r} (choose one of {', '.join(NAMES)})")
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a schedule needs at least one stage and one micro-batch, found {stages} and {microbatches}"
        )
    if not 0 <= stage < stages:
        raise ScheduleError(f"stage {stage} is not among the stages 0..{stages - 1}")
