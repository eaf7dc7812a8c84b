"""Cost of looking at a job: its steps with page, TensorBoard, Prometheus, `varuna.log` and trace, or without.

The first line compares the wall times of the steps of one job, which has a page with an open tab and is
scraped. In some turns, its page is stopped (SIGSTOP), and its worker writes no records, so manager and agent
have no more to do than those of a job that nobody watches. One ratio comes from four turns of three seconds,
in the order on, off, off, on. Two jobs are not compared, because equal jobs differ by more than the effect.

The second line is the worker's part: CPU times of adjacent steps of one job, which are recorded or not, in
the order on, off, off, on. Other programs disturb it less. Both show the median of all ratios with its 95 %
confidence interval (bootstrap). The other lines are CPU times: of a worker's records and of its trace, after
work that fills the caches as a step does; of manager, page and agent of a watched job and of one that nobody
watches, which train at the same time; and the sum of what the watched job needs more: the factor by which
steps take longer on a machine all of whose cores train. All lines together take about seven minutes.
"""

import http.client
import json
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Spread, spread
from benchmarks.report import Row
from tests.launch.jobs import environment
from varuna.environment import VarunaEnvironment
from varuna.morph.metrics.collect import MetricsCollector
from varuna.morph.metrics.log import log
from varuna.morph.metrics.worker import StepMetrics
from varuna.observe.record import Recorder
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
    ended, number = turn[0], turn[1]
    if ended:
        break
    recorded = RECORDED[number % 4 if BY_TURN else step % 4]
    model._metrics._writer = writers[recorded]
    vars(model)["_tracer"] = tracers[recorded]
    begun, used = time.perf_counter(), time.process_time()
    loss, _ = model.step(inputs)
    optimizer.step()
    model.zero_grad()
    if recorded:
        varuna.log({"accuracy": 1 - loss})
    seen.append((number, recorded, time.perf_counter() - begun, time.process_time() - used))
    if len(seen) == 20:
        print("training", os.getpid(), flush=True)
for row in seen[20:]:
    print("time", *row)
"""
LOOKED_AT = ["--track", "tensorboard", "--metrics-port", "0", "--page", "--page-port", "0"]
TURN_SECONDS = 3.0
"""Two turns on and two off follow each other: few rows of TensorBoard are written in a turn that is off."""
ALWAYS, NEVER, IN_TURN = (1, 1, 1, 1), (0, 0, 0, 0), (1, 0, 0, 1)
"""Four steps, or turns: 1 is recorded."""
SCRAPE_SECONDS = 15.0
"""Time between two scrapes; Prometheus' own default is a minute."""
CURVE_SECONDS = 1.5
"""An open tab asks for the curve at the first update after this time, as chart.js does."""
LOG_SECONDS = 2.0
"""Time in which an open tab asks for new lines of the worker it shows."""
INTERVALS = 64
"""Intervals of a step of 16 micro-batches: forward, backward, sends and waits."""
STEP_SECONDS = 0.02
"""Time of these steps: the traces of about a quarter of a second are written together."""
OTHER_BYTES = 48 * 2**20
"""Bytes that the compute of a step reads and writes."""
READ_SECONDS = 30.0
"""Time limit for an answer of the page or the endpoint."""
UNUSED_STEPS = 1
"""First and last steps of a turn: they may be on and off."""


