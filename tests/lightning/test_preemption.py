"""Requests of the manager during fit: a worker that will save at the end of an epoch says so."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import varuna.lightning
from tests.morph.jobs import Job
from tests.pool import Pool
from varuna.environment import variable_name
from varuna.lightning.preemption import SaveAndExit
from varuna.lightning.ranks import StartedProcesses
from varuna.morph.run.progress_page import ProgressReader
from varuna.morph.run.worker import early_signal
from varuna.observe.history_file import read_history
from varuna.train.process_rank import find_rank


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    early_signal.came = False
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProgressReader:
    found = ProgressReader(tmp_path / "page", 0)
    monkeypatch.setenv(variable_name("progress_file"), str(found.path))
    return found


def make_trainer(*, saves: bool) -> Any:
    """Return what the callback uses of Lightning's Trainer."""
    saver = SimpleNamespace(save_last=True, dirpath="saved", CHECKPOINT_NAME_LAST="last", FILE_EXTENSION="")
    loop = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu").fit_loop
    loop.epoch_loop.update_lr_schedulers = lambda *_, **__: None  # type: ignore[method-assign]
    return SimpleNamespace(
        max_steps=-1,
        max_epochs=-1,
        should_stop=False,
        fit_loop=loop,
        strategy=SimpleNamespace(root_device="cpu"),
        checkpoint_callbacks=[saver] if saves else [],
        save_checkpoint=lambda _path: None,
    )


def test_a_request_is_reported_until_the_worker_ends(page: ProgressReader) -> None:
    """TRA-5, V47: the manager waits for the end of the epoch, and restarts the job after it."""
    callback = SaveAndExit()
    callback.listen()
    assert not page.read().activity, "a hang is detected only after a request"
    os.kill(os.getpid(), signal.SIGUSR1)
    before = page.read()
    callback.on_train_batch_end()
    callback.on_validation_batch_end()
    assert before.saving and page.read().saving and page.read().activity == before.activity + 2
    with pytest.raises(SystemExit):
        callback.on_train_epoch_end(make_trainer(saves=True))
    callback.on_exception()  # Lightning calls it for SystemExit, too
    assert page.on_demand and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_worker_that_will_not_save_takes_its_report_back(page: ProgressReader) -> None:
    """TRA-5: without a ModelCheckpoint, and if fit ends before the request is carried out."""
    callback = SaveAndExit()
    callback.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    callback.on_train_epoch_end(make_trainer(saves=False))
    assert not page.on_demand
    os.kill(os.getpid(), signal.SIGUSR1)
    assert page.on_demand
    callback.teardown()
    assert not page.on_demand
    callback.listen()
    assert page.on_demand, "the next call of fit carries it out"
    callback.teardown()


def test_a_request_before_fit_is_not_lost(page: ProgressReader) -> None:
    """TRA-5: it may come while the script imports Lightning."""
    early_signal.came = True
    callback = SaveAndExit()
    callback.listen()
    assert page.on_demand and not early_signal.came
    with pytest.raises(SystemExit):
        callback.on_train_epoch_end(make_trainer(saves=True))


