"""The same guarantees on CUDA. Several stages share the one GPU as processes; runs on any CUDA machine:

pytest -m gpu tests/gpu
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.tasks import compare, train, train_plainly
from varuna.schedule import NAMES

pytestmark = pytest.mark.gpu

F64 = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()


@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 3), (2, 1, 2), (4, 1, 1), (1, 2, 2), (2, 2, 3)])
@pytest.mark.parametrize("name", ["Plain", "GPT", "Odd", "Reused"])
def test_a_step_on_cuda_equals_one_process(pool: Pool, name: str, depth: int, width: int, chunk: int) -> None:
    """V21, V10, V11: against the plain model on the CPU, in float64."""
    if name in ("Odd", "Reused") and depth > 3:
        depth = 3
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    found = pool.run(train, depth * width, name, depth, width, chunk=chunk, device="cuda:0", **shared)[0]
    compare(found, train_plainly(name, **shared), **F64)


@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule_on_cuda(pool: Pool, schedule: str) -> None:
    """V19, V21: with recompute on one stage."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    options: dict[str, Any] = {"schedule": schedule, "recompute": [True, False], "chunk": 1}
    found = pool.run(train, 2, "GPT", 2, 1, device="cuda:0", **options, **shared)[0]
    compare(found, train_plainly("GPT", **shared), **F64)


def test_batchnorm_on_cuda(pool: Pool) -> None:
    """V17, V21."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "dtype": torch.float64, "evaluate_between": True}
    found = pool.run(train, 4, "Conv", 2, 2, device="cuda:0", recompute=True, **shared)[0]
    compare(found, train_plainly("Conv", **shared), rtol=1e-8, atol=1e-10)


def test_dropout_on_cuda_does_not_depend_on_the_layout(pool: Pool) -> None:
    """V16, V21: CUDA draws other masks than the CPU, but the same at every layout."""
    results = [
        pool.run(
            train,
            depth * width,
            "GPT",
            depth,
            width,
            batch=6,
            chunk=chunk,
            device="cuda:0",
            dtype=torch.float64,
            model_options={"dropout": 0.3},
        )[0]
        for depth, width, chunk in [(1, 1, 6), (2, 1, 2), (1, 2, 3), (2, 2, 1)]
    ]
    for found in results[1:]:
        compare(found, results[0], **F64)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_on_cuda_does_not_depend_on_the_cut(pool: Pool, precision: str) -> None:
    """V14, V21."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "device": "cuda:0", "precision": precision, "steps": 4}
    whole = pool.run(train, 1, "GPT", 1, 1, **shared)[0]
    for depth in (2, 4):
        found = pool.run(train, depth, "GPT", depth, 1, **shared)[0]
        torch.testing.assert_close(found["losses"], whole["losses"], rtol=1e-4, atol=0)
    fp32 = train_plainly("GPT", batch=8, steps=4)
    torch.testing.assert_close(whole["losses"], fp32["losses"], rtol=3e-2, atol=0)