def observing(repeats: int, *, quick: bool) -> list[Row]:
    walls = take_turns(4, 0.5) if quick else take_turns(16 * repeats, TURN_SECONDS)
    shares = watching_shares(1 if quick else repeats, 2.0 if quick else SCRAPE_SECONDS)
    cpu = steps_in_turn(3.0 if quick else 10.0 * repeats)
    calls = 20 if quick else 200
    records = [record_seconds(calls) for _ in range(repeats)]
    traces = [trace_seconds(calls) for _ in range(repeats)]
    usual = spread([1e3 * four.off for four in cpu])
    cores = len(os.sched_getaffinity(0))
    added = 1e3 * (median(records) + median(traces)) / usual.median
    more = [one.watched - one.plain for one in shares]
    return [
        compared("wall time of a step with page, TensorBoard, Prometheus, varuna.log and trace", walls),
        compared("CPU time of a worker's step with varuna.log and trace", cpu),
        part("CPU time of the worker's records of a step and a scalar, after compute", records, usual),
        part(
            f"CPU time of the worker's trace of {INTERVALS} intervals, after compute",
            traces,
            usual,
        ),
        Row(
            benchmark="observing",
            case=f"CPU time of manager, page and agent: one tab is open, one scrape in {SCRAPE_SECONDS:g} s",
            against="manager and agent of a job that nobody watches",
            unit="ms/s",
            ours=spread([1e3 * one.watched for one in shares]),
            other=spread([1e3 * one.plain for one in shares]),
            ratio=spread([one.watched / one.plain for one in shares]),
        ),
        Row(
            benchmark="observing",
            case=f"all CPU time for it, if the {cores} cores of the machine train",
            against="that step",
            unit="ms",
            ours=spread([usual.median * (1 + added + share / cores) for share in more]),
            other=usual,
            ratio=spread([1 + added + share / cores for share in more]),
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


class WatchingShares(NamedTuple):
    """CPU seconds in a second of manager, page and agent of both jobs."""

    watched: float
    plain: float


class Step(NamedTuple):
    """A step of a job, as the worker prints it."""

    turn: int
    recorded: int  # 1: the worker records it
    wall: float
    cpu: float


class ObservedJob:
    """A job on this machine."""

    def __init__(
        self, folder: Path, options: Sequence[str], recorded: Sequence[int], *, by_turn: bool
    ) -> None:
        self.folder, self.number = folder, 0
        folder.mkdir()
        (folder / "machines").write_text("127.0.0.1\n")
        (folder / "train.py").write_text(f"RECORDED, BY_TURN = {tuple(recorded)}, {by_turn}\n{TRAIN}")
        (folder / "turn").write_bytes(b"\x00\x00")
        command = [sys.executable, "-m", "varuna.run_varuna", "--machine_list", "machines"]
        command += ["--gpus_per_node", "1", "--batch_size", "64", "--chunk_size", "64", "--nstages", "1"]
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(
                [*command, *options, "train.py"],
                cwd=folder,
                env=environment(folder),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.pids: list[int] = []

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def wait_until_training(self) -> None:
        while "[rank 0] training" not in self.output:
            assert self.process.poll() is None, self.output
            time.sleep(0.2)
        self.pids = list(descendants(self.process.pid))
        (self._worker,) = map(int, re.findall(r"\[rank 0\] training (\d+)", self.output))

    @property
    def watching(self) -> list[int]:
        """All processes but the worker: manager, page and agent."""
        return [pid for pid in self.pids if pid != self._worker]

    def watching_seconds(self) -> float:
        return sum(map(process_seconds, self.watching))

    def signal_page(self, number: int) -> None:
        for pid in page_processes(self.process.pid):
            os.kill(pid, number)

    def note_turn(self, number: int, *, ended: bool = False) -> None:
        with (self.folder / "turn").open("r+b", buffering=0) as turn:
            turn.write(bytes([ended, number % 256]))

    def end(self) -> list[Step]:
        """Let the script end, and return its steps."""
        self.note_turn(0, ended=True)
        assert self.process.wait() == 0, self.output
        lines = re.findall(r"time (\d+) (\d) (\S+) (\S+)", self.output)
        return [Step(*map(int, line[:2]), *map(float, line[2:])) for line in lines]


@contextmanager
def observed_jobs(
    *kinds: tuple[Sequence[str], Sequence[int]], by_turn: bool = False
) -> Iterator[list[ObservedJob]]:
    """Start jobs with these options and recorded steps or turns; yield them when they train."""
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as name:
        folders = (Path(name) / str(number) for number in range(len(kinds)))
        jobs = [ObservedJob(next(folders), *kind, by_turn=by_turn) for kind in kinds]
        try:
            for job in jobs:
                job.wait_until_training()
            yield jobs
        except BaseException:
            for job in jobs:
                job.signal_page(signal.SIGCONT)
                job.process.terminate()
            raise


def take_turns(count: int, seconds: float) -> list[Four]:
    """Let a job train, watched and recorded in some turns and not in others, so many times."""
    with observed_jobs((LOOKED_AT, IN_TURN), by_turn=True) as (job,):
        with looked_at(job) as scraper:
            begun = scraped = time.monotonic()
            for number in range(count):
                job.note_turn(number)
                is_on = IN_TURN[number % len(IN_TURN)]
                job.signal_page(signal.SIGCONT if is_on else signal.SIGSTOP)
                if is_on and (number == 0 or time.monotonic() >= scraped + SCRAPE_SECONDS):
                    scraped = time.monotonic()
                    scraper.read_once()
                time.sleep(max(0.0, begun + seconds * (number + 1) - time.monotonic()))
            job.signal_page(signal.SIGCONT)
        steps = job.end()
    return four_turns(*([step for step in steps if step.recorded == one] for one in (1, 0)))


def watching_shares(windows: int, seconds: float) -> list[WatchingShares]:
    """Return the CPU seconds of manager, page and agent of both jobs in each second that both train."""
    shares = []
    with observed_jobs((LOOKED_AT, ALWAYS), ((), NEVER)) as jobs:
        with looked_at(jobs[0]) as scraper:
            for _ in range(windows):
                begun, used = time.perf_counter(), [job.watching_seconds() for job in jobs]
                scraper.read_once()
                time.sleep(seconds)
                used = [job.watching_seconds() - before for job, before in zip(jobs, used, strict=True)]
                spent = time.perf_counter() - begun
                shares.append(WatchingShares(*(one / spent for one in used)))
        for job in jobs:
            job.end()
    return shares


@contextmanager
def looked_at(job: ObservedJob) -> "Iterator[Scraper]":
    """Open the page of a job in a tab, and yield what scrapes it."""
    (page,) = job.folder.glob("varuna_logs/*/page.url")
    (metrics,) = re.findall(r"http://127\.0\.0\.1:\d+/metrics", job.output)
    assert page_processes(job.process.pid), "the manager has no page"
    tab, scraper = PageTab(page.read_text().strip()), Scraper(metrics)
    yield scraper
    for reader in (tab, scraper):
        reader.check()


def steps_in_turn(seconds: float) -> list[Four]:
    """Let one job record some steps and not others; return the CPU times of each four steps."""
    with observed_jobs((LOOKED_AT, IN_TURN)) as (job,):
        time.sleep(seconds)
        return four_steps(job.end())


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all processes that it has started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from descendants(int(child))


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

    def check(self) -> None:
        """Raise unless everything was answered so far."""
        if self._error is not None:
            raise self._error
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
    """Reads the page as the script of an open tab: its stream, and at every update what has changed."""

    def __init__(self, url: str) -> None:
        address = urllib.parse.urlsplit(url)
        token = urllib.parse.parse_qs(address.query)["token"][0]
        self._host, self._headers = address.netloc, {"Authorization": f"Bearer {token}"}
        super().__init__()
        self._begun.wait(READ_SECONDS)
        self.check()

    def read(self) -> None:
        others = http.client.HTTPConnection(self._host, timeout=READ_SECONDS)
        stream = http.client.HTTPConnection(self._host, timeout=READ_SECONDS)
        timeline, curve_at, log_at, read_bytes = 0, time.monotonic(), time.monotonic(), 0
        for line in self._get(stream, "/api/stream"):
            if not line.startswith(b"data: "):
                continue
            update = json.loads(line.removeprefix(b"data: "))
            if time.monotonic() >= curve_at:
                curve_at = time.monotonic() + CURVE_SECONDS
                self._get(others, "/api/curve?axis=step&points=600").read()
            if update["timeline"] != timeline:
                timeline = update["timeline"]
                self._get(others, "/api/timeline").read()
            if time.monotonic() >= log_at:
                log_at = time.monotonic() + LOG_SECONDS
                log = f"/api/log?generation=1&rank=0&stream=out&start={read_bytes}"
                read_bytes = json.loads(self._get(others, log).read())["stop"]
            self.answers += 1
            self._begun.set()
        if update["link"] != "over":
            raise RuntimeError("the page has closed the stream")

    def _get(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        connection.request("GET", path, headers=self._headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the page answers {path} with status {answer.status}")
        return answer


class Scraper(JobReaderThread):
    """Reads the endpoint for Prometheus."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._wanted = threading.Semaphore(0)
        super().__init__()

    def read_once(self) -> None:
        """Start to read it. Raise the error of an earlier time."""
        if self._error is not None:
            raise self._error
        self._wanted.release()

    def read(self) -> None:
        while self._wanted.acquire():
            with urllib.request.urlopen(self._url, timeout=READ_SECONDS) as answer:
                if b"varuna_step" not in answer.read():
                    raise RuntimeError(f"{self._url} has no metrics of a job")
            self.answers += 1


def four_turns(on: Sequence[Step], off: Sequence[Step]) -> list[Four]:
    """Return the wall times of each two turns of both kinds. Those without steps are left out.

    If none is left, as in a short run on a slow machine, return the means of all steps.
    """
    turns = [turn_means(steps) for steps in (on, off)]
    fours = [Four(*(mean(two) for two in pairs)) for pairs in zip(*map(in_pairs, turns), strict=False)]
    return fours or [Four(*(mean(step.wall for step in steps) for steps in (on, off)))]


def turn_means(steps: Sequence[Step]) -> list[float]:
    """Return the mean wall time of the steps of each turn."""
    found = []
    for _, group in groupby(steps, key=lambda step: step.turn):
        times = [step.wall for step in list(group)[UNUSED_STEPS:-UNUSED_STEPS]]
        if times:
            found.append(mean(times))
    return found


def in_pairs(values: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2], strict=False))


def four_steps(steps: Sequence[Step]) -> list[Four]:
    """Return the CPU times of each four steps."""
    fours = []
    for start in range(len(steps) - 3):
        four = steps[start : start + 4]
        if tuple(step.recorded for step in four) == IN_TURN:
            fours.append(Four(*(mean(step.cpu for step in four if step.recorded == one) for one in (1, 0))))
    return fours


def seconds_after_compute(work: Callable[[int], None], count: int, prepare: Callable[[int], None]) -> float:
    """Return the mean CPU time of `work` if the caches are full of other data, as after a step's compute."""
    others = np.zeros(OTHER_BYTES // 8)
    seconds = []
    for number in range(1, count + 1):
        prepare(number)
        others += 1.0
        time.thread_time()  # its own code is in the caches again
        begun = time.thread_time()
        work(number)
        seconds.append(time.thread_time() - begun)
    return mean(seconds)


def record_seconds(count: int) -> float:
    """Return the CPU time that a worker needs for the records of one step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank_0.progress"
        collector = MetricsCollector(path)
        variables = VarunaEnvironment(progress_file=str(path)).write()
        os.environ.update(variables)
        try:
            metrics = StepMetrics()

            def work(step: int) -> None:
                metrics.note_inputs({"x": 0})
                metrics.finish_step(step, 0.5, seconds=0.1, samples=64, is_first=True)
                log({"accuracy": 0.5})

            return seconds_after_compute(work, count, lambda step: None)
        finally:
            for name in variables:
                del os.environ[name]
            collector.close()


def trace_seconds(count: int) -> float:
    """Return the CPU time that a worker needs for the trace of one step, with its share of the writing."""
    recorder = Recorder()

    def prepare(step: int) -> None:
        recorder.clear()
        for number in range(INTERVALS):
            recorder.add("F", number, step + 0.001 * number, step + 0.001 * number + 0.0009)

    def work(step: int) -> None:
        tracer.leave(step, 0, 0, 1, recorder.snapshot())
        tracer.enter(STEP_SECONDS * step, uninterrupted=True)

    with tempfile.TemporaryDirectory() as folder:
        tracer = StepTracer(Path(folder) / "rank_0.trace")
        seconds = seconds_after_compute(work, count, prepare)
        tracer.close()
    return seconds
