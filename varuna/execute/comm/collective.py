"""Collectives of Python values over a group of ranks: gather, broadcast, and agree on errors."""

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.comm.wait import Waiter

T = TypeVar("T")


class RankFailure(NamedTuple):
    """An exception of one rank, as the other ranks see it."""

    rank: int
    kind: str  # name of the exception's class
    message: str


MakeError = Callable[[Sequence[RankFailure], Exception | None], Exception]
"""Makes the error to raise from all failures and this rank's own exception, if it has one."""


@dataclass
class Collective:
    """A group of ranks that all make the same calls in the same order.

    Without a `group` the rank is alone. Without a `waiter` a call blocks until the group's own timeout.
    """

    rank: int
    ranks: Sequence[int]  # of the group, ascending; results are in this order
    group: dist.ProcessGroup | None = None
    waiter: Waiter | None = None

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of `ranks`."""
        if self.group is None:
            return [value]
        data = _pickled(value)
        sizes = [int(size) for (size,) in self.gather_numbers([len(data)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        parts = [torch.empty_like(padded) for _ in sizes]
        self._wait(dist.all_gather(parts, padded, group=self.group, async_op=True))
        return [pickle.loads(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, equally many each. One small message, so cheaper than `gather`."""
        if self.group is None:
            return [list(numbers)]
        own = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        self._wait(dist.all_gather(parts, own, group=self.group, async_op=True))
        return [part.tolist() for part in parts]

    def broadcast(self, value: T, source: int) -> T:
        """Return the value of rank `source` on every rank."""
        if self.group is None:
            return value
        data = _pickled(value)
        size = int(self.gather_numbers([len(data)])[self.ranks.index(source)][0])
        if self.rank != source:
            data = torch.empty(size, dtype=torch.uint8)
        self._wait(dist.broadcast(data, source, group=self.group, async_op=True))
        found: T = value if self.rank == source else pickle.loads(data.numpy().tobytes())
        return found

    def agree(self, action: Callable[[], T], error: MakeError) -> list[T]:
        """Run the action on every rank and return all results.

        If it fails on any rank, every rank raises `error(failures, own_exception)`.
        """
        value: T | None = None
        own: Exception | None = None
        try:
            value = action()
        except Exception as raised:
            own = raised
        failure = None if own is None else RankFailure(self.rank, type(own).__name__, str(own))
        outcomes = self.gather((value, failure))
        failures = [failed for _, failed in outcomes if failed is not None]
        if failures:
            problem = error(failures, own)
            if problem is own:
                raise problem
            raise problem from own
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def patient(self, factor: float) -> AbstractContextManager[None]:
        """Multiply timeouts by `factor` inside the block. For long work, such as compiling or saving."""
        return nullcontext() if self.waiter is None else self.waiter.patient(factor)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None
        if self.waiter is None:
            work.wait()
        else:
            self.waiter.for_work(work, lambda: "a collective call of all ranks")


def _pickled(value: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
