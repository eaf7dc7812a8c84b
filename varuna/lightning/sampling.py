"""Deals the samples of a DataLoader to all ranks, in the DataLoader's own order.

A step's samples are those of one process with as many samples per batch as all ranks together. Lightning's
DistributedSampler would always shuffle the training data, in another order than one process, and repeat
samples so that all ranks have equally many.
"""

import logging
from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from varuna.types import spread_evenly

log = logging.getLogger("varuna")


class DealtSampler(Sampler[int]):
    """Yields this rank's part of each global batch; the first rank's order counts."""

    def __init__(
        self, sampler: Any, *, batch_size: int, drop_last: bool, rank: int, world: int, device: torch.device
    ) -> None:
        self.sampler = sampler
        self._batch_size, self._drop_last = batch_size, drop_last
        self._rank, self._world, self._device = rank, world, device

    def __iter__(self) -> Iterator[int]:
        order = torch.tensor(list(self.sampler), dtype=torch.int64, device=self._device)
        dist.broadcast(order, 0)
        whole = self._batch_size * self._world
        for first in range(0, len(order), whole):
            batch = order[first : first + whole]
            if len(batch) < whole and self._drop_last:
                return
            if len(batch) < self._world:
                if self._rank == 0:
                    log.warning(
                        "the last batch has %d samples for %d ranks, so the others repeat one (the "
                        "DataLoader's drop_last=True leaves it out)",
                        len(batch),
                        self._world,
                    )
                batch = torch.cat([batch, batch[-1:].repeat(self._world - len(batch))])
            shares = spread_evenly(len(batch), parts=self._world)
            start = sum(shares[: self._rank])
            yield from batch[start : start + shares[self._rank]].tolist()

    def __len__(self) -> int:
        whole, tail = divmod(len(self.sampler), self._batch_size * self._world)
        if self._drop_last or not tail:
            return whole * self._batch_size
        return whole * self._batch_size + spread_evenly(max(tail, self._world), parts=self._world)[self._rank]

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def can_be_dealt(loader: object) -> bool:
    """Return whether a loader has samples by index that are not dealt to ranks yet."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    if isinstance(loader.sampler, DistributedSampler):
        return False
    if loader.batch_size is None or not isinstance(loader.sampler, Sized):
        made = type(loader.batch_sampler or loader.sampler).__name__
        raise ValueError(
            f"the DataLoader makes its own batches ({made}), which would be the same on every rank (pass "
            "batch_size and a sampler with a length instead; or deal the batches to ranks yourself, and pass "
            "use_distributed_sampler=False to the Trainer)"
        )
    return True
