"""What the engine adds to its segments: told from steps of a model that computes nothing.

Steps of few and of many micro-batches differ by instructions alone; what is left without any is the step's.

In training the engine's own code finds the caches full of other things. So the steps here are taken
between others that compute; and what calling a segment takes is known from calls among segments that do.
"""

from __future__ import annotations

from collections.abc import Callable

from varuna.measure.stopwatch import Stopwatch, typical
from varuna.types import Overheads

FEW, MANY = 4, 68
STEPS, WARMUPS = 15, 2


def measure_overheads(
    step: Callable[[int], None],
    *,
    compute: Callable[[], None],
    slow_call_seconds: float,
    fast_call_seconds: float,
    stopwatch: Stopwatch,
    quantile: float,
) -> Overheads:
    """`step(n)` trains n micro-batches: a forward and a backward for each, by calls that are fast."""
    samples: dict[int, list[float]] = {FEW: [], MANY: []}
    for turn in range(WARMUPS + STEPS):
        for count, found in samples.items():
            compute()
            start = stopwatch.mark()
            step(count)
            stop = stopwatch.mark()
            stopwatch.settle()
            if turn >= WARMUPS:
                found.append(stopwatch.seconds(start, stop))
    few, many = typical(samples[FEW], quantile), typical(samples[MANY], quantile)
    each = max(0.0, (many - few) / (MANY - FEW))
    return Overheads(
        instruction_seconds=max(0.0, each / 2 + slow_call_seconds - fast_call_seconds),
        step_seconds=max(0.0, few - FEW * each),
    )
