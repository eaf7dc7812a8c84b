"""Trackers: real TensorBoard, wandb (offline), MLflow (a file store) and trackio; and trackers that fail."""

import io
import json
import os
import queue
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from tests.environments import environment
from tests.observe.servers import get_json, tensorboard, wait_for
from tests.page.folders import view_of
from varuna.cli.status.viewers import ViewerOptions
from varuna.morph.metrics.local import run_name
from varuna.observe import prometheus
from varuna.observe.history import ScalarPoint, StepPoint
from varuna.observe.history_file import HistoryKeeper
from varuna.observe.ledger import Ledger, report_ledger
from varuna.observe.prometheus import MAX_CONNECTIONS, MetricsEndpoint
from varuna.observe.trackers import tracker as trackers
from varuna.observe.trackers.event_records import frame_records
from varuna.observe.trackers.rows import MetricRow, rows_of
from varuna.observe.trackers.tracker import (
    TrackedJob,
    TrackerThread,
    check_trackers,
    open_tracker,
)

ROOT = Path(__file__).parents[2]

MLFLOW_NAMES = {
    "top-5 (%)": "top-5 ___",
    "/a": "_/a",
    "a//b": "a/_/b",
    "a/": "a/__",
    "..": "__",
    "../b": "_/b",
    ".c/./d": "_c/_/d",
    "e:f": "e_f",
    "g\n": "g_",
    "точность": "точность",
    "loss": "script/loss",
    "loss/head": "loss_/head",
    "h/i": "h/i",
    "h": "h_",
    "accuracy": "accuracy",
}
"""Names of scalars, in the order in which MLflow gets them, with its names for them."""
TRACK = """
import json, sys
sys.path.insert(0, sys.argv[1])
sys.path.append(sys.argv[2])
from pathlib import Path
from varuna.observe.history import ScalarPoint, StepPoint
from varuna.observe.trackers.tracker import TrackedJob, TrackerThread, check_trackers, open_tracker
for name in ("wandb", "mlflow", "trackio"):
    folder = Path(name).absolute()
    folder.mkdir()
    check_trackers([name])
    job = TrackedJob("job-1", folder, {"script": "train.py"})
    for first in (1, 4):  # a manager, and its successor
        thread = TrackerThread(name, lambda: open_tracker(name, job), folder=folder)
        steps = [StepPoint(n, 1e9 + n, None if n == 2 else 1 / n, 0.5, 8) for n in range(first, first + 3)]
        scalars = json.loads(sys.argv[3]) if name == "mlflow" else ["accuracy"]
        scalars = scalars if first == 1 else scalars[::-1]
        thread.add(steps, [ScalarPoint(scalar, first, 1e9, 0.5) for scalar in scalars])
        thread.close()
        assert thread.problem == "", (name, thread.problem)
import os
import varuna.morph.metrics.local as local
os.environ["MLFLOW_TRACKING_URI"] = Path("other").absolute().as_uri()  # a folder, by its address
os.environ[local.TRACK], os.environ[local.LOG_DIR] = "wandb,mlflow,trackio", "alone"
writer = local.open_metrics()  # without a manager; the process ends without a call to close
writer.step(1, 0.5, seconds=0.5, samples=8)
assert "torch" not in sys.modules
"""


def points(first: int, last: int) -> list[StepPoint]:
    return [StepPoint(step, 1e9 + step, 1 / step, 0.5, 8, 32) for step in range(first, last + 1)]


