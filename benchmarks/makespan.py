"""The time that a step's own compute times allow: the schedule played with them, on links that take none.

Computing is simulated by sleeping, so that as many stages as asked for run at once on a machine with fewer
cores. What a step takes beyond the makespan is the engine's: looking for work, sending, waking up.
"""

import time
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from benchmarks.measure import Settings
from benchmarks.models import TINY
from benchmarks.sides import Ours
from varuna.schedule import build
from varuna.types import Instruction, Op

Durations = Mapping[Instruction, float]


def play(rows: Sequence[Sequence[Instruction]], durations: Durations) -> float:
    """When the last instruction ends, each starting as soon as its order and what it needs allow."""
    last = len(rows) - 1
    ends: dict[tuple[int, str, int], float] = {}
    clocks = [0.0] * len(rows)
    places = [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        for stage, row in enumerate(rows):
            while places[stage] < len(row):
                instruction = row[places[stage]]
                need = None
                if instruction.op == "F" and stage > 0:
                    need = (stage - 1, "F", instruction.microbatch)
                elif instruction.op in "BI" and stage < last:
                    need = (stage + 1, "B", instruction.microbatch)
                if need is not None and need not in ends:
                    break
                start = max(clocks[stage], ends[need] if need else 0.0)
                clocks[stage] = start + durations[instruction]
                kind = "B" if instruction.op == "I" else instruction.op
                ends[stage, kind, instruction.microbatch] = clocks[stage]
                places[stage] += 1
    return max(clocks)


def steps_and_makespans(
    depth: int, microbatches: int, seconds: Mapping[Op, float], settings: Settings
) -> list[tuple[float, float]]:
    """(seconds of a step, seconds that its compute times allow) for each repeat, on every rank."""
    side = Ours(
        TINY, depth=depth, microbatches=microbatches, compute_delay=lambda op, microbatch: seconds[op]
    )
    rows = build(side.model.plan.schedule, stages=depth, microbatches=microbatches).rows
    for _ in range(settings.warmup_steps):
        side.step()
    found = []
    for _ in range(settings.repeats):
        dist.barrier()
        started = time.perf_counter()
        side.step()
        step = time.perf_counter() - started
        durations = {
            Instruction(i.stage, i.what, i.microbatch): i.stop_seconds - i.start_seconds  # type: ignore[arg-type]
            for i in side.model.timeline().intervals
            if i.microbatch >= 0
        }
        found.append((step, play(rows, durations)))
    side.close()
    return found
