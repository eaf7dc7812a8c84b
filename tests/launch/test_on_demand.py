"""SIGUSR1 to a launcher of training workers: all save and end at the same step."""

import os
import signal
from pathlib import Path

import pytest

from tests.launch.jobs import HOLD, launcher, log, started
from varuna import newest_checkpoint

TRAIN = """
import torch
from torch import nn
from varuna import CutPoint, Varuna
from varuna.morph.run.worker import early_signal

when = sys.argv[-2]
os.environ["VARUNA_CHECKPOINT_STORE"] = "store"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.cut = CutPoint()

    def forward(self, x, y):
        return ((self.last(self.cut(self.first(x))) - y) ** 2).mean()


def save(store, **options):
    os.write(pipe, f"rank {rank} at {model.iteration}, child {child.poll()}\\n".encode())
    return really_save(store, **options)


if when == "before wrapping":
    os.write(pipe, b"ready\\n")
    while not early_signal.came:
        pass
inputs = {"x": torch.ones(8, 4), "y": torch.ones(8, 1)}
model = Varuna(Net(), os.environ["VARUNA_STAGE_TO_RANK_MAP"], inputs, 8, 2, device="cpu")
really_save, model._checkpoints.save = model._checkpoints.save, save
model.set_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
while True:
    model.step(inputs)
    if when == "training" and model.iteration == 3:
        os.write(pipe, b"ready\\n")
"""


@pytest.mark.parametrize("when", ["before wrapping", "training"])
def test_usr1_ends_a_job_with_a_checkpoint_of_the_same_step_on_all_ranks(tmp_path: Path, when: str) -> None:
    """V40: at any time. A second signal is harmless, and the child of a worker survives both."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = launcher(tmp_path, when, str(pipe), devices=2, stages=2)
    with started(command, tmp_path, HOLD + TRAIN) as job, pipe.open("rb") as reader:
        assert [reader.readline(), reader.readline()] == [b"ready\n"] * 2
        job.send_signal(signal.SIGUSR1)
        job.send_signal(signal.SIGUSR1)
        saved = sorted(reader.read().decode().splitlines())
        out, err = job.communicate()
    assert job.returncode == 0, err
    assert "finished: every worker ended normally" in out
    step = 1 if when == "before wrapping" else int(saved[0].split()[3][:-1])
    assert saved == [f"rank {rank} at {step}, child None" for rank in (0, 1)]
    assert newest_checkpoint(tmp_path / "store") == step
    assert "SIGUSR1: a checkpoint was saved to store; this rank exits" in log(tmp_path, "rank_1.err")