def test_wandb_mlflow_and_trackio_get_one_run_from_two_managers(tmp_path: Path) -> None:
    """SEE-3"""
    folder = environment("trackers", Path(__file__).with_name("trackers-constraints.txt"))
    settings = {
        **{"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TRACKIO_DIR": str(tmp_path / "trackio_data")},
        **{"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    }
    arguments = [str(ROOT), Path(msgspec.__file__).parents[1], json.dumps([*MLFLOW_NAMES])]
    command = [folder / "bin" / "python", "-c", TRACK, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "varuna: " not in done.stderr, done.stderr
    (alone,) = tmp_path.glob("other/*/*/metrics/loss")
    assert alone.read_text().split()[1:] == ["0.5", "1"]
    name = (tmp_path / "alone" / "run").read_text()
    assert re.fullmatch("alone-[0-9a-f]{8}", name), "folders with the same name are different runs"
    assert list((tmp_path / "alone" / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    (losses,) = tmp_path.glob("mlruns/*/*/metrics/loss")  # one run
    rows = [line.split() for line in losses.read_text().splitlines()]
    assert [int(step) for _, _, step in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[2][1] == str(1 / 3) and rows[1][1] == "nan"
    files = [file for file in losses.parent.rglob("*") if file.is_file()]
    steps_of = {
        str(file.relative_to(losses.parent)): [line.split()[2] for line in file.read_text().splitlines()]
        for file in files
    }
    own = {key: list("123456") for key in ("loss", "step_seconds", "samples_per_second")}
    assert steps_of == own | {key: ["1", "4"] for key in MLFLOW_NAMES.values()}
    with sqlite3.connect(tmp_path / "trackio_data" / "varuna.db") as data:
        found = data.execute("select run_name, step, metrics from metrics order by id").fetchall()
    steps = [(name, step) for name, step, metrics in found if "step_seconds" in json.loads(metrics)]
    assert steps == [*(("job-1", step) for step in range(1, 7)), (name, 1)]
    logs = list((tmp_path / "wandb" / "wandb").glob("offline-run-*/run-job-1.wandb"))
    assert len(logs) == 2 and all(b"accuracy" in log.read_bytes() for log in logs)


def test_tensorboard_reads_one_curve_from_two_managers(tmp_path: Path) -> None:
    """SEE-3"""
    for first in (1, 4):
        job = TrackedJob("job-1", tmp_path, {})
        thread = TrackerThread(
            "tensorboard", lambda job=job: open_tracker("tensorboard", job), folder=tmp_path
        )  # type: ignore[misc]
        thread.add(points(first, first + 2), [ScalarPoint("accuracy", first, 1e9, None)])
        thread.close()
        assert thread.problem == ""
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.wall_time) for one in events.Scalars("loss")] == [
        (n, 1e9 + n) for n in range(1, 7)
    ]
    assert [one.value for one in events.Scalars("tokens_per_second")] == [64.0] * 6
    assert [one.step for one in events.Scalars("accuracy")] == [1, 4]


def test_tensorboards_own_server_shows_the_curves(tmp_path: Path) -> None:
    """SEE-3"""
    thread = TrackerThread(
        "tensorboard", lambda: open_tracker("tensorboard", TrackedJob("job-1", tmp_path, {})), folder=tmp_path
    )
    thread.add(points(1, 5), [ScalarPoint("accuracy", 5, 1e9, 0.75)])
    thread.close()
    with tensorboard(tmp_path) as url:

        def tags() -> dict[str, object] | None:
            found: dict[str, dict[str, object]] = get_json(f"{url}/data/plugin/scalars/tags")
            return found.get("tensorboard")

        shown = wait_for(tags, "TensorBoard shows no run")
        assert set(shown) == {"loss", "step_seconds", "samples_per_second", "tokens_per_second", "accuracy"}
        scalars = f"{url}/data/plugin/scalars/scalars"
        losses = get_json(scalars, run="tensorboard", tag="loss")
        assert [(at, step) for at, step, _ in losses] == [(1e9 + step, step) for step in range(1, 6)]
        assert [loss for *_, loss in losses] == pytest.approx([1 / step for step in range(1, 6)])
        assert get_json(scalars, run="tensorboard", tag="accuracy") == [[1e9, 5, 0.75]]


def test_records_of_a_batch_are_those_of_tensorboards_own_writer() -> None:
    """SEE-3"""
    lengths = (4, 63, 64, 65, 5, 300)
    events = [bytes((7 * place + length) % 256 for place in range(length)) for length in lengths]
    expected = io.BytesIO()
    for event in events:
        RecordWriter(expected).write(event)
    assert frame_records(events) == expected.getvalue()
    assert frame_records([]) == b""


FULL_DISK = """
import resource, sys, time
from pathlib import Path
import varuna.observe.trackers.tracker as trackers
from tests.observe.test_trackers import points
trackers.RETRY_SECONDS = 0.01
job = trackers.TrackedJob("job-1", Path(sys.argv[1]), {})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
open_it = lambda: trackers.open_tracker("tensorboard", job)
thread = trackers.TrackerThread("tensorboard", open_it, folder=job.folder)
thread.add(points(1, 3), [])
while thread._rows or thread._tracker is None:
    time.sleep(0.01)
thread.add(points(4, 40), [])  # too much: a part is written
while "File too large" not in thread.problem:
    time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
thread.close()
assert thread.problem == "", thread.problem
"""


def test_tensorboard_has_every_point_once_after_a_full_disk(tmp_path: Path) -> None:
    """SEE-3: no file may be larger than 1000 bytes for a while, so a write ends within a record."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss")] == list(range(1, 41))


class BrokenTracker:
    """Refuses the first two attempts, like a service that is away for a while."""

    def __init__(self) -> None:
        self.attempts = 0
        self.rows: list[MetricRow] = []
        self.has_all = threading.Event()

    def write(self, rows: Sequence[MetricRow]) -> None:
        self.attempts += 1
        if self.attempts <= 2:
            raise ConnectionError("no route\nto host")
        self.rows += rows
        if self.rows[-1].step == 5:
            self.has_all.set()

    def close(self) -> None:
        raise RuntimeError("cannot close")


def test_a_tracker_that_fails_gets_all_rows_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 0.01)
    broken = BrokenTracker()
    thread = TrackerThread("wandb", lambda: broken, folder=tmp_path)
    thread.add(points(1, 5), [])
    assert broken.has_all.wait(60)
    assert [row.step for row in broken.rows] == [1, 2, 3, 4, 5] and broken.attempts == 3
    thread.close()
    assert thread.problem == "cannot close"
    job = TrackedJob("", tmp_path, {})
    never = TrackerThread("mlflow", lambda: open_tracker("nothing", job), folder=tmp_path)
    never.add(points(1, 2), [])
    never.close()
    assert "the job continues, and 2 values wait for mlflow" in never.problem


class ScriptedTracker:
    """Takes rows when the test lets it. The first `failures` attempts raise."""

    def __init__(self, failures: int = 0) -> None:
        self.rows: list[MetricRow] = []
        self.failures = failures
        self.entered, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.attempts = self.closed = 0

    def write(self, rows: Sequence[MetricRow]) -> None:
        self.attempts += 1
        self.entered.release()
        assert self.go_on.acquire(timeout=60)
        if self.attempts <= self.failures:
            raise ConnectionError("no route to host")
        self.rows += rows

    def close(self) -> None:
        self.closed += 1


class PacedThread(TrackerThread):
    """Waits after an error until the test ends the pause."""

    def __init__(self, tracker: ScriptedTracker, folder: Path) -> None:
        self.pauses: queue.Queue[float] = queue.Queue()
        self.over = threading.Semaphore(0)
        super().__init__("wandb", lambda: tracker, folder=folder)

    def _pause(self, seconds: float) -> None:
        self.pauses.put(seconds)
        assert self.over.acquire(timeout=60)


def test_new_rows_do_not_shorten_the_pause_after_an_error(tmp_path: Path) -> None:
    """It doubles with each error, up to ten minutes."""
    tracker = ScriptedTracker(failures=8)
    tracker.go_on.release(100)
    thread = PacedThread(tracker, tmp_path)
    thread.add(points(1, 1), [])
    found = []
    for step in range(2, 10):
        found.append(thread.pauses.get(timeout=60))
        thread.add(points(step, step), [])
        assert tracker.attempts == step - 1  # in a pause, whatever is added
        thread.over.release()
    assert found == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
    thread.close()
    assert [row.step for row in tracker.rows] == [*range(1, 10)]
    assert (thread.problem, tracker.closed) == ("", 1)


def test_the_end_of_the_job_ends_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "RETRY_SECONDS", 3600.0)
    tracker = ScriptedTracker(failures=1)
    tracker.go_on.release(2)
    thread = TrackerThread("wandb", lambda: tracker, folder=tmp_path)
    thread.add(points(1, 1), [])
    assert tracker.entered.acquire(timeout=60)
    thread.add(points(2, 2), [])
    thread.close()
    assert tracker.attempts == 2 and [row.step for row in tracker.rows] == [1, 2]


class GatheringThread(TrackerThread):
    """Lets rows come after a write until the test ends that."""

    def __init__(self, tracker: ScriptedTracker, folder: Path) -> None:
        self.gathers, self.over = threading.Semaphore(0), threading.Semaphore(0)
        super().__init__("wandb", lambda: tracker, folder=folder)

    def _gather(self) -> None:
        self.gathers.release()
        assert self.over.acquire(timeout=60)


def test_rows_of_some_seconds_are_written_together(tmp_path: Path) -> None:
    tracker = ScriptedTracker()
    tracker.go_on.release(100)
    thread = GatheringThread(tracker, tmp_path)
    assert thread.gathers.acquire(timeout=60)  # it has opened the tracker
    for step in range(1, 6):
        thread.add(points(step, step), [])
    assert tracker.attempts == 0
    thread.over.release()
    assert thread.gathers.acquire(timeout=60)
    assert tracker.attempts == 1 and [row.step for row in tracker.rows] == [*range(1, 6)]
    thread.add(points(6, 6), [])
    thread.over.release(2)
    thread.close()
    assert tracker.attempts == 2 and tracker.rows[-1].step == 6


def test_the_end_of_the_job_writes_the_last_rows_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "BATCH_SECONDS", 3600.0)
    tracker = ScriptedTracker()
    tracker.go_on.release(100)
    thread = TrackerThread("wandb", lambda: tracker, folder=tmp_path)
    for step in range(1, 6):
        thread.add(points(step, step), [])
    thread.close()
    assert (thread.problem, tracker.closed) == ("", 1)
    assert [row.step for row in tracker.rows] == [*range(1, 6)]


def test_rows_that_come_during_a_slow_write_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are so many that the oldest of them are dropped."""
    monkeypatch.setattr(trackers, "MAX_ROWS", 4)
    tracker = ScriptedTracker()
    thread = TrackerThread("wandb", lambda: tracker, folder=tmp_path)
    thread.add(points(1, 3), [])
    assert tracker.entered.acquire(timeout=60)
    thread.add(points(4, 9), [])  # while 1 to 3 are written
    tracker.go_on.release(2)
    thread.close()
    assert [row.step for row in tracker.rows] == [1, 2, 3, 6, 7, 8, 9]


MANAGERS = """
import json, os, signal, sys
from pathlib import Path
from tests.observe.test_trackers import points
from varuna.observe.history import ScalarPoint
from varuna.observe.history_file import HistoryKeeper
from varuna.observe.trackers.tracker import TrackerThread
folder = Path(sys.argv[1])
keeper = HistoryKeeper(folder, continues=True, monotonic=lambda: 0.0)

class Tracker:
    def write(self, rows):
        for row in rows:
            with (folder / "service").open("a") as file:
                file.write(json.dumps([row.step, sorted(row.values)]) + "\\n")

    def close(self):
        pass

def open_it():
    if sys.argv[2] == "away":
        raise ConnectionError("no route to host")
    return Tracker()

thread = TrackerThread("wandb", open_it, folder=folder)
for step in map(int, sys.argv[3:]):
    keeper.add(points(step, step), [ScalarPoint("accuracy", step, 1e9, 0.5)])
    steps, scalars = keeper.release(all_of_them=True)
    thread.add(steps, scalars)
if sys.argv[2] == "away":
    os.kill(os.getpid(), signal.SIGKILL)
thread.close()
"""


def test_a_killed_manager_neither_loses_nor_doubles_points(tmp_path: Path) -> None:
    """SEE-3: with a service that was away, and points that agents send again to the next manager."""

    def manage(service: str, *steps: int) -> int:
        command = [sys.executable, "-c", MANAGERS, tmp_path, service, *map(str, steps)]
        return subprocess.run(command, cwd=ROOT, timeout=120).returncode

    assert manage("there", 1, 2, 3) == 0
    assert manage("away", 2, 3, 4, 5, 6) == -signal.SIGKILL
    assert manage("there", 5, 6, 7) == 0
    assert manage("there") == 0
    rows = [json.loads(line) for line in (tmp_path / "service").read_text().splitlines()]
    own = ["loss", "samples_per_second", "step_seconds", "tokens_per_second"]
    assert sorted(step for step, names in rows if names == own) == [*range(1, 8)]
    assert sorted(step for step, names in rows if names == ["accuracy"]) == [*range(1, 8)]


def test_a_tracker_that_a_resumed_job_adds_gets_the_points_from_then_on(tmp_path: Path) -> None:
    """SEE-3: those of an earlier version have no file of what they took."""
    keeper = HistoryKeeper(tmp_path, continues=True, monotonic=lambda: 0.0)
    keeper.add(points(1, 3), [])
    keeper.release(all_of_them=True)
    tracker = ScriptedTracker()
    tracker.go_on.release(100)
    thread = TrackerThread("wandb", lambda: tracker, folder=tmp_path)
    thread.add(points(3, 5), [])
    thread.close()
    assert [row.step for row in tracker.rows] == [4, 5]


def test_a_run_is_finished_although_its_last_rows_could_not_be_written(tmp_path: Path) -> None:
    tracker = ScriptedTracker(failures=100)
    tracker.go_on.release(100)
    thread = TrackerThread("wandb", lambda: tracker, folder=tmp_path)
    thread.add(points(1, 2), [])
    thread.close()
    assert tracker.closed == 1 and "2 values wait for wandb" in thread.problem


def test_rows_have_the_units_of_their_names() -> None:
    steps = [StepPoint(3, 1.0, None, 0.5, 8, 0), StepPoint(4, 2.0, 0.25, 0.0, 8, 4)]
    scalars = [ScalarPoint("a", 3, 1.0, 0.5), ScalarPoint("b", 3, 1.0, 1.5)]
    first, second, third = rows_of(steps, scalars)
    assert str(first.values) == "{'loss': nan, 'step_seconds': 0.5, 'samples_per_second': 16.0}"
    assert second == (4, 2.0, {"loss": 0.25, "step_seconds": 0.0})
    assert third == (3, 1.0, {"a": 0.5, "b": 1.5})
    (without,) = rows_of([StepPoint(5, 3.0, None, 0.5, 8, has_loss=False)], [])
    assert without.values == {"step_seconds": 0.5, "samples_per_second": 16.0}


def test_a_scalar_with_the_name_of_a_curve_of_the_job_has_a_curve_of_its_own() -> None:
    """SEE-3: also if a tracker gets it together with the step."""
    names = ("loss", "step_seconds", "samples_per_second", "tokens_per_second", "loss/a")
    step, script = rows_of(points(3, 3), [ScalarPoint(name, 3, 1.0, 0.5) for name in names])
    assert {*step.values} == {*names[:4]}
    assert {*script.values} == {*(f"script/{name}" for name in names[:4]), "loss/a"}


def test_what_is_missing_is_refused_with_the_command_that_installs_it() -> None:
    with pytest.raises(ValueError, match="must be one of tensorboard, wandb, mlflow, trackio, not 'x'"):
        check_trackers(["tensorboard", "x"])
    with pytest.raises(ValueError, match=r"needs the package 'trackio' \(install it with: pip install 'varu"):
        check_trackers(["trackio"])
    with pytest.raises(ValueError, match="--metrics-port must be between 0 and 65535, not 70000"):
        ViewerOptions(metrics_port=70000).check()
    code = "import sys; sys.modules['prometheus_client'] = None\n"
    code += "from varuna.cli.status.viewers import ViewerOptions; ViewerOptions(metrics_port=0).check()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "--metrics-port needs the package 'prometheus-client' (install it with: pip" in done.stderr


def test_a_taken_port_is_an_error_of_the_endpoint(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(OSError, match="in use"):
        MetricsEndpoint(other.getsockname()[1], lambda: None, folder=tmp_path)


def test_counters_never_decrease_when_a_manager_resumes(tmp_path: Path) -> None:
    """SEE-3: its ledger is some seconds older than what Prometheus has."""
    found = []
    for losses, waiting, idle in ((3, 20.0, 1.0), (2, 5.0, 9.0), (4, 21.0, 2.0)):
        ledger = report_ledger(Ledger(begun_at=0.0, at=losses * 10.0))
        ledger = msgspec.structs.replace(ledger, lost_seconds={"waiting": waiting, "idle": idle})
        view = msgspec.structs.replace(view_of(machines=1, stages=1, steps=1), losses=losses, ledger=ledger)
        endpoint = MetricsEndpoint(0, lambda view=view: view, folder=tmp_path)  # type: ignore[misc]
        with urllib.request.urlopen(endpoint.url, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        counters = {one.name: [sample.value for sample in one.samples] for one in families}
        found.append((counters["varuna_losses"], counters["varuna_badput_seconds"]))
        endpoint.close()
    assert found == [([3.0], [20.0, 1.0]), ([3.0], [20.0, 9.0]), ([4.0], [21.0, 9.0])]


def test_strangers_cannot_use_up_the_endpoint(tmp_path: Path) -> None:
    """SEE-3: half requests, and names of other hosts that a website has bound to this machine."""
    endpoint = MetricsEndpoint(0, lambda: None, folder=tmp_path)
    port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    before = threading.active_count()
    clients = []
    try:
        for _ in range(3):
            for _ in range(MAX_CONNECTIONS):
                clients.append(socket.create_connection(("127.0.0.1", port), timeout=60))
                with suppress(OSError):  # it is closed already
                    clients[-1].sendall(b"GET /metrics HTTP/1.1\r\n")
            for host, status in (("localhost", 200), ("[::1]:9", 200), ("rebound.example", 403)):
                assert request_status(endpoint.url, host) == status, host  # beside the half requests
        assert all(is_closed(client) for client in clients)  # at once or after REQUEST_SECONDS
        wait_for(lambda: threading.active_count() <= before or None, "threads are left")
    finally:
        for client in clients:
            client.close()
    endpoint.close()


def test_a_client_that_sends_a_request_byte_by_byte_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit is that of the whole request."""
    monkeypatch.setattr(prometheus, "REQUEST_SECONDS", 1.0)
    endpoint = MetricsEndpoint(0, lambda: None, folder=tmp_path)
    port = int(endpoint.url.rsplit(":", 1)[1].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\n")

        def is_over() -> bool | None:
            try:
                client.sendall(b"x")
                return client.recv(1000) == b"" or None
            except TimeoutError:
                return None
            except OSError:
                return True

        wait_for(is_over, "the connection is open")
    endpoint.close()


def request_status(url: str, host: str) -> int:
    request = urllib.request.Request(url, headers={"Host": host})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: int = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    return found


def is_closed(client: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    with suppress(ConnectionError):
        return client.recv(1000) == b""
    return True


def test_logs_of_two_folders_with_one_name_are_two_runs(tmp_path: Path) -> None:
    """SEE-3: a folder keeps its name, so that its curves continue."""
    first, second = (tmp_path / parent / "logs" for parent in "ab")
    names = [run_name(folder) for folder in (first, second, first, second)]
    assert names[:2] == names[2:] and names[0] != names[1]
    (tmp_path / "file").touch()
    assert run_name(tmp_path / "file").startswith("file-")
