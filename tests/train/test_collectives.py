"""Every rank of a group makes the same calls in the same order, on which NCCL depends and gloo does not."""

from typing import Any

import pytest
import torch

from tests.collectives import check_calls, record_calls
from tests.pool import Pool
from tests.tasks import compare, train, train_plainly


@pytest.mark.parametrize(("depth", "width", "groups"), [(1, 2, 1), (2, 2, 5)])
def test_all_ranks_of_a_group_make_the_same_calls(pool: Pool, depth: int, width: int, groups: int) -> None:
    """V21: replicas, ties over stages, losses and the norm over all; two of everything at 2 × 2, and all."""
    options: dict[str, Any] = {"batch": 8, "chunk": 1, "clip": 1.0, "dtype": torch.float64}
    found = pool.run(record_calls, depth * width, "GPT", depth, width, **options)
    assert check_calls(found) == groups


def test_both_ends_of_a_lane_make_the_same_calls(pool: Pool) -> None:
    """V21: lanes between stages as NCCL's, carried by gloo here, beside all groups; and results hold."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    options: dict[str, Any] = {"chunk": 1, "schedule": "zero-bubble", "channel": "group", **shared}
    assert check_calls(pool.run(record_calls, 4, "GPT", 2, 2, evaluate_between=True, **options)) == 5 + 4
    found = pool.run(train, 4, "GPT", 4, 1, **options)[0]
    compare(found, train_plainly("GPT", **shared), rtol=1e-9, atol=1e-11)
