"""Plays rows in their strict order with unit times, to find start times and deadlocks.

Links are FIFO, take no time and never fill up. What can run then depends on the rows alone, not on
the times. One pass therefore gives both the starts and, if the rows deadlock, the waiting stages.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from varuna.types import Instruction

UNITS = {"F": 1, "R": 1, "B": 2, "I": 1, "W": 1}


class PlayedRows(NamedTuple):
    starts: list[list[int]]  # per stage, one for each instruction that ran
    stuck: dict[int, Instruction]  # stages that never finish, with the instruction each waits at


def play(rows: Sequence[Sequence[Instruction]]) -> PlayedRows:
    last = len(rows) - 1
    starts: list[list[int]] = [[] for _ in rows]
    clocks = [0] * len(rows)
    activations: list[list[int]] = [[] for _ in rows]  # arrival time of each
    gradients: list[list[int]] = [[] for _ in rows]

    # A stage runs until it must wait, then wakes the stages beside it. A stage is visited only after
    # one beside it has moved, so the time is linear in the number of instructions.
    awake = deque(range(len(rows)))
    while awake:
        stage = awake.popleft()
        row, started, clock = rows[stage], starts[stage], clocks[stage]
        before = len(started)
        for position in range(before, len(row)):
            instruction = row[position]
            op, microbatch = instruction.op, instruction.microbatch
            if op == "F" and stage > 0:
                arrivals = activations[stage]
            elif op in "BI" and stage < last:
                arrivals = gradients[stage]
            else:
                arrivals = None
            if arrivals is not None:
                if microbatch >= len(arrivals):
                    break
                clock = max(clock, arrivals[microbatch])
            started.append(clock)
            clock += UNITS[op]
            if op == "F" and stage < last:
                activations[stage + 1].append(clock)
            elif op in "BI" and stage > 0:
                gradients[stage - 1].append(clock)
        clocks[stage] = clock
        if len(started) > before:
            awake.extend(s for s in (stage - 1, stage + 1) if 0 <= s <= last and s not in awake)

    stuck = {
        stage: row[len(started)]
        for stage, (row, started) in enumerate(zip(rows, starts, strict=True))
        if len(started) < len(row)
    }
    return PlayedRows(starts, stuck)
