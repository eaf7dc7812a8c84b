"""The same guarantees on CUDA. Several stages share the one GPU as processes; runs on any CUDA machine:

pytest -m gpu tests/gpu
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.legs import train_in_one_go, train_leg
from tests.gpu.tasks import train_biased, train_recurrent
from tests.pool import Pool
from tests.tasks import compare, train, train_plainly
from varuna.schedule import NAMES

pytestmark = pytest.mark.gpu

F64 = {"rtol": 1e-9, "atol": 1e-11}


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


@pytest.mark.parametrize(("precision", "close"), [("fp32", 1e-5), ("bf16", 2e-3)])
def test_dropout_in_fused_attention_does_not_depend_on_the_layout(
    pool: Pool, precision: str, close: float
) -> None:
    """V16, EXA-7: torch chooses a kernel by strides, and each kernel draws another mask."""
    whole = pool.run(train_biased, 1, 1, precision, False)[0]
    for recompute in (False, True):
        found = pool.run(train_biased, 2, 2, precision, recompute)[0]
        torch.testing.assert_close(found, whole, rtol=close, atol=0)


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


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_recurrent_modules_on_cuda_are_cut(pool: Pool, precision: str) -> None:
    """V14: under autocast cuDNN returns fp16, in bf16 too."""
    whole = pool.run(train_recurrent, 1, 1, precision)[0]
    assert pool.run(train_recurrent, 3, 3, precision)[0] == pytest.approx(whole, rel=1e-4)


def test_a_checkpoint_moves_between_cuda_and_cpu_and_between_layouts(pool: Pool, tmp_path: Path) -> None:
    """V36, V21: saved from the GPU in the background, on the CPU now, and back again, sharded."""
    legs: list[dict[str, Any]] = [
        {"depth": 2, "width": 1, "chunk": 2, "device": "cuda:0", "save": {"tempdir": "memory"}},
        {"depth": 1, "width": 2, "chunk": 3, "device": "cpu"},
        {"depth": 2, "width": 2, "chunk": 1, "device": "cuda:0", "shard_optimizer": True},
    ]
    losses: list[float] = []
    for number, leg in enumerate(legs):
        bounds = {"first": 2 * number, "stop": 2 * number + 2, "store": str(tmp_path)}
        found = pool.run(train_leg, leg["depth"] * leg["width"], "GPT", **leg, **bounds)[0]
        losses += found["losses"]
    expected = train_in_one_go("GPT")
    torch.testing.assert_close(losses, expected["losses"], rtol=1e-9, atol=0)
    state = {name: tensor.cpu() for name, tensor in found["state"].items()}
    torch.testing.assert_close(state, dict(expected["state"]), rtol=1e-7, atol=1e-10)


def test_dropout_on_cuda_goes_on_from_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    """V16, V36: in fp16 too, bit for bit at the same layout."""
    common: dict[str, Any] = {"device": "cuda:0", "dtype": torch.float32, "precision": "fp16", "chunk": 2}
    common["model_options"] = {"dropout": 0.3}
    whole = pool.run(train_leg, 2, "GPT", 2, 1, first=0, stop=4, store=str(tmp_path / "whole"), **common)[0]
    store = str(tmp_path / "parts")
    first = pool.run(train_leg, 2, "GPT", 2, 1, first=0, stop=2, store=store, **common)[0]
    second = pool.run(train_leg, 2, "GPT", 2, 1, first=2, stop=4, store=store, **common)[0]
    assert first["losses"] + second["losses"] == whole["losses"] and second["scale"] == whole["scale"]
