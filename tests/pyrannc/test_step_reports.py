"""Reports of training steps to the manager and to the curves of the job."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import pyrannc
from tests.morph.jobs import Job
from varuna.cli.status.render import live_status, plain_line
from varuna.environment import VarunaEnvironment
from varuna.morph.metrics.ring import MetricsReader
from varuna.morph.run.progress_page import ProgressReader
from varuna.observe.history import StepPoint
from varuna.observe.history_file import read_history
from varuna.observe.job_view import NAME, JobView
from varuna.observe.prometheus import job_gauges


class Worker:
    """The page and the records of this process, as its agent reads them."""

    def __init__(self, path: Path) -> None:
        self.page, self._metrics = ProgressReader(path, 0), MetricsReader(path)

    def steps(self) -> list[StepPoint]:
        """Return the new steps."""
        return self._metrics.take()[0]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    path = tmp_path / "rank_0.progress"
    environment = VarunaEnvironment(progress_file=str(path), batch_size=12, generation=1)
    for name, value in environment.write().items():
        monkeypatch.setenv(name, value)
    yield Worker(path)
    pyrannc.clear()


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)
        return ((found - y) ** 2).mean(), found


def wrapped(model: nn.Module, **options: Any) -> tuple[pyrannc.RaNNCModule, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return pyrannc.RaNNCModule(model, optimizer, device="cpu", measure=False, **options), optimizer


def batch(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, 4)
    return x, x.sum(1, keepdim=True)


def test_a_step_has_the_loss_and_the_samples_of_all_its_calls(worker: Worker) -> None:
    """SEE-3: accumulation is one step, calls in eval mode are none, and other batches are counted."""
    model, optimizer = wrapped(WithLoss())
    model.eval()
    with torch.no_grad():
        model(*batch(2))
    assert not worker.page.read().activity, "hangs are watched from the first training call on"
    model.train()
    expected = []
    for sizes in ((8,), (6, 2), (12,)):
        losses = []
        for size in sizes:
            loss, _ = model(*batch(size))
            (loss / len(sizes)).backward()
            losses.append(loss.item() * size)
        optimizer.step()
        optimizer.zero_grad()
        expected.append((len(expected) + 1, pytest.approx(sum(losses) / sum(sizes)), sum(sizes)))
        seen = worker.page.read()
        assert not seen.in_step and seen.iteration == seen.steps == len(expected)
        model.eval()
        with torch.no_grad():
            model(*batch(2))
        assert worker.page.read().activity > seen.activity
        model.train()
    assert [(one.step, one.loss, one.samples) for one in worker.steps()] == expected
    assert worker.page.read().missing_samples == 4 + 4 and worker.page.read().script_saves


def test_a_loss_outside_of_the_model_is_not_known(worker: Worker) -> None:
    """SEE-3: the record says so; it is not a loss that is not finite."""
    model, optimizer = wrapped(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
    for _ in range(2):
        x, y = batch(16)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    assert [(one.step, one.loss, one.has_loss, one.samples) for one in worker.steps()] == [
        (1, None, False, 16),
        (2, None, False, 16),
    ]
    assert worker.page.read().missing_samples == 2 * (12 - 16)


def test_models_that_train_together_make_one_step(worker: Worker) -> None:
    """SEE-3: samples count once for each backward; a step without a backward and a second step are none."""
    encoder, first = wrapped(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
    decoder, second = wrapped(nn.Sequential(nn.Linear(8, 4), nn.Tanh()))
    first.step()
    for _ in range(2):
        x, _ = batch(8)
        F.mse_loss(decoder(encoder(x)), x).backward()
        first.step()
        second.step()
    assert [(one.step, one.samples) for one in worker.steps()] == [(1, 8), (2, 8)]


@pytest.mark.parametrize("before", [True, False])
def test_counting_continues_from_the_optimizers_state(worker: Worker, before: bool) -> None:
    """SEE-3: as a script loads it after a restart, before or after it wraps the model."""
    model, optimizer = wrapped(WithLoss())
    for _ in range(3):
        model(*batch(4))[0].backward()
        optimizer.step()
    state = optimizer.state_dict()
    plain = WithLoss()
    again = torch.optim.SGD(plain.parameters(), lr=0.1)
    if before:
        again.load_state_dict(state)
    wrapped_again = pyrannc.RaNNCModule(plain, again, device="cpu", measure=False)
    if not before:
        again.load_state_dict(state)
    wrapped_again(*batch(4))[0].backward()
    again.step()
    assert [one.step for one in worker.steps()] == [1, 2, 3, 4]


def test_the_state_of_adam_says_its_number_of_steps(worker: Worker) -> None:
    """SEE-3: also if it was saved without a manager."""
    plain = WithLoss()
    optimizer = torch.optim.Adam(plain.parameters())
    for _ in range(5):
        plain(*batch(4))[0].backward()
        optimizer.step()
    model = pyrannc.RaNNCModule(plain, optimizer, device="cpu", measure=False)
    model(*batch(4))[0].backward()
    optimizer.step()
    assert [one.step for one in worker.steps()] == [6]


def test_without_anyone_who_watches_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEE-3: and the state of the optimizer is that of a plain one."""
    for name in list(os.environ):
        if name.startswith("VARUNA_"):
            monkeypatch.delenv(name)
    model, optimizer = wrapped(WithLoss())
    model(*batch(4))[0].backward()
    optimizer.step()
    assert model._reports is None and "varuna_step" not in optimizer.state_dict()["param_groups"][0]
    pyrannc.clear()


