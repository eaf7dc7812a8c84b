"""The path of a job's numbers from its workers to the manager."""

import itertools
import os
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import varuna
from tests.morph.jobs import STEPS, Job, check
from tests.morph.test_hot_jobs import FETCHES
from tests.observe.servers import Prometheus, check_dashboard
from varuna.environment import VarunaEnvironment
from varuna.morph.metrics import local
from varuna.morph.metrics import log as logging
from varuna.morph.metrics.collect import MAX_BURST, MAX_PER_BEAT, MAX_WAITING, MetricsCollector
from varuna.morph.metrics.local import LocalMetricsWriter, LocalTarget, open_metrics
from varuna.morph.metrics.ring import (
    _SCALAR,
    _STEP,
    HEADER,
    MAX_NAME,
    NUM_STEPS,
    MetricsWriter,
    SharedMetricsWriter,
)
from varuna.morph.metrics.view import model_flop_utilisation
from varuna.morph.metrics.worker import StepMetrics
from varuna.morph.state import WorkerFacts, WorkerProgress
from varuna.observe.devices import peak_flops
from varuna.observe.history import JobHistory
from varuna.observe.history_file import read_history
from varuna.observe.job_view import NAME, JobView


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetricsCollector:
    path = tmp_path / "rank_0.progress"
    for name, value in VarunaEnvironment(progress_file=str(path)).write().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(logging, "_names", set())
    monkeypatch.setattr(logging, "_warned", set())
    monkeypatch.setattr(logging, "_before_steps", set())
    monkeypatch.setattr(local, "_current", MetricsWriter())
    return MetricsCollector(path)


def write_steps(first: int, last: int) -> None:
    writer = open_metrics()
    for step in range(first, last + 1):
        writer.step(step, step / 8, seconds=0.5, samples=4)


def test_records_wait_for_the_manager_and_are_sent_again_to_its_successor(
    collector: MetricsCollector,
) -> None:
    """SEE-3"""
    assert collector.take() is None
    write_steps(1, 3)
    logging.log({"accuracy": 0.5}, num_steps=10)
    collector.collect(0)
    message = collector.take()
    assert message is not None and collector.take() is None
    assert [(one.step, one.loss, one.samples) for one in message.steps] == [
        (1, 0.125, 4),
        (2, 0.25, 4),
        (3, 0.375, 4),
    ]
    assert [(one.name, one.step, one.value) for one in message.scalars] == [("accuracy", 3, 0.5)]
    assert collector.facts(os.getpid()).num_steps == 10 and collector.facts(os.getpid()).memory_bytes > 2**20
    write_steps(4, 4)
    collector.collect(0, again=True)
    write_steps(5, 5)
    collector.close()
    again = collector.take()
    assert again is not None and [one.step for one in again.steps] == [1, 2, 3, 4, 5]
    assert again.scalars == message.scalars and collector.take() is None


def take_steps(collector: MetricsCollector) -> Iterator[int]:
    while (message := collector.take()) is not None:
        yield from (one.step for one in message.steps)


def test_very_short_steps_are_thinned_out_evenly_and_counted(collector: MetricsCollector) -> None:
    """SEE-3: between two heartbeats, and while no manager is there."""
    first = MAX_BURST - 100
    write_steps(1, first)
    collector.collect(0)
    assert [*take_steps(collector)] == list(range(1, first + 1))  # a late heartbeat
    for _ in range(10):  # the allowance is used up
        write_steps(1, MAX_PER_BEAT + 10)
        collector.collect(0)
    assert len([*take_steps(collector)]) == 10 * (MAX_PER_BEAT + 10)
    last = first + NUM_STEPS + 100
    write_steps(first + 1, last)
    collector.collect(0)
    message = collector.take()
    assert message is not None
    steps = [one.step for one in message.steps]
    assert MAX_PER_BEAT // 2 <= len(steps) <= MAX_PER_BEAT + 1 and steps[-1] == last
    assert {b - a for a, b in itertools.pairwise(steps[:-1])} == {16}
    assert message.dropped == NUM_STEPS + 100 - len(steps)
    for beat in range(300):
        write_steps(4000 + beat * MAX_PER_BEAT, 3999 + (beat + 1) * MAX_PER_BEAT)
        collector.collect(0)
    found = []
    while (message := collector.take()) is not None:
        found += [one.step for one in message.steps]
        assert len(msgspec.json.encode(message)) < 2**17
    assert found == sorted(found) and MAX_WAITING // 4 <= len(found) <= MAX_WAITING + 1


