"""A real training job under the launcher that fails: the message names rank, stage and micro-batch."""

from pathlib import Path

import pytest

from tests.launch.jobs import launcher, run

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from varuna import CutPoint, Varuna, opaque

how, steps = sys.argv[1], 0


class Gate(nn.Module):
    def forward(self, x):
        if how == "raise" and steps == 2 and dist.get_rank() == 1:
            raise ZeroDivisionError("the gate is broken")
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.cut, self.gate = CutPoint(), opaque(Gate())

    def forward(self, x, y):
        return ((self.last(self.gate(self.cut(self.first(x)))) - y) ** 2).mean()


inputs = {"x": torch.ones(6, 4), "y": torch.ones(6, 1)}
model = Varuna(
    Net(), os.environ["VARUNA_STAGE_TO_RANK_MAP"], inputs, 6, 2, device="cpu",
    timeout_seconds=4 if how == "hang" else 600,
)
model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
while steps < 4:
    if steps == 2 and model.stage == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(3600)
    if how == "end" and steps == 2 and os.environ["RANK"] == "1":
        break
    model.step({name: value[: 6 // model.data_depth] for name, value in inputs.items()})
    steps += 1
print("trained")
"""

MESSAGES = {
    "raise": [
        "rank 1 (stage 1, replica 0) raised ZeroDivisionError: the gate is broken",
        'raise ZeroDivisionError("the gate is broken")',
        "on rank 1: stage 1, micro-batch 0, forward",
    ],
    "kill": ["rank 1 (stage 1, replica 0) was killed by SIGKILL"],
    "hang": ["PeerHangs: rank 1 (stage 1, replica 0) hangs", "nor waited for another rank"],
}


@pytest.mark.parametrize("how", MESSAGES)
def test_a_failing_training_job_names_the_worker_that_caused_it(tmp_path: Path, how: str) -> None:
    """V33, B7."""
    job = run(launcher(tmp_path, how, devices=2, stages=2, batch=6), tmp_path, SCRIPT)
    assert job.returncode == 1
    last = (job.stdout + job.stderr).split("varuna: failed:")[1]
    for expected in MESSAGES[how]:
        assert expected in last


def test_a_training_job_that_ends_normally_is_reported_finished(tmp_path: Path) -> None:
    """V34."""
    job = run(launcher(tmp_path, "well", devices=2, stages=2, batch=6), tmp_path, SCRIPT)
    assert job.returncode == 0 and "finished" in job.stdout + job.stderr and "trained" in job.stdout


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_whose_script_ends_earlier_is_named(tmp_path: Path, stages: int) -> None:
    """V33, EXA-9: for example, because its data is shorter."""
    job = run(launcher(tmp_path, "end", devices=2, stages=stages, batch=6), tmp_path, SCRIPT)
    assert job.returncode == 1
    last = (job.stdout + job.stderr).split("varuna: failed:")[1]
    stage, replica = divmod(1, 3 - stages)
    assert f"PeerLost: rank 1 (stage {stage}, replica {replica}) has ended" in last
    assert "all ranks must make the same steps" in last
