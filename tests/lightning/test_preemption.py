"""Requests of the manager during fit: a worker that will save at the end of an epoch says so."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.environment import variable_name
from varuna.lightning.preemption import SaveAndExit
from varuna.lightning.ranks import StartedProcesses
from varuna.morph.run.progress_page import ProgressReader
from varuna.morph.run.worker import early_signal
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


def make_trainer(*, ends_epoch: bool, saves: bool) -> Any:
    """Return what the callback uses of Lightning's Trainer."""
    saver = SimpleNamespace(save_last=True, dirpath="saved", CHECKPOINT_NAME_LAST="last", FILE_EXTENSION="")
    return SimpleNamespace(
        is_last_batch=ends_epoch,
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
    callback.on_train_batch_end(make_trainer(ends_epoch=False, saves=True))
    callback.on_validation_batch_end()
    assert before.saving and page.read().saving and page.read().activity == before.activity + 2
    with pytest.raises(SystemExit):
        callback.on_train_batch_end(make_trainer(ends_epoch=True, saves=True))
    callback.on_exception()  # Lightning calls it for SystemExit, too
    assert page.on_demand and signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_a_worker_that_will_not_save_takes_its_report_back(page: ProgressReader) -> None:
    """TRA-5: without a ModelCheckpoint, and if fit ends before the request is carried out."""
    callback = SaveAndExit()
    callback.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    callback.on_train_batch_end(make_trainer(ends_epoch=True, saves=False))
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
        callback.on_train_batch_end(make_trainer(ends_epoch=True, saves=True))


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
