"""Timing of what replicas do together: all-reduces, and sharing updated weights."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from varuna.measure.stopwatch import Effort, Stopwatch, typical_duration
from varuna.types import Duration, ReduceCost

SMALL_BYTES = 64
"""Size of the reductions besides gradients: a loss, a norm."""
TENSORS_PER_OWNER = 4
REDUCE_EFFORT = Effort(seconds=0.15, fewest=5, most=40, warmups=2)

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the group in place, and returns when the sum is there."""
ShareTensors = Callable[[Sequence[Sequence[Tensor]]], None]
"""Sends the tensors of each owner to all ranks."""


def group_sizes(most: int) -> list[int]:
    """Return the group sizes to measure: 2, 4, 8, ... and the whole group."""
    powers = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    return [*powers, most] if most > 1 else []


def measure_reductions(
    all_reduce: AllReduce,
    share: ShareTensors | None,
    *,
    group_size: int,
    between_machines: bool,
    device: torch.device,
    stopwatch: Stopwatch,
    sizes: Sequence[int],
    effort: Effort = REDUCE_EFFORT,
) -> list[ReduceCost]:
    """Measure reductions of these bytes on every rank of the group; `share=None`: only all-reduces."""

    def measure(run: Callable[[], None]) -> Duration:
        def run_once() -> float:
            all_reduce(torch.zeros(1, device=device))  # all ranks start together
            stopwatch.synchronize()
            start = time.perf_counter()
            run()
            stopwatch.synchronize()
            return time.perf_counter() - start

        seconds = [run_once() for _ in range(effort.warmups)]
        # All ranks must do the same number of runs: the mean of what each proposes.
        proposed = torch.tensor([float(effort.runs(min(seconds)))], device=device)
        all_reduce(proposed)
        return typical_duration([run_once() for _ in range(max(1, round(proposed.item() / group_size)))])

    costs = []
    for size in (SMALL_BYTES, *sizes):
        payload = torch.zeros(size // 4, device=device)
        # Each owner has several tensors, as layers do.
        owned = [part.chunk(TENSORS_PER_OWNER) for part in payload.tensor_split(group_size)]
        reduced = measure(partial(all_reduce, payload))
        shared = None if share is None else measure(partial(share, owned))
        costs.append(ReduceCost(group_size, size, between_machines, reduced, shared))
    return costs
