"""Sums losses and weights over all ranks, and lets any rank request attention in the same message.

A request (for example SIGUSR1: save a checkpoint) must reach all ranks in the same step, so it travels with
the sum. On the wire it is an infinite weight, and in that rare step all ranks sum once more. A third number
would be simpler but costs gloo one more message per step and hop: for 2 ranks on one machine the sum took
213 µs instead of 149 µs, for 4 ranks 718 µs instead of 461 µs.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from varuna.execute.comm.wait import Waiter

REQUEST_WEIGHT = float("inf")


class LossTotals(NamedTuple):
    """Sums over all ranks."""

    loss: float  # of weight × loss
    weight: float
    requested: bool  # some rank has a request


class LossSum:
    """A sum in progress. Starts when it is made; `finish` returns the totals."""

    def __init__(
        self,
        loss: float,
        weight: float,
        *,
        request: bool,
        group: dist.ProcessGroup | None,
        waiter: Waiter | None,
    ) -> None:
        self._own = loss, weight
        self._group = group
        self._waiter = waiter
        self._start(loss, REQUEST_WEIGHT if request else weight)

    @property
    def work(self) -> dist.Work | None:
        return self._work

    def finish(self) -> LossTotals:
        loss, weight = self._wait()
        if weight != REQUEST_WEIGHT:
            return LossTotals(loss, weight, requested=False)
        self._start(*self._own)
        return LossTotals(*self._wait(), requested=True)

    def _start(self, loss: float, weight: float) -> None:
        self._totals = torch.tensor([loss, weight], dtype=torch.float64)
        self._work = (
            None if self._group is None else dist.all_reduce(self._totals, group=self._group, async_op=True)
        )

    def _wait(self) -> tuple[float, float]:
        if self._work is not None:
            assert self._waiter is not None
            self._waiter.for_work(self._work, lambda: "the sum of losses over all ranks")
        loss, weight = self._totals.tolist()
        return loss, weight
