"""NCCL between ranks: links between stages and reductions. The ranks share one GPU.

NCCL refuses two ranks on one GPU of one host. Here each rank calls itself a host of its own (NCCL_HOSTID), so
messages go through NCCL's sockets: calls, groups and streams are those of a cluster, but not the speed.

pytest -m gpu tests/gpu/test_nccl.py
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import tests.pyrannc.jobs
import tests.tasks
from tests.gpu.tasks import lose_the_last_stage, train_by_lane
from tests.pool import Pool, TaskFailed
from tests.pyrannc.low_precision import compare_low, train_low, train_low_plainly
from tests.tasks import compare, train_plainly
from varuna.environment import variable_name
from varuna.execute.comm import session
from varuna.schedule import NAMES

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
NCCL = "cpu:gloo,cuda:nccl"
F64 = {"rtol": 1e-9, "atol": 1e-11}


def over_nccl(task: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, set[str]]:
    """Run a task as a host of its own; also return the backends that reduce its gradients."""
    backends: set[str] = set()

    def choose(gpus: Any) -> str:
        backends.add(backend := session_choice(gpus))
        return backend

    session_choice = session.reduce_backend
    own = {
        "NCCL_HOSTID": f"host{os.environ['RANK']}",
        "NCCL_SOCKET_IFNAME": "lo",
        variable_name("nccl_on_shared_gpus"): "1",
    }
    with patch.dict(os.environ, own), patch.object(session, "reduce_backend", choose):
        return task(*args, **kwargs), backends


@pytest.mark.parametrize(
    ("mapping", "schedule"),
    [
        *(("0;1;", schedule) for schedule in NAMES),
        ("0,1;", "varuna"),
        ("0,1;2,3;", "1f1b"),
        ("0;1;2;3;", "varuna"),
        ("0,1;2;", "varuna"),
        ("0;1,2,3;", "1f1b"),
    ],
)
def test_training_over_nccl_equals_one_process(
    pool: Pool, mapping: str, schedule: str, device: str = DEVICE, used: str = NCCL, lane: str = "NCCL"
) -> None:
    """V21, EXA-7: links and reductions, a tie over stages, unequal replicas, clipping."""
    shared: dict[str, Any] = {"batch": 8, "dtype": torch.float64, "clip": 0.05}
    options: dict[str, Any] = {"depth": 0, "width": 0, "mapping": mapping, "chunk": 2, "schedule": schedule}
    world = 1 + max(map(int, mapping.replace(";", ",").rstrip(",").split(",")))
    expected = train_plainly("GPT", **shared)
    task = (over_nccl, world, train_by_lane)
    for (found, lanes), backends in pool.run(*task, name="GPT", device=device, **options, **shared):
        compare(found, expected, **F64)
        assert backends == {used} and (lane in lanes) == (mapping.count(";") > 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_over_nccl(pool: Pool, precision: str, device: str = DEVICE) -> None:
    """V14, EXA-7: the losses of ranks that use shared memory and gloo, with replicas and a tie."""
    shared: dict[str, Any] = {"batch": 8, "chunk": 2, "device": device, "precision": precision, "steps": 4}
    usual = pool.run(tests.tasks.train, 4, "GPT", 2, 2, **shared)[0]
    task = (over_nccl, 4, train_by_lane)
    for (found, _), _ in pool.run(*task, name="GPT", depth=2, width=2, **shared):
        torch.testing.assert_close(found["losses"], usual["losses"], rtol=1e-4, atol=0)


@pytest.mark.parametrize(("world", "stages"), [(2, 1), (2, 2), (4, 2)])
def test_rannc_over_nccl_equals_one_process(
    pool: Pool, world: int, stages: int, device: str = DEVICE, used: str = NCCL
) -> None:
    """R1, EXA-7: uneven batches, and a rank without samples."""
    counts = [[3] * world, [4] + [1] * (world - 1), [0] * (world - 1) + [5]]
    options = {"partition_num": stages, "pipeline_num": 2}
    expected = tests.pyrannc.jobs.train_plainly("Bert", counts=counts)
    task = (over_nccl, world, tests.pyrannc.jobs.train)
    for found, backends in pool.run(*task, "Bert", counts=counts, options=options, device=device):
        assert backends == {used}
        for part in ("state", "gradients"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name].cpu(), value, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("stages", "precision"), [(1, "fp16"), (2, "bf16")])
def test_rannc_in_low_precision_over_nccl(
    pool: Pool, stages: int, precision: str, device: str = DEVICE
) -> None:
    """R16, EXA-7"""
    expected = train_low_plainly(precision, device)
    for found, _ in pool.run(over_nccl, 2, train_low, precision, stages, device):
        compare_low(found, expected)


def test_a_rank_that_dies_in_mid_step_over_nccl_is_named(pool: Pool, tmp_path: Path) -> None:
    """V21, EXA-7: the stage before it waits for a call of NCCL that never comes."""
    report = tmp_path / "report"
    with pytest.raises(TaskFailed):
        pool.run(over_nccl, 2, lose_the_last_stage, str(report), channel="group")
    assert "rank 1" in report.read_text() and report.read_text().startswith("PeerLost")
