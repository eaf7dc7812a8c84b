"""Engine overhead per instruction and per step, measured with a model that computes nothing.

Steps of few and of many micro-batches differ only in their number of instructions; the rest is the
overhead of a step. In training, the caches hold other data when engine code runs. So each empty step here
follows a computation, and the cost of calling a segment comes from calls among segments that compute.
"""

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
    """Measure `step(n)`, which trains n empty micro-batches: one forward and one backward each.

    The calls in these steps are fast, because the caches are warm: the result is corrected by
    `slow_call_seconds - fast_call_seconds`.
    """
    samples: dict[int, list[float]] = {FEW: [], MANY: []}
    for turn in range(WARMUPS + STEPS):
        for count, seconds in samples.items():
            compute()
            start = stopwatch.mark()
            step(count)
            stop = stopwatch.mark()
            stopwatch.synchronize()
            if turn >= WARMUPS:
                seconds.append(stopwatch.seconds(start, stop))
    few, many = typical(samples[FEW], quantile), typical(samples[MANY], quantile)
    per_microbatch = max(0.0, (many - few) / (MANY - FEW))
    return Overheads(
        instruction_seconds=max(0.0, per_microbatch / 2 + slow_call_seconds - fast_call_seconds),
        step_seconds=max(0.0, few - FEW * per_microbatch),
    )
