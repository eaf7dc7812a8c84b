"""Times what replicas do together: all-reduces, and the sharing of what each of them has updated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from varuna.measure.stopwatch import Effort, Stopwatch, duration
from varuna.types import Duration, ReduceCost

SMALL_BYTES = 64
"""What is reduced besides gradients: a loss, a norm."""
TENSORS_OF_A_SHARE = 4
REDUCE_EFFORT = Effort(seconds=0.15, fewest=5, most=40, warmups=2)

AllReduce = Callable[[Tensor], None]
"""Sums a tensor over the group, in place, and returns when it is there."""
Share = Callable[[Sequence[Sequence[Tensor]]], None]
"""Gives all ranks the tensors of each, by owner."""


def group_sizes(most: int) -> list[int]:
    """2, 4, 8, … and the whole."""
    powers = [1 << power for power in range(1, most.bit_length()) if 1 << power < most]
    return [*powers, most] if most > 1 else []


def measure_reductions(
    all_reduce: AllReduce,
    share: Share | None,
    *,
    group_size: int,
    between_machines: bool,
    device: torch.device,
    stopwatch: Stopwatch,
    sizes: Sequence[int],
    effort: Effort = REDUCE_EFFORT,
) -> list[ReduceCost]:
    """Called by every rank of the group; each gets its own numbers. `share`: None, where nobody shares."""

    def measure(run: Callable[[], None]) -> Duration:
        def once() -> float:
            all_reduce(torch.zeros(1, device=device))  # all begin together
            stopwatch.settle()
            start = time.perf_counter()
            run()
            stopwatch.settle()
            return time.perf_counter() - start

        seconds = [once() for _ in range(effort.warmups)]
        # The ranks agree on a number of runs: the mean of what each of them finds right.
        wanted = torch.tensor([float(effort.runs(min(seconds)))], device=device)
        all_reduce(wanted)
        return duration([once() for _ in range(max(1, round(wanted.item() / group_size)))])

    costs = []
    for size in (SMALL_BYTES, *sizes):
        payload = torch.zeros(size // 4, device=device)
        # Several tensors each, as layers have them.
        owned = [part.chunk(TENSORS_OF_A_SHARE) for part in payload.tensor_split(group_size)]
        reduced = measure(partial(all_reduce, payload))
        shared = None if share is None else measure(partial(share, owned))
        costs.append(ReduceCost(group_size, size, between_machines, reduced, shared))
    return costs
