"""Cost of looking at a job: its steps with page, TensorBoard, Prometheus, `varuna.log` and trace, or without.

One job trains a small model on this machine, and both of its sides alternate in the order on, off, off, on:

- The manager and its page run, and are read by a tab and a scraper for 0.8 seconds, or are stopped (SIGSTOP).
- The worker records a step, its trace and a scalar, or nothing.

The first line compares wall times: steps that are recorded while the manager runs, with steps that are not
while it is stopped. One ratio comes from four turns. The second line compares the worker's CPU times of
adjacent steps, which other programs disturb less: one ratio comes from four steps. Both show the median of
all ratios with its 95 % confidence interval (bootstrap). The other lines are CPU times: of a worker's records
and of its trace, over 10,000 calls, of manager and page in each second on our side, and their sum: the factor
by which steps take longer on a machine all of whose cores train.
"""

import http.client
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.measure import Spread, spread
from benchmarks.report import Row
from tests.launch.jobs import environment
from varuna.environment import VarunaEnvironment
from varuna.morph.metrics.collect import MetricsCollector
from varuna.morph.metrics.log import log
from varuna.morph.metrics.worker import StepMetrics
from varuna.observe.trace_file import StepTracer

TRAIN = """
import mmap, os, sys, time
import torch
from torch import nn
import varuna
from varuna import SampleOrder, Varuna
from varuna.morph.metrics.ring import MetricsWriter
from varuna.observe.trace_file import StepTracer

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(768, 768) for _ in range(6)))

    def forward(self, x):
        return self.layers(x).pow(2).mean()

torch.manual_seed(1)
x = torch.randn(512, 768)
model = Varuna(Net(), os.environ["VARUNA_STAGE_TO_RANK_MAP"], {"x": x[:2]}, 64, 64, device="cpu", seed=3)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model.set_optimizer(optimizer)
order = SampleOrder(512, batch_size=64, seed=5)
with open("turn", "rb") as file:
    turn = mmap.mmap(file.fileno(), 2, access=mmap.ACCESS_READ)
seen, writers = [], {1: model._metrics._writer, 0: MetricsWriter()}
tracers = {1: model._tracer, 0: StepTracer(None)}
for step, inputs in model.batches(lambda samples: {"x": x[samples]}, order):
    side, number = turn[0], turn[1]
    if side == 2:
        break
    recorded = (1, 0, 0, 1)[step % 4]
    model._metrics._writer = writers[recorded]
    vars(model)["_tracer"] = tracers[recorded]
    begun, used = time.perf_counter(), time.process_time()
    loss, _ = model.step(inputs)
    optimizer.step()
    model.zero_grad()
    if recorded:
        varuna.log({"accuracy": 1 - loss})
    seen.append((number, side, recorded, time.perf_counter() - begun, time.process_time() - used))
    if len(seen) == 20:
        print("training", flush=True)
for row in seen[20:]:
    print("time", *row)
"""
LOOKED_AT = ["--track", "tensorboard", "--metrics-port", "0", "--page", "--page-port", "0"]
TURN_SECONDS = 0.8
ORDER = (1, 0, 0, 1)
"""Sides of four turns: on, off, off, on."""
INTERVALS = 64
"""Intervals of a step of 16 micro-batches: forward, backward, sends and waits."""
READ_SECONDS = 30.0
"""Time limit for an answer of the page or the endpoint."""
UNUSED_STEPS = 1
"""First steps of a turn, in which the side may change."""


def observing(repeats: int, *, quick: bool) -> list[Row]:
    watched = turns(8 if quick else 64 * repeats)
    calls = 100 if quick else 10_000
    records = [record_seconds(calls) for _ in range(repeats)]
    traces = [trace_seconds(calls) for _ in range(repeats)]
    usual = spread([1e3 * four.off for four in watched.cpu])
    cores = len(os.sched_getaffinity(0))
    added = 1e3 * (median(records) + median(traces)) / usual.median
    return [
        compared(
            "wall time of a step with page, TensorBoard, Prometheus, varuna.log and trace", watched.wall
        ),
        compared("CPU time of a worker's step with varuna.log and trace", watched.cpu),
        part("CPU time of the worker's records of a step and a scalar", records, usual),
        part(f"CPU time of the worker's trace of a step with {INTERVALS} intervals", traces, usual),
        Row(
            benchmark="observing",
            case="CPU time of the manager and its page, with one tab open and one scrape in 0.8 s",
            against="one core",
            unit="ms/s",
            ours=spread([1e3 * one for one in watched.shares]),
            other=Spread(1e3, 1e3, 1e3),
            ratio=spread(watched.shares),
        ),
        Row(
            benchmark="observing",
            case=f"all CPU time above, if the {cores} cores of the machine train",
            against="that step",
            unit="ms",
            ours=spread([usual.median * (1 + added + share / cores) for share in watched.shares]),
            other=usual,
            ratio=spread([1 + added + share / cores for share in watched.shares]),
            target=1.005,
        ),
    ]


