"""Every rank of a group makes the same calls in the same order, on which NCCL depends and gloo does not."""

from typing import Any

import pytest
import torch

from tests.collectives import check_calls, record_calls
from tests.pool import Pool


@pytest.mark.parametrize(("depth", "width", "groups"), [(1, 2, 1), (2, 2, 5)])
def test_all_ranks_of_a_group_make_the_same_calls(pool: Pool, depth: int, width: int, groups: int) -> None:
    """V21: replicas, ties over stages, losses and the norm over all; two of everything at 2 × 2, and all."""
    options: dict[str, Any] = {"batch": 8, "chunk": 1, "clip": 1.0, "dtype": torch.float64}
    found = pool.run(record_calls, depth * width, "GPT", depth, width, **options)
    assert check_calls(found) == groups
