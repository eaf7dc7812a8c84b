"""CUDA graphs: recorded stages train like unrecorded ones."""

from typing import Any

import pytest
import torch

from tests.execute.recorded_calls import train_replayed
from tests.gpu.tasks import count_tokens, run_unrecordable, step_without_waiting
from tests.pool import Pool
from tests.tasks import compare, train, train_plainly

pytestmark = pytest.mark.gpu

F64 = {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize(("depth", "width", "chunk"), [(1, 1, 3), (2, 1, 1), (2, 2, 3)])
@pytest.mark.parametrize("name", ["GPT", "Odd"])
def test_replayed_stages_on_cuda_train_as_one_process(
    pool: Pool, name: str, depth: int, width: int, chunk: int
) -> None:
    """V10, V21: against the plain model on the CPU, in float64, a smaller last micro-batch among them."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64}
    options: dict[str, Any] = {"device": "cuda:0", "recompute": False, "chunk": chunk, **shared}
    found, num_recorded = pool.run(train_replayed, depth * width, name, depth, width, **options)[0]
    compare(found, train_plainly(name, **shared), **F64)
    assert num_recorded > 0


def test_buffers_that_a_replayed_forward_changes_on_cuda(pool: Pool) -> None:
    """V17, V21."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "dtype": torch.float64, "evaluate_between": True}
    found, num_recorded = pool.run(
        train_replayed, 2, "Conv", 2, 1, device="cuda:0", recompute=False, **shared
    )[0]
    compare(found, train_plainly("Conv", **shared), rtol=1e-8, atol=1e-10)
    assert num_recorded > 0


@pytest.mark.parametrize("schedule", ["varuna", "gpipe", "zero-bubble"])
def test_replayed_under_other_schedules_on_cuda(pool: Pool, schedule: str) -> None:
    """V19, V21: and gradients of two steps add up."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64, "accumulate": 2, "steps": 4}
    options: dict[str, Any] = {"device": "cuda:0", "recompute": False, "chunk": 1, "schedule": schedule}
    found, num_recorded = pool.run(train_replayed, 2, "GPT", 2, 1, **options, **shared)[0]
    compare(found, train_plainly("GPT", **shared), **F64)
    assert num_recorded > 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_replayed_in_low_precision(pool: Pool, precision: str) -> None:
    """V14, V21."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "device": "cuda:0", "precision": precision, "steps": 4}
    usual = pool.run(train, 1, "GPT", 1, 1, **shared)[0]
    found, num_recorded = pool.run(train_replayed, 1, "GPT", 1, 1, **shared)[0]
    torch.testing.assert_close(found["losses"], usual["losses"], rtol=1e-4, atol=0)
    assert num_recorded == 1


@pytest.mark.timeout(300)
def test_compiled_and_replayed(pool: Pool) -> None:
    """V10, V21."""
    shared: dict[str, Any] = {"batch": 6, "dtype": torch.float64, "model_options": {"layers": 4}}
    compiled: dict[str, Any] = {"compile": True, "timeout_seconds": 200, "timeout": 250, "recompute": False}
    options: dict[str, Any] = {"chunk": 2, "device": "cuda:0", **compiled, **shared}
    found, num_recorded = pool.run(train_replayed, 2, "GPT", 2, 1, **options)[0]
    compare(found, train_plainly("GPT", **shared), **F64)
    assert num_recorded > 0


def test_a_replayed_step_waits_for_the_device_once_for_its_loss(pool: Pool) -> None:
    usual = pool.run(step_without_waiting, 1, "fp16", count_tokens)[0]
    found = pool.run(step_without_waiting, 1, "fp16", count_tokens, cuda_graphs=True)[0]
    torch.testing.assert_close(found, usual, rtol=1e-4, atol=0)


def test_what_waits_for_the_device_runs_unrecorded(pool: Pool) -> None:
    """V21: with a warning, and later steps work."""
    usual, none = pool.run(run_unrecordable, 1, False)[0]
    found, warnings = pool.run(run_unrecordable, 1, True)[0]
    assert found == usual and not none
    assert len(warnings) == 1 and "run without CUDA graphs" in warnings[0]
