"""Morphs in place on a GPU that the ranks share: over CUDA IPC, and over NCCL.

pytest -m gpu tests/gpu/test_hot.py
"""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_nccl import NCCL, over_nccl
from tests.pool import Pool
from tests.train.hot_jobs import Generation, run
from tests.train.test_hot import JOIN_AND_LEAVE, check

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
LOST = [
    Generation("0,1;2,3;", (0, 1, 2, 3)),
    Generation("0,1;2;", (0, 1, 2), lost=(3,)),
]
ON_CUDA = {"rtol": 1e-6, "atol": 1e-8}
"""Products in float64 add up in another order than on a CPU."""


def run_on_gpu(
    pool: Pool, folder: Path, generations: list[Generation], *, nccl: bool, **options: Any
) -> list[Any]:
    if not nccl:
        return run(pool, folder, "Plain", generations, device=DEVICE, **options)
    options |= {"device": DEVICE, "channel": "group"}
    found = run(pool, folder, "Plain", generations, through=over_nccl, **options)
    assert all(NCCL in backends for _, backends in found)
    return [result for result, _ in found]


@pytest.mark.parametrize("nccl", [False, True])
def test_planned_changes_on_a_gpu(pool: Pool, tmp_path: Path, nccl: bool) -> None:
    """HOT-1, HOT-2: ranks join and leave, and the losses are those of one process."""
    results = run_on_gpu(pool, tmp_path, JOIN_AND_LEAVE, nccl=nccl)
    check(results, JOIN_AND_LEAVE, "Plain", ON_CUDA)


@pytest.mark.parametrize("dies_in", ["fetch", "backward"])
def test_a_lost_rank_on_a_gpu_costs_no_step(pool: Pool, tmp_path: Path, dies_in: str) -> None:
    """HOT-3, HOT-4: survivors run the step again. tests/gpu/test_hot_jobs.py does it over NCCL."""
    results = run_on_gpu(pool, tmp_path, LOST, nccl=False, dies_in=dies_in)
    check(results, LOST, "Plain", ON_CUDA)
