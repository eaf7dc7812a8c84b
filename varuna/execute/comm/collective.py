"""Collectives of Python values over a group of ranks: gather, broadcast, and agree on errors.

Every value has a type, with which all ranks decode it (`values.py`). A message that is not of this type is an
error that names the rank.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.errors import WorkerError
from varuna.execute.comm.groups import waiting_in_gloo
from varuna.execute.comm.values import decode, encode, printable
from varuna.execute.comm.wait import Waiter
from varuna.execute.shared_counters import SharedCounters

T = TypeVar("T")

FIRST_BYTES = 2048
"""Bytes of each rank in the first message of a gather. Most values need no second message."""
MAX_BYTES = 2**42
"""Limit for the value of one rank: a wrong length must not allocate all memory."""
LENGTH_BYTES = 8


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
    counters: SharedCounters | None = field(default=None, init=False)  # for barriers; None: messages
    _in_barrier: bool = field(default=False, init=False)  # this rank has begun one, and not ended it
    _barrier: dist.Work | None = field(default=None, init=False)

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return the values of all ranks, in the order of `ranks`. `kind` is their type."""
        if self.group is None:
            return [value]
        messages = self._gather_bytes(encode(value))
        return [self._decoded(data, kind, rank) for data, rank in zip(messages, self.ranks, strict=True)]

    def _gather_bytes(self, data: Tensor) -> list[Tensor]:
        first = torch.zeros(FIRST_BYTES, dtype=torch.uint8)
        first[:LENGTH_BYTES].view(torch.int64)[0] = len(data)
        first[LENGTH_BYTES:][: len(data)] = data[: FIRST_BYTES - LENGTH_BYTES]
        starts = self._all_gather(first)
        sizes = [int(start[:LENGTH_BYTES].view(torch.int64)) for start in starts]
        for size, rank in zip(sizes, self.ranks, strict=True):
            _check_size(size, rank)
        starts = [start[LENGTH_BYTES:][:size] for start, size in zip(starts, sizes, strict=True)]
        if max(sizes) <= FIRST_BYTES - LENGTH_BYTES:
            return starts
        padded = data
        if len(data) < max(sizes):
            padded = torch.zeros(max(sizes), dtype=torch.uint8)
            padded[: len(data)] = data
        return [part[:size] for part, size in zip(self._all_gather(padded), sizes, strict=True)]

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        assert self.group is not None
        self.check_no_barrier()
        parts = [torch.empty_like(own) for _ in range(self.group.size())]
        self._wait(dist.all_gather(parts, own, group=self.group, async_op=True))
        return parts

    def _decoded(self, data: Tensor, kind: Any, rank: int) -> Any:
        try:
            return decode(data, kind, f"the message of rank {rank}")
        except ValueError as error:
            raise WorkerError(
                f"{error} (run the same version of varuna and of the script on all ranks; otherwise rank "
                f"{rank} is not a process of this job)"
            ) from None

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, equally many each. The cheapest gather."""
        if self.group is None:
            return [list(numbers)]
        return [part.tolist() for part in self._all_gather(torch.tensor(numbers, dtype=torch.float64))]

    def start_barrier(self) -> None:
        """Tell all ranks that this one is here. No other call may come before `finish_barrier`."""
        self.check_no_barrier()
        self._in_barrier = True
        if self.counters is not None:
            self.counters.advance()
        elif self.group is not None:
            self._barrier = self.group.barrier()

    def finish_barrier(self) -> None:
        """Wait until all ranks are here."""
        assert self._in_barrier, "finish_barrier before start_barrier"
        if self.counters is not None:
            assert self.waiter is not None, "ranks that share counters have a waiter"
            self.waiter.for_memory(self.counters.all_here, lambda: "a barrier of all ranks")
        elif self._barrier is not None:
            self._wait(self._barrier)
        self._barrier, self._in_barrier = None, False

    def check_no_barrier(self) -> None:
        """Check that this rank is not between `start_barrier` and `finish_barrier`.

        Ranks begin a barrier at different moments, so another call could meet it on some of them.
        """
        assert not self._in_barrier, "a collective call of all ranks began before the last barrier had ended"

    def broadcast(self, value: T, source: int, kind: Any) -> T:
        """Return the value of rank `source` on every rank. `kind` is its type."""
        if self.group is None:
            return value
        data = encode(value) if self.rank == source else None
        sizes = self.gather_numbers([0 if data is None else len(data)])
        size = _check_size(sizes[self.ranks.index(source)][0], source)
        if data is None:
            data = torch.empty(size, dtype=torch.uint8)
        self._wait(dist.broadcast(data, source, group=self.group, async_op=True))
        found: T = self._decoded(data, kind, source)
        return found

    def agree(self, action: Callable[[], T], error: MakeError, kind: Any) -> list[T]:
        """Run the action on every rank and return all results. `kind` is their type.

        If it fails on any rank, every rank raises `error(failures, own_exception)`.
        """
        value: T | None = None
        own: Exception | None = None
        try:
            value = action()
        except Exception as raised:
            own = raised
        failure = None if own is None else RankFailure(self.rank, type(own).__name__, printable(str(own)))
        outcomes = self.gather((value, failure), tuple[Optional[kind], Optional[RankFailure]])  # noqa: UP045
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
            with waiting_in_gloo():
                work.wait()
        else:
            self.waiter.for_work(work, lambda: "a collective call of all ranks")


def _check_size(size: float, rank: int) -> int:
    if not (0 <= size <= MAX_BYTES and size == int(size)):
        raise WorkerError(
            f"rank {rank} announced a message of {size} bytes (run the same version of varuna on all ranks; "
            f"otherwise rank {rank} is not a process of this job)"
        )
    return int(size)