TRAIN = """
import os, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
import pyrannc

LOSS_INSIDE, STEPS = {inside}, 120

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x, y):
        found = self.layers(x)
        return F.mse_loss(found, y) if LOSS_INSIDE else found

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
model = pyrannc.RaNNCModule(model, optimizer, device="cpu", measure=False)
saved, step = Path("saved.pt"), 0
if saved.exists():
    state = torch.load(saved)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < STEPS:
    torch.manual_seed(100 * step + pyrannc.get_rank())
    x = torch.randn(4, 4)
    y = x.sum(1, keepdim=True)
    found = model(x, y)
    loss = found if LOSS_INSIDE else F.mse_loss(found, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", step, "loss", loss.item())
    step += 1
    if step % 10 == 0:
        state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}}
        if pyrannc.get_rank() == 0:
            torch.save(state, "next.pt")
            os.replace("next.pt", saved)
    if not Path("hurry").exists():
        time.sleep(0.05)
"""
STEPS = 120


def live_text(view: JobView) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(live_status(view))
    return captured.get().split("layout")[0]


def check_curve(job: Job, *, has_loss: bool) -> None:
    """Compare the curve of a finished job with the steps that rank 0 has printed."""
    (folder,) = (job.folder / "varuna_logs").iterdir()
    points = read_history(folder).steps()
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    assert {point.samples for point in points} == {8}
    if has_loss:
        assert [point.loss for point in points] == pytest.approx([job.losses[n] for n in range(STEPS)])
    else:
        assert {(point.loss, point.has_loss) for point in points} == {(None, False)}
    view = msgspec.json.decode((folder / NAME).read_bytes(), type=JobView)
    assert view.step == STEPS and view.step_seconds and view.has_loss == has_loss
    assert ("loss" in plain_line(view)) == has_loss
    assert ("loss" in live_text(view)) == has_loss
    assert ("varuna_loss" in {metric.name for metric in job_gauges(view)}) == has_loss
    report = json.loads(job.varuna("ledger", str(folder), "--json").stdout)
    assert report["steps"] == STEPS and report["samples"] == 8 * STEPS
    # A loaded machine starts slowly, so this is no share of the paid time.
    assert report["useful_seconds"] > 0.5 * sum(point.seconds for point in points), report


def test_a_managed_job_shows_its_steps_and_continues_them_after_a_restart(tmp_path: Path) -> None:
    """SEE-3, V47: two workers, one of which is killed."""
    with Job(tmp_path, machines=2, script=TRAIN.format(inside=True)) as job:
        job.wait_for_steps(3)
        job.wait_for_reports(15)
        os.kill(job.worker(2), 9)
        job.wait_for("generation: 2: ")
        job.wait_for_steps(3)
        assert job.finish() == 0, job.text
        check_curve(job, has_loss=True)


def test_a_managed_job_with_its_own_loss_has_a_curve_without_it(tmp_path: Path) -> None:
    """SEE-3: no value stands for the loss in the terminal, in TensorBoard and for Prometheus."""
    options = ["--track", "tensorboard"]
    with Job(tmp_path, machines=2, script=TRAIN.format(inside=False), options=options) as job:
        job.wait_for_steps(3)
        assert job.finish() == 0, job.text
        check_curve(job, has_loss=False)
    (folder,) = tmp_path.glob("varuna_logs/*/tensorboard")
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    assert "loss" not in events.Tags()["scalars"]
    assert [one.step for one in events.Scalars("step_seconds")] == list(range(1, STEPS + 1))
