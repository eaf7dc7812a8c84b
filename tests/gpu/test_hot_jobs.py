"""Real jobs that morph in place on one GPU, which all machines share: over CUDA IPC, over NCCL, and compiled.

pytest -m gpu tests/gpu/test_hot_jobs.py
"""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.morph.jobs import PATIENT, Job, check, reference_losses
from tests.morph.test_hot_jobs import FETCHES, NEVER_SAVES

pytestmark = pytest.mark.gpu

OPTIONS = ("--save-every", "off")
AS_HOSTS = """
import os
os.environ.update(NCCL_HOSTID=f"host{os.getpid()}", NCCL_SOCKET_IFNAME="lo", VARUNA_NCCL_ON_SHARED_GPUS="1")
"""
"""NCCL takes each worker for a host of its own, so that workers may share the GPU."""
DIES = """
import os, signal
from pathlib import Path
instructions = []
def delay(op, number):
    instructions.append(op)
    if os.environ["RANK"] == "3" and instructions.count("B") > 20 and op == "B" and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
"""
"""The worker of rank 3 is killed once, in a backward: others wait for it on the device."""
COMPILED = re.compile(r"step (\d+) has compiled (\d+)")
COUNT_COMPILATIONS = """
from torch._dynamo.utils import counters
def misbehave(step):
    print("step", step, "has compiled", counters["aot_autograd"]["total"], "in", os.getpid(), flush=True)
"""


def gpu_script(prelude: str = "", *, nccl: bool = False, compiles: bool = False) -> str:
    options = 'device="cuda:0", seed=3, timeout_seconds=60'
    options += ', channel="group"' * nccl + ", compile=True" * compiles
    script = FETCHES.replace('device="cpu", seed=3', options)
    assert script != FETCHES
    return AS_HOSTS * nccl + NEVER_SAVES + prelude + script


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one undisturbed process on a CPU."""
    return reference_losses(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("nccl", [False, True])
def test_stages_and_replicas_on_a_gpu_survive_a_kill_and_a_leave(
    tmp_path: Path, reference: dict[int, float], nccl: bool
) -> None:
    """HOT-1, HOT-2, HOT-3, HOT-4: a worker is killed in a step and comes back; then machines leave."""
    script = gpu_script(DIES, nccl=nccl)
    with Job(tmp_path, machines=4, stages=2, script=script, options=OPTIONS, manager=PATIENT) as job:
        job.wait_for_steps(1)
        pids = [job.worker(number) for number in (1, 2)]
        assert "was killed by SIGKILL" in job.wait_for("recovering: rank 3")
        job.wait_for("morphed: ")
        job.wait_for("2 stages x 2 replicas")  # the machine is back
        job.wait_for("morphed: ")
        job.wait_for_steps(3)
        assert [job.worker(number) for number in (1, 2)] == pids
        job.write_list(1, 2)
        job.wait_for("2 stages x 1 replica,")
        job.wait_for("morphed: ")
        job.wait_for_steps(3)
        assert [job.worker(number) for number in (1, 2)] == pids
        check(job, reference)
    assert "generation ended" not in job.text


def test_a_compiled_model_is_not_compiled_again_after_a_loss(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """HOT-1, HOT-3: survivors keep their compiled code."""
    script = gpu_script(COUNT_COMPILATIONS, compiles=True)
    with Job(tmp_path, machines=3, script=script, options=OPTIONS, manager=PATIENT) as job:
        job.wait_for_steps(3)
        job.wait_for_reports(2)
        pid = job.worker(1)
        os.kill(job.worker(3), signal.SIGKILL)
        job.wait_for("recovering: rank ")
        job.wait_for("morphed: ")
        job.wait_for("1 stage x 3 replicas")
        job.wait_for("morphed: ")
        job.wait_for_steps(3)
        assert job.worker(1) == pid
        check(job, reference)
    counts = {int(step): int(count) for step, count in COMPILED.findall(job.text)}
    assert counts[0] > 0 and set(counts.values()) == {counts[0]}
    assert "generation ended" not in job.text