def test_invalid_scalars_are_dropped_with_one_warning_each(collector: MetricsCollector) -> None:
    """SEE-3"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            logging.log({"good": True, "text": "high", "shape": [1, 2], "": 1.0, "x" * (MAX_NAME + 1): 1.0})
            logging.log({"huge": 10**5000, "name of a file \udcff": 1.0})
            logging.log({7: 1.0, "nan": float("nan")})  # type: ignore[dict-item]
            logging.log(3.0)  # type: ignore[arg-type]
        logging.log({f"name {number}": number for number in range(100_000)})
    texts = [str(one.message) for one in caught]
    assert len(texts) == 7, texts
    assert "varuna.log: 'text' must be one number, not 'high'; it is dropped" in texts
    assert "varuna.log: a job has at most 256 names; 'name 251' and others are dropped" in texts
    collector.collect(0)
    message = collector.take()
    assert message is not None
    assert [(one.name, one.value) for one in message.scalars[:2]] == [("good", 1.0), ("nan", None)]
    assert len(message.scalars) == 4 + 251


def test_a_record_that_is_not_complete_waits(collector: MetricsCollector) -> None:
    """SEE-3: the agent reads while the worker writes."""
    writer = open_metrics()
    assert isinstance(writer, SharedMetricsWriter)
    for name in ("first", "second", "third"):
        writer.scalar(name, 1.0, 1)
    page, size = writer._page, _SCALAR.size
    ends = HEADER + NUM_STEPS * _STEP.size + 3 * size  # of the record with number 2
    number = page[ends - 8 : ends]
    page[ends - 8 : ends] = bytes(8)  # written last
    collector.collect(0)
    page[ends - 8 : ends] = number
    collector.collect(0)
    found = [collector.take(), collector.take()]
    assert found[0] is not None and [one.name for one in found[0].scalars] == ["first", "second", "third"]
    assert found[1] is None


def test_scripts_may_log_from_several_threads(collector: MetricsCollector) -> None:
    """SEE-3"""
    open_metrics()

    def log_many(number: int) -> None:
        for step in range(100):
            logging.log({f"thread {number}": float(step)}, step=step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(log_many, range(8)))
    collector.collect(0)
    message, rest = collector.take(), collector.take()
    assert message is not None and rest is not None
    found = sorted((one.name, one.step, one.value) for one in (*message.scalars, *rest.scalars))
    assert found == [(f"thread {number}", step, step) for number in range(8) for step in range(100)]


def test_a_value_reads_no_variables_once_it_is_known_where_it_goes(
    collector: MetricsCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEE-3: in a step, reading them takes longer than the rest of `varuna.log`."""
    logging.log({"accuracy": 0.5}, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", {})
        logging.log({"accuracy": 0.6}, step=2)
    collector.collect(0)
    message = collector.take()
    assert message is not None and [one.value for one in message.scalars] == [0.5, 0.6]


WRONG_STEPS = ["7", 1.5, float("nan"), -1, 2**53, 10**5000, [1], torch.tensor([1, 2]), torch.tensor(0.5)]


def log_wrong_steps() -> list[str]:
    """Log values at invalid steps, then at valid ones. Return the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in WRONG_STEPS:
            logging._warned.clear()
            logging.log({"accuracy": 0.5, "other": 1}, step=step)  # type: ignore[arg-type]
        for end in ("many", float("inf"), 2**70):
            logging._warned.clear()
            logging.log({}, num_steps=end)  # type: ignore[arg-type]
        logging.log({"accuracy": 0.5}, step=torch.tensor(3))  # type: ignore[arg-type]
        logging.log({"accuracy": 0.6}, step=2**53 - 1, num_steps=12.0)  # type: ignore[arg-type]
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def check_warnings(texts: list[str]) -> None:
    steps, ends = texts[: len(WRONG_STEPS)], texts[len(WRONG_STEPS) :]
    assert all("step must be a whole number from 0 to 9007199254740991, not " in text for text in steps)
    assert len(steps) == len(WRONG_STEPS) and len(ends) == 3
    assert all("num_steps must be a number of steps" in text for text in ends)


def test_values_at_an_invalid_step_are_dropped_with_a_warning(collector: MetricsCollector) -> None:
    """SEE-3"""
    check_warnings(log_wrong_steps())
    collector.collect(0)
    message = collector.take()
    assert message is not None
    assert [(one.name, one.step) for one in message.scalars] == [("accuracy", 3), ("accuracy", 2**53 - 1)]
    assert collector.facts(os.getpid()).num_steps == 12


def test_without_a_manager_values_at_an_invalid_step_are_dropped_with_a_warning(
    collector: MetricsCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEE-3"""
    writer = LocalMetricsWriter(LocalTarget(tmp_path / "logs", ()))
    monkeypatch.setattr(logging, "current_metrics", lambda: writer)
    check_warnings(log_wrong_steps())
    writer.close()
    steps = [one.step for one in read_history(tmp_path / "logs").scalar("accuracy")]
    assert steps == [3, 2**53 - 1]


TRAIN_ALONE = """
import os, sys
import torch
from torch import nn
import varuna

if sys.argv[1:] == ["plain"]:
    for step in range(1, 4):
        varuna.log({"accuracy": step / 8}, step=step)
    varuna.log({"other": 1.0})
    varuna.log({"other": 2.0})
    sys.exit()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).pow(2).mean()

x = torch.ones(8, 4)
model = varuna.Varuna(Net(), "0;", {"x": x[:1]}, 8, 8, device="cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.set_optimizer(optimizer)
for _ in range(3):
    loss, _ = model.step({"x": x})
    optimizer.step()
    model.zero_grad()
    varuna.log({"accuracy": 1 - loss})
    print(loss)
"""


def run_alone(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(TRAIN_ALONE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VARUNA_")}
    return subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(Path(varuna.__file__).parents[1]), **variables},
        capture_output=True,
        text=True,
    )


def test_without_a_manager_rank_0_writes_the_curves_or_a_note_says_how(tmp_path: Path) -> None:
    """SEE-3: one process, as torchrun would start it."""
    done = run_alone(tmp_path, VARUNA_TRACK="tensorboard")
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.splitlines()]
    (folder,) = (tmp_path / "varuna_logs").iterdir()
    history = read_history(folder)
    assert [(one.step, one.loss, one.samples) for one in history.steps()] == [
        (step, loss, 8) for step, loss in enumerate(losses, 1)
    ]
    assert all(one.seconds > 0 for one in history.steps())
    assert [(one.step, one.value) for one in history.scalar("accuracy")] == [
        (step, 1 - loss) for step, loss in enumerate(losses, 1)
    ]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for name in ("loss", "accuracy"):
        assert [one.step for one in events.Scalars(name)] == [1, 2, 3]
    plain = tmp_path / "plain"
    plain.mkdir()
    note = run_alone(plain, "plain").stderr
    assert "set VARUNA_TRACK=file or VARUNA_TRACK=tensorboard, or start" in note and "train.py:" in note
    assert run_alone(plain, "plain", RANK="1", VARUNA_TRACK="file").stderr == ""
    assert not (plain / "varuna_logs").exists()
    done = run_alone(plain, "plain", VARUNA_LOG_DIR=str(plain / "logs"))
    assert (
        "pass step=..." in done.stderr
        and done.stderr.count("RuntimeWarning") == 1
        and "train.py:" in done.stderr
    )
    assert [one.value for one in read_history(plain / "logs").scalar("accuracy")] == [0.125, 0.25, 0.375]
    wrong = run_alone(plain, "plain", VARUNA_TRACK="file,tensorbord")
    assert "VARUNA_TRACK must be one of file, tensorboard, wandb, mlflow, trackio" in wrong.stderr


