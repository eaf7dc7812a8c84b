"""VarunaTrainer and Lightning in real jobs of `varuna run`: workers that die, and machines that leave."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.hf.trainers import arguments, language_model, sentences
from tests.launch.jobs import environment
from tests.morph.jobs import STEP, Job

STEPS = 24

TRAINER = f"""
import time
from pathlib import Path
import transformers
from tests.hf.trainers import arguments, language_model, sentences
from varuna.hf import VarunaTrainer

class Report(transformers.TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            print("step", state.global_step - 1, "loss", logs["loss"], flush=True)

    def on_step_end(self, args, state, control, **_):
        if not Path("hurry").exists():
            time.sleep(0.3 if state.global_step < 16 else 1.0)

args = arguments("out", max_steps={STEPS}, gradient_accumulation_steps=3, save_strategy="steps", save_steps=4)
VarunaTrainer(language_model(), args, train_dataset=sentences(44), callbacks=[Report()]).train()
"""


def test_a_trainer_survives_a_killed_worker_and_a_machine_that_leaves(tmp_path: Path) -> None:
    """TRA-1, V47: two stages on three machines; all losses are those of transformers' Trainer.

    The output folder has a later checkpoint of another run, which no generation may take.
    """
    other = tmp_path / "out" / "checkpoint-99"
    other.mkdir(parents=True)
    (other / "trainer_state.json").write_text("{}")
    args = arguments(tmp_path / "plain", max_steps=STEPS, gradient_accumulation_steps=3)
    plain = transformers.Trainer(language_model(), args, train_dataset=sentences(44))
    plain.train()
    expected = {entry["step"] - 1: entry["loss"] for entry in plain.state.log_history if "loss" in entry}
    with Job(tmp_path, machines=3, stages=2, script=TRAINER) as job:
        job.wait_for_steps(5)
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for("varuna: generation: ")
        job.wait_for_steps(2)
        job.write_list(1, 3)
        job.wait_for_change("varuna: generation: ")
        assert job.finish() == 0, job.text
    assert sorted(job.losses) == list(range(STEPS))
    assert job.losses == pytest.approx(expected, rel=1e-5)
    assert len(job.generations) == 3, job.text
    assert job.processes_left() == []


LIGHTNING = """
import os, time
from pathlib import Path
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import varuna.lightning

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)

class Report(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        print("step", trainer.global_step - 1, "loss", float(trainer.callback_metrics["loss"]), flush=True)
        if not Path("hurry").exists():
            time.sleep(0.2 if trainer.global_step < 20 else 1.0)

world = int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
x = torch.randn(48, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=12 // world)
save = L.pytorch.callbacks.ModelCheckpoint("saved", save_last=True, every_n_train_steps=4, save_top_k=1)
trainer = L.Trainer(strategy="varuna", accelerator="cpu", devices=1, num_nodes=world, max_steps=24,
    callbacks=[Report(), save], enable_progress_bar=False, logger=False)
trainer.fit(Net(), loader, ckpt_path="last")
"""


def test_lightning_survives_a_killed_worker_and_a_machine_that_leaves(tmp_path: Path) -> None:
    """TRA-5, V47: `ckpt_path="last"` continues with other replicas; all losses are those of one process."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "hurry").touch()
    (plain / "script.py").write_text(LIGHTNING)
    options = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "script.py"], cwd=plain, env=environment(plain), **options)
    lines = [STEP.match(f"[rank 0] {line}") for line in done.stdout.splitlines()]
    expected = {int(found[1]): float(found[2]) for found in lines if found}
    with Job(tmp_path, machines=3, script=LIGHTNING) as job:
        job.wait_for_steps(6)
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for("varuna: generation: ")
        job.wait_for_steps(2)
        job.write_list(1, 3)
        job.wait_for("varuna: generation: 3: 1 stage x 2 replicas")
        assert job.finish() == 0, job.text
    assert sorted(job.losses) == list(range(STEPS))
    assert job.losses == pytest.approx(expected, rel=1e-5)
