"""Data order does not depend on the layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from varuna import SampleOrder


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 17),
    seed=st.integers(0, 2**62),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_changing_the_number_of_replicas_changes_neither_order_nor_set(
    samples: int, batch: int, seed: int, widths: list[int]
) -> None:
    """B2: whatever the widths of successive steps, their shares joined are the global batches."""
    order = SampleOrder(samples, batch_size=batch, seed=seed)
    whole = SampleOrder(samples, batch_size=batch, seed=seed)
    for step, width in enumerate(widths):
        shares = [order.replica(step=step, replica=r, num_replicas=width) for r in range(width)]
        assert [index for share in shares for index in share] == list(whole.step(step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(samples=st.integers(1, 60), batch=st.integers(1, 17), drop_last=st.booleans())
def test_an_epoch_sees_every_sample_once(samples: int, batch: int, drop_last: bool) -> None:
    """B2: but for the last few where they are dropped."""
    if drop_last and batch > samples:
        return
    order = SampleOrder(samples, batch_size=batch, seed=3, drop_last=drop_last)
    for epoch in (0, 1):
        first = epoch * order.steps_per_epoch
        seen = [i for step in range(first, first + order.steps_per_epoch) for i in order.step(step)]
        assert len(seen) == len(set(seen)) == (samples // batch * batch if drop_last else samples)


def test_epochs_and_seeds_shuffle_differently() -> None:
    orders = [SampleOrder(40, batch_size=40, seed=seed).step(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    plain = SampleOrder(40, batch_size=8, shuffle=False)
    assert list(plain.step(1)) == list(range(8, 16))


def test_a_loader_resumes_where_it_stopped_with_other_replicas() -> None:
    """B2: two replicas, then three from step 2 on."""
    data = TensorDataset(torch.arange(24))
    order = SampleOrder(data, batch_size=6, seed=5)

    def load(replica: int, width: int, first: int) -> list[list[int]]:
        batches = order.batches(replica=replica, num_replicas=width, first_step=first, num_steps=2)
        return [batch.tolist() for (batch,) in DataLoader(data, batch_sampler=batches)]

    early = [load(replica, 2, 0) for replica in range(2)]
    late = [load(replica, 3, 2) for replica in range(3)]
    seen = [i for part in (early, late) for step in zip(*part, strict=True) for share in step for i in share]
    assert seen == [i for step in range(4) for i in order.step(step)]


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        SampleOrder(0, batch_size=4)
    with pytest.raises(ValueError, match="drop_last leaves no step"):
        SampleOrder(3, batch_size=4, drop_last=True)
    with pytest.raises(ValueError, match="replica must be 0 to 1"):
        SampleOrder(8, batch_size=4).replica(step=0, replica=2, num_replicas=2)
    with pytest.raises(ValueError, match="0 or more"):
        SampleOrder(8, batch_size=4).step(-1)
