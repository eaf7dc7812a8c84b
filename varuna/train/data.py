"""The samples of each replica: the same samples in the same order with any layout.

The global batch of a step depends only on (seed, step), and each replica takes its share. So a job that
continues with another number of replicas still sees every sample once per epoch.
"""

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch

from varuna.types import spread_evenly


class ReplicaOfJob(Protocol):
    """A wrapped model, as far as the order of samples needs it."""

    @property
    def iteration(self) -> int: ...
    @property
    def rank_within_stage(self) -> int: ...
    @property
    def data_depth(self) -> int: ...


class SampleOrder:
    """The order of the samples, and each replica's share of every step.

    `batches` returns a `batch_sampler` for a DataLoader. It yields one replica's indices step by step,
    from `first_step` on, endlessly or for `num_steps`.

        order = SampleOrder(len(dataset), batch_size=32, seed=1)
        order.replica(step=7, replica=0, num_replicas=3)      # indices of step 7
        loader = DataLoader(dataset, batch_sampler=order.batches(replica=0, num_replicas=3, first_step=7))

    Each epoch is shuffled by (seed, epoch). If the batch size does not divide the data, the last step of
    an epoch is smaller; `drop_last=True` skips it.
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
                f"drop_last leaves no step: batch_size {batch_size} is above the {self.num_samples} samples"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last
        self._epoch = -1
        self._order: list[int] = []

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which each sample is used once."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def step(self, step: int) -> Sequence[int]:
        """Return the indices of the global batch of a step."""
        if step < 0:
            raise ValueError(f"step must be 0 or more, not {step}")
        epoch, within = divmod(step, self.steps_per_epoch)
        first = within * self.batch_size
        return self._epoch_order(epoch)[first : first + self.batch_size]

    def replica(self, *, step: int, replica: int, num_replicas: int) -> Sequence[int]:
        """Return one replica's share, a contiguous part; shares differ by at most one sample."""
        if not 0 <= replica < num_replicas:
            raise ValueError(f"replica must be 0 to {num_replicas - 1}, not {replica}")
        batch = self.step(step)
        shares = spread_evenly(len(batch), parts=num_replicas)
        first = sum(shares[:replica])
        return batch[first : first + shares[replica]]

    def share(self, model: ReplicaOfJob) -> Sequence[int]:
        """Return the indices of this rank's share of the wrapped model's next step."""
        place = {"replica": model.rank_within_stage, "num_replicas": model.data_depth}
        return self.replica(step=model.iteration, **place)

    def batches(
        self, *, replica: int, num_replicas: int, first_step: int = 0, num_steps: int | None = None
    ) -> "ReplicaBatches":
        """Return a `batch_sampler` for a DataLoader, with the indices of one replica."""
        return ReplicaBatches(self, replica, num_replicas, first_step, num_steps)

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            if self.shuffle:
                generator = torch.Generator().manual_seed((self.seed * 0x9E3779B97F4A7C15 + epoch) % 2**63)
                self._order = torch.randperm(self.num_samples, generator=generator).tolist()
            else:
                self._order = list(range(self.num_samples))
            self._epoch = epoch
        return self._order


@dataclass
class ReplicaBatches:
    """A `batch_sampler` for a DataLoader: one replica's indices, step by step."""

    order: SampleOrder
    replica: int
    num_replicas: int
    first_step: int
    num_steps: int | None

    def __iter__(self) -> Iterator[Any]:
        steps = count(self.first_step)
        for step in steps if self.num_steps is None else islice(steps, self.num_steps):
            yield list(self.order.replica(step=step, replica=self.replica, num_replicas=self.num_replicas))