class Recorder(L.LightningModule):
    """Records its learning rates, validations and ends of epochs; its schedules follow the validation."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.schedule = schedule
        self.events: list[tuple[str, int, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def note(self, event: str) -> None:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.events.append((event, self.current_epoch, rate))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("step")
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validation")
        self.log("decreasing", self(batch[0]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.note("end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.schedule == "step":
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "decreasing"},
        }


class SignalIn(L.Callback):
    """Sends the manager's signal to the last rank in an epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def fit_epochs(folder: str, schedule: str, signal_in: int = -1) -> dict[str, Any]:
    """Train up to 5 epochs, which EarlyStopping ends after the third; return what a test compares."""
    ranks = int(os.environ["WORLD_SIZE"])
    os.environ["VARUNA_GENERATION"] = "1"
    handler = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    module = Recorder(schedule)
    saver = ModelCheckpoint(folder, monitor="decreasing", save_last=True, every_n_epochs=1)
    stopping = EarlyStopping("decreasing", mode="max", patience=2)
    trainer = L.Trainer(
        strategy=varuna.lightning.VarunaStrategy(measure=False, pipeline_num=1, partition_num=1),
        accelerator="cpu",
        devices=ranks,
        max_epochs=5,
        callbacks=[saver, stopping, SignalIn(signal_in)],
        logger=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = [DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4 // ranks) for _ in range(2)]
    try:
        trainer.fit(module, *loaders, ckpt_path="last")
        exited = False
    except SystemExit:
        exited = True
    finally:
        signal.signal(signal.SIGUSR1, handler)
        del os.environ["VARUNA_GENERATION"]
    return {
        "exited": exited,
        "events": module.events,
        "weights": [parameter.detach().clone() for parameter in module.parameters()],
        "best": saver.best_model_score,
    }


@pytest.mark.parametrize("schedule", ["plateau", "step"])
def test_a_planned_change_keeps_the_end_of_its_epoch(schedule: str, pool: Pool, tmp_path: Path) -> None:
    """TRA-5: validation, hooks, schedules, EarlyStopping and the best checkpoint are as without it."""
    (whole,) = pool.run(fit_epochs, 1, str(tmp_path / "whole"), schedule)
    assert [event for event in whole["events"] if event[0] == "end"][-1][1] == 2, "it stops early"
    for ranks in (1, 2):
        folder = str(tmp_path / str(ranks))
        before = pool.run(fit_epochs, ranks, folder, schedule, 1)
        after = pool.run(fit_epochs, ranks, folder, schedule)
        for first, second in zip(before, after, strict=True):
            assert first["exited"] and not second["exited"]
            assert first["events"] + second["events"] == whole["events"]
            torch.testing.assert_close(second["weights"], whole["weights"])
            torch.testing.assert_close(second["best"], whole["best"])


class BatchesOf(L.LightningModule):
    """Notes (step, epoch, value of the batch), and an epoch's start (-1), end (-2) and validation (-3)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.seen: list[tuple[int, int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.global_step, self.current_epoch, batch[0][0].item()))
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.global_step, self.current_epoch, -3.0))

    def on_train_epoch_start(self) -> None:
        self.seen.append((self.global_step, self.current_epoch, -1.0))

    def on_train_epoch_end(self) -> None:
        self.seen.append((self.global_step, self.current_epoch, -2.0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stream(IterableDataset[tuple[Tensor]]):
    """The samples, of unknown number."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.tensor([value]),) for value in SAMPLES])


SAMPLES = (0.0, 1.0, 2.0, 3.0)


def fit_batches(
    folder: str, limit: dict[str, int], kind: str, signals: tuple[int, ...]
) -> list[tuple[int, int, float]]:
    """Fit once more after each signal, which comes in an epoch; return what all runs noted."""
    seen = []
    for signal_in in (*signals, -1):
        os.environ["VARUNA_GENERATION"] = "1"
        handler = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        module = BatchesOf()
        saver = ModelCheckpoint(folder, save_last=True, every_n_train_steps=len(SAMPLES))
        rows = TensorDataset(torch.tensor(SAMPLES)[:, None])
        loaders = [DataLoader(Stream() if kind == "stream" else rows)]
        if kind == "validated":
            loaders.append(DataLoader(rows))
        trainer = L.Trainer(
            strategy=varuna.lightning.VarunaStrategy(measure=False, pipeline_num=1, partition_num=1),
            accelerator="cpu",
            devices=1,
            callbacks=[saver, SignalIn(signal_in)],
            logger=False,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            **limit,  # type: ignore[arg-type]
        )
        try:
            trainer.fit(module, *loaders, ckpt_path="last")
            assert signal_in == -1
        except SystemExit:
            assert signal_in >= 0
        finally:
            signal.signal(signal.SIGUSR1, handler)
            del os.environ["VARUNA_GENERATION"]
        seen += module.seen
    return seen


@pytest.mark.parametrize("limit", [{"max_steps": 24}, {"max_epochs": 6}], ids=["steps", "epochs"])
@pytest.mark.parametrize("kind", ["rows", "validated", "stream"])
def test_planned_changes_one_after_another_train_each_batch_once(
    limit: dict[str, int], kind: str, pool: Pool, tmp_path: Path
) -> None:
    """TRA-5: also if the checkpoints between them are those of steps."""
    (whole,) = pool.run(fit_batches, 1, str(tmp_path / "whole"), limit, kind, ())
    assert [step for step, _, value in whole if value >= 0] == list(range(24))
    (changed,) = pool.run(fit_batches, 1, str(tmp_path / "changed"), limit, kind, (1, 2, 4))
    assert changed == whole


def test_the_last_epoch_ends_by_itself(pool: Pool, tmp_path: Path) -> None:
    """TRA-5: a restart would train one more after EarlyStopping."""
    (whole,) = pool.run(fit_epochs, 1, str(tmp_path / "whole"), "step")
    (last,) = pool.run(fit_epochs, 1, str(tmp_path / "last"), "step", 2)
    assert not last["exited"] and last["events"] == whole["events"]


OF_MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "MASTER_ADDR": "first"}


@pytest.mark.parametrize(("rank", "node"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_machines_are_counted_under_mpirun(rank: int, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRA-5: it does not set LOCAL_WORLD_SIZE."""
    own = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % 4)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**OF_MPIRUN, **own}.items():
        monkeypatch.setenv(name, value)
    assert StartedProcesses(find_rank(os.environ)).node_rank() == node


FIT = """
import os, time
from pathlib import Path
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import varuna.lightning

class AutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        if not Path("hurry").exists():
            time.sleep(0.05)
        print("step", self.global_step, "loss", loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)

world = int(os.environ["WORLD_SIZE"])
trainer = L.Trainer(
    strategy=varuna.lightning.VarunaStrategy(measure=False), accelerator="cpu", devices=1, num_nodes=world,
    max_epochs=20, accumulate_grad_batches=2, callbacks=[ModelCheckpoint("saved", save_last=True)],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=8 // world)
trainer.fit(AutoEncoder(), loader, ckpt_path="last")
"""


def test_a_managed_job_shows_its_updates_and_continues_them_after_a_planned_change(tmp_path: Path) -> None:
    """TRA-5, SEE-3, V47: an update of two batches in two modules is one step of 16 samples."""
    with Job(tmp_path, machines=2, script=FIT) as job:
        job.wait_for_steps(3)
        job.wait_for_reports(8)
        job.write_list(1)
        job.wait_for("generation: 2: 1 stage x 1 replica")
        job.wait_for_steps(3)
        assert job.finish() == 0, job.text
        (folder,) = (tmp_path / "varuna_logs").iterdir()
        report = json.loads(job.varuna("ledger", str(folder), "--json").stdout)
    points = read_history(folder).steps()
    assert [(one.step, one.samples) for one in points] == [(step, 16) for step in range(1, 121)]
    assert not any(one.has_loss for one in points), "training_step computes it"
    assert (report["steps"], report["steps_redone"], report["samples"]) == (120, 0, 120 * 16)
    assert report["useful_seconds"] > 0
