"""A job that is killed over and over, at another layout each time, trains as if nothing had happened."""

import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.launch.jobs import launcher, started
from varuna import SampleOrder, newest_checkpoint, plain_randomness
from varuna.checkpoint.load import all_checkpoints, open_checkpoint, verify
from varuna.checkpoint.store.store import open_store

STEPS, BATCH, SAMPLES, SEED = 40, 6, 50, 5

MODEL = """
import torch
from torch import nn
import torch.nn.functional as F
from varuna import CutPoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(3))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x, y):
        for i, layer in enumerate(self.layers):
            x = self.dropout(torch.tanh(layer(x)))
            if i < 3:
                x = self.cuts[i](x)
        return F.mse_loss(x, y)


def make(steps):
    torch.manual_seed(1)
    model = Net().double()
    data = {"x": torch.randn(50, 5).double(), "y": torch.randn(50, 5).double()}
    return model, data


def make_optimizer(parameters, steps):
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
"""

SCRIPT = (
    MODEL
    + """
import os, sys
from varuna import SampleOrder, Varuna

steps, store, how = int(sys.argv[-3]), sys.argv[-2], sys.argv[-1]
net, data = make(steps)
sample = {key: value[:2] for key, value in data.items()}
model = Varuna(net, os.environ["VARUNA_STAGE_TO_RANK_MAP"], sample, 6, 2, device="cpu", seed=5)
optimizer, scheduler = make_optimizer(model.parameters(), steps)
model.set_optimizer(optimizer)
model.register("scheduler", scheduler)
first = model.resume(store)
losses = os.open("losses.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
order = SampleOrder(50, batch_size=6, seed=5)
mine = {"replica": model.rank_within_stage, "num_replicas": model.data_depth}
for indices in order.batches(**mine, first_step=first, num_steps=steps - first):
    loss, _ = model.step({key: value[indices] for key, value in data.items()})
    optimizer.step()
    scheduler.step()
    model.zero_grad()
    if os.environ["RANK"] == "0":
        line = f"step {model.iteration - 1} loss {loss!r}"
        os.write(losses, line.encode() + b"\\n")
        print(line, flush=True)
    if how == "background":
        model.checkpoint(store, tempdir="memory", keep_last=3, shard=True)
    elif how == "now":
        model.checkpoint(store, keep_last=3)
"""
)

LINE = re.compile(r"step (\d+) loss (\S+)")


def losses_of_one_process() -> list[float]:
    space: dict[str, object] = {}
    exec(MODEL, space)
    model, data = space["make"](STEPS)  # type: ignore[operator]
    assert isinstance(model, nn.Module)
    optimizer, scheduler = space["make_optimizer"](model.parameters(), STEPS)  # type: ignore[operator]
    order = SampleOrder(SAMPLES, batch_size=BATCH, seed=SEED)
    losses = []
    for step in range(STEPS):
        indices = order.step(step)
        with plain_randomness(seed=SEED, step=step, batch_size=len(indices)):
            loss = model(**{key: value[indices] for key, value in data.items()})
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def victims(job: subprocess.Popen[str]) -> list[int]:
    """The launcher and its workers."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    return [job.pid, *map(int, children)]


@pytest.mark.timeout(300)
def test_kills_from_a_seed_do_not_show_in_the_losses(tmp_path: Path) -> None:
    """V35, V36, V37, V40: SIGKILL of a worker or of the launcher, and SIGUSR1, during saves of both kinds."""
    chance = random.Random(7)
    store = tmp_path / "store"
    ends = ["kill", "usr1", "kill", "kill", "none"]
    for number, end in enumerate(ends):
        depth, width = chance.choice([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
        how = chance.choice(["now", "background"])
        command = launcher(
            tmp_path, str(STEPS), str(store), how, devices=depth * width, stages=depth, batch=BATCH
        )
        after = chance.randrange(1, 9)  # steps
        with started(command, tmp_path, SCRIPT) as job:
            assert job.stdout is not None
            seen = 0
            for line in job.stdout:
                if LINE.search(line):
                    seen += 1
                    if seen == after and end == "kill":
                        os.kill(chance.choice(victims(job)), signal.SIGKILL)
                    if seen == after and end == "usr1":
                        job.send_signal(signal.SIGUSR1)
            job.wait()
        lines = (tmp_path / "losses.txt").read_text().splitlines()
        found = {int(match[1]): float(match[2]) for match in map(LINE.fullmatch, lines) if match}
        assert (job.returncode == 0) == (end != "kill") or max(found) == STEPS - 1, f"run {number}"
        newest = newest_checkpoint(store)
        if newest is not None:
            assert verify(open_checkpoint(open_store(str(store)), newest)) == []
            assert end == "kill" or newest == max(found) + 1
    assert sorted(found) == list(range(STEPS))
    torch.testing.assert_close(
        [found[step] for step in range(STEPS)], losses_of_one_process(), rtol=1e-9, atol=0
    )
    complete = [one.step for one in all_checkpoints(open_store(str(store))) if not one.problem]
    assert complete[-1] == STEPS and len(complete) <= 3