def compared(case: str, fours: "Sequence[Four]") -> Row:
    """Compare both sides of the job."""
    return Row(
        benchmark="observing",
        case=f"{case} (median, 95 % interval of {len(fours)} ratios)",
        against="nothing is recorded or shown",
        unit="ms",
        ours=spread([1e3 * four.on for four in fours]),
        other=spread([1e3 * four.off for four in fours]),
        ratio=confidence([four.on / four.off for four in fours]),
        target=1.005,
    )


def part(case: str, seconds: Sequence[float], step: Spread) -> Row:
    """Compare a part of a worker's step with the whole step."""
    return Row(
        benchmark="observing",
        case=case,
        against="that step",
        unit="ms",
        ours=spread([1e3 * one for one in seconds]),
        other=step,
        ratio=spread([1e3 * one / step.median for one in seconds]),
        target=0.005,
    )


def confidence(ratios: Sequence[float]) -> Spread:
    """Return the median and its 95 % confidence interval."""
    drawn = random.Random(1)
    medians = sorted(median(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    return Spread(median(ratios), medians[50], medians[-51])


class Four(NamedTuple):
    """Mean seconds of a step on both sides, in four turns or steps."""

    on: float
    off: float


class Watched(NamedTuple):
    wall: list[Four]  # of four turns
    cpu: list[Four]  # of four steps
    shares: list[float]  # CPU seconds of manager and page for each second, by turn


class Step(NamedTuple):
    """A step of the job, as the worker prints it."""

    turn: int
    side: int  # 1: the manager runs
    recorded: int  # 1: the worker records it
    wall: float
    cpu: float


def turns(count: int) -> Watched:
    """Run the job for so many turns."""
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as name:
        folder = Path(name)
        (folder / "machines").write_text("127.0.0.1\n")
        (folder / "train.py").write_text(TRAIN)
        (folder / "turn").write_bytes(b"\x01\x00")
        command = [sys.executable, "-m", "varuna.run_varuna", "--machine_list", "machines"]
        command += ["--gpus_per_node", "1", "--batch_size", "64", "--chunk_size", "64", "--nstages", "1"]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                [*command, *LOOKED_AT, "train.py"],
                cwd=folder,
                env=environment(folder),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            shares = alternate(job, folder, count)
        except BaseException:
            job.terminate()
            raise
        finally:
            job.send_signal(signal.SIGCONT)
        assert job.wait() == 0, (folder / "output").read_text()
        lines = re.findall(r"time (\d+) (\d) (\d) (\S+) (\S+)", (folder / "output").read_text())
        steps = [Step(*map(int, line[:3]), *map(float, line[3:])) for line in lines]
        return Watched(four_turns(steps), four_steps(steps), shares)


def alternate(job: "subprocess.Popen[bytes]", folder: Path, count: int) -> list[float]:
    """Change sides `count` times after the first steps, then end the job. Return the shares of `Watched`."""
    while "[rank 0] training" not in (text := (folder / "output").read_text()):
        assert job.poll() is None, text
        time.sleep(0.2)
    (page,) = folder.glob("varuna_logs/*/page.url")
    (metrics,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", text)
    readers = [PageTab(page.read_text().strip()), Scraper(metrics)]
    watching = [job.pid, *page_processes(job.pid)]
    assert len(watching) == 2, "the manager has no page"
    shares = []
    with (folder / "turn").open("r+b", buffering=0) as turn:
        for number in range(count):
            side = ORDER[number % len(ORDER)]
            for pid in watching:
                os.kill(pid, signal.SIGCONT if side else signal.SIGSTOP)
            turn.seek(0)
            turn.write(bytes([side, number % 256]))
            for reader in readers:
                reader.turn(side)
            begun, used = time.perf_counter(), sum(map(process_seconds, watching))
            time.sleep(TURN_SECONDS)
            if side:
                share = sum(map(process_seconds, watching)) - used
                shares.append(share / (time.perf_counter() - begun))
        for reader in readers:
            reader.check()
        for pid in watching:
            os.kill(pid, signal.SIGCONT)
        turn.seek(0)
        turn.write(b"\x02")
    return shares


def process_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, all threads."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def page_processes(manager: int) -> list[int]:
    """Return the processes of the manager's page."""
    children = Path(f"/proc/{manager}/task/{manager}/children").read_text().split()
    lines = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, line in lines.items() if b"page" in line]


class JobReaderThread:
    """Reads an address of the job in a thread. `check` raises the error of that thread."""

    def __init__(self) -> None:
        self.answers = 0  # that were whole and valid
        self._error: Exception | None = None
        self._begun = threading.Event()  # an answer or an error has come
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def turn(self, side: int) -> None:
        """Begin a turn. On side 1 the manager runs."""
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Raise unless everything was answered so far."""
        self.turn(0)
        if not self.answers:
            raise RuntimeError(f"{type(self).__name__} has no answer: the benchmark does not measure reading")

    def _run(self) -> None:
        try:
            self.read()
        except Exception as error:
            self._error = error
        finally:
            self._begun.set()

    def read(self) -> None:
        raise NotImplementedError


class PageTab(JobReaderThread):
    """Reads the page as the script of an open tab: its stream, and the curve at every update."""

    def __init__(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        token = urllib.parse.parse_qs(address.query)["token"][0]
        self._host, self._headers = address.netloc, {"Authorization": f"Bearer {token}"}
        super().__init__()
        self._begun.wait(READ_SECONDS)
        self.check()

    def read(self) -> None:
        curves = http.client.HTTPConnection(self._host, timeout=READ_SECONDS)
        for line in self._get(http.client.HTTPConnection(self._host, timeout=READ_SECONDS), "/api/stream"):
            if line.startswith(b"data: "):
                self._get(curves, "/api/curve?axis=step&points=600").read()
                self.answers += 1
                self._begun.set()
        raise RuntimeError("the page has closed the stream")

    def _get(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the page answers {path} with status {answer.status}")
        return answer


class Scraper(JobReaderThread):
    """Reads the endpoint for Prometheus once in each turn on side 1."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wanted = threading.Semaphore(0)
        super().__init__()

    def turn(self, side: int) -> None:
        super().turn(side)
        if side:
            self._wanted.release()

    def read(self) -> None:
        while self._wanted.acquire():
            with urllib.request.urlopen(self._url, timeout=READ_SECONDS) as answer:
                if b"varuna_step" not in answer.read():
                    raise RuntimeError(f"{self._url} has no metrics of a job")
            self.answers += 1


def four_turns(steps: Sequence[Step]) -> list[Four]:
    """Return the wall times of each four turns. Those in which a turn has no step are left out.

    If none is left, as in a short run on a slow machine, return the means of all steps.
    """
    means: list[tuple[int, int, float]] = []  # turn, side, seconds
    for (turn, side), group in groupby(steps, key=lambda step: (step.turn, step.side)):
        times = [step.wall for step in list(group)[UNUSED_STEPS:] if step.recorded == side]
        if times:
            means.append((turn, side, mean(times)))
    fours = []
    for start in range(len(means) - 3):
        four = means[start : start + 4]
        if four[0][0] % 4 == 0 and tuple(side for _, side, _ in four) == ORDER:
            fours.append(Four(*(mean(time for _, side, time in four if side == one) for one in (1, 0))))
    return fours or [means_of(steps, "wall")]


def means_of(steps: Sequence[Step], field: str) -> Four:
    """Return the means of all steps with and without records; of all steps if there are none of a kind."""
    sides = ([step for step in steps if step.recorded == side] or steps for side in (1, 0))
    return Four(*(mean(getattr(step, field) for step in found) for found in sides))


def four_steps(steps: Sequence[Step]) -> list[Four]:
    """Return the CPU times of each four steps."""
    fours = []
    for start in range(len(steps) - 3):
        four = steps[start : start + 4]
        if tuple(step.recorded for step in four) == ORDER:
            fours.append(Four(*(mean(step.cpu for step in four if step.recorded == one) for one in (1, 0))))
    return fours or [means_of(steps, "cpu")]


def record_seconds(count: int) -> float:
    """Return the CPU time that a worker needs for the records of one step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank_0.progress"
        collector = MetricsCollector(path)
        os.environ.update(VarunaEnvironment(progress_file=str(path)).write())
        try:
            metrics = StepMetrics()
            begun = time.process_time()
            for step in range(1, count + 1):
                metrics.note_inputs({"x": 0})
                metrics.finish_step(step, 0.5, seconds=0.1, samples=64, is_first=True)
                log({"accuracy": 0.5})
            return (time.process_time() - begun) / count
        finally:
            for name in VarunaEnvironment(progress_file=str(path)).write():
                del os.environ[name]
            collector.close()


def trace_seconds(count: int) -> float:
    """Return the CPU time that a worker needs to write the trace of one step."""
    entries = [("forward", number, 0.001 * number, 0.001 * number + 0.0009) for number in range(INTERVALS)]
    with tempfile.TemporaryDirectory() as folder:
        tracer = StepTracer(Path(folder) / "rank_0.trace")
        begun = time.process_time()
        for step in range(count):
            tracer.leave(step, 0, 0, 1, lambda: list(entries))
            tracer.enter(0.5, uninterrupted=True)
        seconds = time.process_time() - begun
        tracer.close()
    return seconds / count