def check_metrics(url: str) -> None:
    """SEE-3: the endpoint has what a dashboard needs."""
    with urllib.request.urlopen(url) as answer:
        families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
    values = {name: [sample.value for sample in one.samples] for name, one in families.items()}
    assert values["varuna_step"][0] >= 20 and 0 < values["varuna_step_seconds"][0] < 10
    assert values["varuna_samples"][0] >= 12 * 20 and values["varuna_goodput_seconds"][0] > 0
    lost = {sample.labels["cause"]: sample.value for sample in families["varuna_badput_seconds"].samples}
    assert set(lost) == {"saving", "redoing", "morphing", "waiting", "idle"} and lost["morphing"] > 0
    states = {sample.labels["state"]: sample.value for sample in families["varuna_machines"].samples}
    assert states["at work"] == 2 and min(values["varuna_memory_bytes"]) > 2**20
    assert values["varuna_save_seconds"][0] > 0 and values["varuna_losses"][0] >= 1 and values["varuna_loss"]
    assert {sample.labels["name"] for sample in families["varuna_scalar"].samples} == {"double"}


def test_a_job_has_one_curve_over_morphs_losses_and_a_new_manager(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """SEE-3: every step once, with the loss of one process, though steps run again."""
    values = "{'double': 2 * model.iteration, 'text': 'x'}"
    logs = f"print = lambda *a, p=print: (varuna.log({values}, num_steps=STEPS), p(*a))\n"
    script = "import varuna\n" + FETCHES.replace("while model.iteration", logs + "while model.iteration", 1)
    options = ("--track", "tensorboard", "--metrics-port", "0")
    with Job(tmp_path, machines=2, script=script, options=options) as job, ExitStack() as stack:
        url = job.wait_for("varuna: metrics: http://127.0.0.1:").split(": ", 2)[2]
        prometheus = stack.enter_context(Prometheus.scraping(url, tmp_path / "prometheus"))
        job.wait_for_steps(13)
        job.write_list(1, 2, 3)
        job.wait_for("morphed: 2: in place")
        job.wait_for_steps(3)
        job.write_list(2, 3)  # another machine leads
        job.wait_for("morphed: 3: in place")
        job.wait_for_steps(3)
        for pid in (job.worker(2), job.worker(3)):  # nobody survives: steps since the last save run again
            os.kill(pid, signal.SIGKILL)
        job.wait_for("from step ")
        job.wait_for_steps(3)
        job.wait_for_reports(3)
        check_metrics(url)
        check_dashboard(prometheus, without_data=["varuna_tokens_per_second"])
        assert len(prometheus.runs()) == 1  # the job, for the dashboard's list
        stack.close()
        os.kill(job.process.pid, signal.SIGKILL)
        job.restart("--resume")
        job.wait_for_steps(3)
        check(job, reference)
    (folder,) = (path.parent for path in tmp_path.glob("**/metrics.jsonl"))
    history = read_history(folder)
    losses = {point.step - 1: point.loss for point in history.steps()}
    assert list(losses) == list(range(STEPS))
    assert losses == pytest.approx(reference, rel=1e-4, abs=1e-6)
    doubles = [(point.step, point.value) for point in history.scalar("double")]
    assert doubles == [(step, 2 * step) for step in range(1, STEPS + 1)]
    assert history.scalar_names == ("double",)
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    steps = [event.step for event in events.Scalars("loss")]
    assert steps == list(range(1, STEPS + 1))  # the killed manager loses and doubles none
    curve = {event.step - 1: event.value for event in events.Scalars("loss")}
    assert curve == pytest.approx({step: losses[step] for step in curve}, rel=1e-5)
    assert {"double", "step_seconds", "samples_per_second"} <= set(events.Tags()["scalars"])
    view = msgspec.json.decode((folder / NAME).read_bytes(), type=JobView)
    assert (view.phase, view.step, view.loss) == ("over", STEPS, history.steps()[-1].loss)
    assert view.morphs >= 3 and view.losses >= 1 and view.layout is not None and view.layout.widths == (2,)
    assert view.last_event is not None and view.last_event.what == "finished"
    assert not list(folder.glob("**/*.metrics"))


def test_the_view_has_the_utilisation_of_known_devices_only(collector: MetricsCollector) -> None:
    """SEE-1"""
    assert (
        peak_flops("NVIDIA H200", "bf16") == 989e12 and peak_flops("NVIDIA A100-SXM4-80GB", "fp16") == 312e12
    )
    assert peak_flops("NVIDIA A10G", "bf16") == 70e12 and peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA H200", "fp32") == peak_flops("cpu (H200x, 1 thread)", "bf16") == 0
    metrics = StepMetrics(lambda: {"memory_bytes": 5, "memory_limit": 9})
    metrics.describe(3e9, "NVIDIA T4", "fp16")
    metrics.note_inputs({"input_ids": torch.zeros(2, 7), "y": 1})
    metrics.finish_step(1, 0.5, seconds=0.5, samples=100, is_first=True)
    collector.collect(0)
    message = collector.take()
    assert message is not None and message.steps[0].tokens == 700
    facts = collector.facts(0)
    assert facts == WorkerFacts(0, 5, 9, 3e9, 65e12, "")
    history = JobHistory()
    history.add(message.steps[0])
    workers = [WorkerProgress(rank, facts=facts) for rank in range(2)]
    assert model_flop_utilisation(history, workers) == pytest.approx(3e9 * 200 / (2 * 65e12))
    assert model_flop_utilisation(history, [*workers, WorkerProgress(2)]) is None
