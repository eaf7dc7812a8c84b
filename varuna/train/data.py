"""Which samples a replica trains on: the same set, in the same order, whatever the layout.

A step's global batch is a function of (seed, step) alone; a replica takes its part of it. So a job
that goes on with another number of replicas sees every sample that it would have seen, once.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch

from varuna.types import spread_evenly


class SampleOrder:
    """The order of samples of a training run, and each replica's share of every step.

    Use it as a DataLoader's `batch_sampler`: it yields one replica's indices for one step at a time,
    from `first_step` on, for ever or for `num_steps`.

        order = SampleOrder(len(dataset), batch_size=32, seed=1)
        order.replica(step=7, replica=0, num_replicas=3)      # its indices of step 7
        loader = DataLoader(dataset, batch_sampler=order.batches(replica=0, num_replicas=3, first_step=7))

    Each epoch is a fresh shuffle from (seed, epoch). Where the batch does not divide the data, an
    epoch's last step is smaller (`drop_last=True`: left out).
    """

    def __init__(
        self,
        num_samples: int | Sized,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = num_samples if isinstance(num_samples, int) else len(num_samples)
        if self.num_samples < 1 or batch_size < 1:
            raise ValueError(
                f"num_samples and batch_size must be positive, not {self.num_samples} and {batch_size}"
            )
        if drop_last and batch_size > self.num_samples:
            raise ValueError(
                f"batch_size {batch_size} is above the {self.num_samples} samples: drop_last leaves no step"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._epoch = -1
        self._order: list[int] = []

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def step(self, step: int) -> Sequence[int]:
        """The whole global batch of a step."""
        if step < 0:
            raise ValueError(f"steps count from 0, not from {step}")
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.batch_size
        return self._epoch_order(epoch)[first : first + self.batch_size]

    def replica(self, *, step: int, replica: int, num_replicas: int) -> Sequence[int]:
        """One replica's share: a contiguous part, no share more than one sample larger than another."""
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica must be 0 to {num_replicas - 1}, not {replica}")
        batch = self.step(step)
        shares = spread_evenly(len(batch), parts=num_replicas)
        first = sum(shares[:replica])
        return batch[first : first + shares[replica]]

    def batches(
        self, *, replica: int, num_replicas: int, first_step: int = 0, num_steps: int | None = None
    ) -> "Batches":
        return Batches(self, replica, num_replicas, first_step, num_steps)

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
                self._order = torch.randperm(self.num_samples, generator=generator).tolist()
            else:
                self._order = list(range(self.num_samples))
            self._epoch = epoch
        return self._order


class Batches:
    """A DataLoader's `batch_sampler`: one replica's indices, step after step."""

    def __init__(
        self, order: SampleOrder, replica: int, num_replicas: int, first_step: int, num_steps: int | None
    ) -> None:
        self.order = order
        self.replica = replica
        self.num_replicas = num_replicas
        self.first_step = first_step
        self.num_steps = num_steps

    def __iter__(self) -> Iterator[Any]:
        step = self.first_step
        while self.num_steps is None or step < self.first_step + self.num_steps:
            yield list(self.order.replica(step=step, replica=self.replica, num_replicas=self.num_replicas))
            step += 1
