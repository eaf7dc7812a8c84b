"""Curves of a job without a manager: rank 0 writes its steps and scalars to a file, and to trackers.

The file is `metrics.jsonl` in the log folder of `varuna run`. For jobs that others start, such as torchrun,
the variable `track` of varuna/environment.py says where. A thread writes once a second, so no step waits.
"""

import atexit
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from varuna.environment import VarunaEnvironment, misspelt_variables, variable_name
from varuna.errors import check_name
from varuna.files import make_private_folder, write_atomic
from varuna.morph.metrics.ring import MetricsWriter, open_shared
from varuna.observe.history import ScalarPoint, StepPoint, finite
from varuna.observe.history_file import HistoryKeeper
from varuna.observe.trackers.tracker import EXTRAS, TrackedJob, TrackerThread, check_trackers, open_tracker

WRITE_SECONDS = 1.0
RUN_FILE = "run"
"""File in the log folder with the name of the run."""
FILE_ONLY = "file"
"""Name that adds no tracker: `metrics.jsonl` is written in any case."""
TRACK, LOG_DIR = variable_name("track"), variable_name("log_dir")
_PROGRESS_FILE = variable_name("progress_file")
_current = MetricsWriter()
log = logging.getLogger("varuna")


class LocalTarget(NamedTuple):
    """Place of the curves of this process."""

    folder: Path
    trackers: tuple[str, ...]


def local_target(environment: Mapping[str, str]) -> LocalTarget | None:
    """Return the target that the environment names; None: nothing is kept. Unknown names raise ValueError."""
    if environment.get("RANK", "0") != "0":
        return None
    known = VarunaEnvironment.read(environment)
    names = [name.strip() for name in (known.track or "").split(",") if name.strip()]
    for name in names:
        check_name(TRACK, name, (FILE_ONLY, *EXTRAS))
    if not names and known.log_dir is None:
        return None
    trackers = tuple(name for name in names if name != FILE_ONLY)
    check_trackers(trackers, option=f"{TRACK}:")
    folder = Path(known.log_dir or Path("varuna_logs") / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}"))
    return LocalTarget(folder.absolute(), trackers)


class LocalMetricsWriter(MetricsWriter):
    """Keeps records in a file and passes them to trackers. Only the process that opened it writes."""

    watched = True

    def __init__(self, target: LocalTarget) -> None:
        self.folder = target.folder
        self._pid = os.getpid()
        self._steps: deque[StepPoint] = deque()
        self._scalars: deque[ScalarPoint] = deque()
        with suppress(OSError):  # HistoryKeeper reports it
            make_private_folder(target.folder)
        self._keeper = HistoryKeeper(target.folder, continues=True, monotonic=time.monotonic)
        job = TrackedJob(run_name(target.folder), target.folder, {"log_dir": str(target.folder)})
        self._trackers = [
            TrackerThread(name, partial(open_tracker, name, job), folder=job.folder)
            for name in target.trackers
        ]
        self._problems: set[str] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def step(self, step: int, loss: float | None, *, seconds: float, samples: int, tokens: int = 0) -> None:
        self.last_step = step
        known, value = loss is not None, None if loss is None else finite(loss)
        self._steps.append(StepPoint(step, time.time(), value, seconds, samples, tokens, known))

    def scalar(self, name: str, value: float, step: int) -> None:
        if os.getpid() == self._pid:  # not in a process of a data loader
            self._scalars.append(ScalarPoint(name, step, time.time(), finite(value)))

    def close(self) -> None:
        """Write the last records. Runs when the process ends."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        for tracker in self._trackers:
            tracker.close()
        self._report_problems()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(WRITE_SECONDS)
            self._write()
            self._report_problems()

    def _write(self) -> None:
        steps = [self._steps.popleft() for _ in range(len(self._steps))]
        scalars = [self._scalars.popleft() for _ in range(len(self._scalars))]
        self._keeper.add(steps, scalars)
        new_steps, new_scalars = self._keeper.release(all_of_them=True)
        if new_steps or new_scalars:
            for tracker in self._trackers:
                tracker.add(new_steps, new_scalars)

    def _report_problems(self) -> None:
        """Print each problem once."""
        found = {"metrics": self._keeper.problem, **{one.name: one.problem for one in self._trackers}}
        for name, problem in found.items():
            if problem and name not in self._problems:
                self._problems.add(name)
                log.warning("%s: %s", name, problem)


def run_name(folder: Path) -> str:
    """Return a name that is different for each log folder, and stays: it tells runs of a service apart."""
    path = folder / RUN_FILE
    with suppress(OSError, UnicodeDecodeError):
        if name := path.read_text("utf-8").strip():
            return name
    name = f"{folder.name}-{secrets.token_hex(4)}"
    with suppress(OSError):  # a full disk: HistoryKeeper reports it
        write_atomic(path, name, private=True)
    return name


def is_dropped(environment: Mapping[str, str]) -> bool:
    """Return whether the values of this job go nowhere. Other ranks than 0 leave them to rank 0."""
    return environment.get("RANK", "0") == "0" and not environment.get(_PROGRESS_FILE)


def open_metrics() -> MetricsWriter:
    """Return the writer that the environment names: to the agent, to files, or to nothing."""
    global _current
    read = os.environ.get  # single variables: reading all of them takes 50 µs
    if path := read(_PROGRESS_FILE):
        _current = open_shared(path)
    else:
        _current = _open_local(read(TRACK, ""), read(LOG_DIR, ""), read("RANK", "0"))
    return _current


def current_metrics() -> MetricsWriter:
    """Return the writer that was opened last; open one if there is none, or if it goes to nothing."""
    return _current if _current.watched else open_metrics()


@cache
def _open_local(track: str, log_dir: str, rank: str) -> MetricsWriter:
    """Open the files of this process once. The arguments are the variables that decide about them."""
    if rank == "0" and VarunaEnvironment.read(os.environ).stage_to_rank_map is None:  # no command has checked
        for text in misspelt_variables(os.environ):
            log.warning(text)
    target = local_target({TRACK: track, LOG_DIR: log_dir, "RANK": rank})
    return MetricsWriter() if target is None else LocalMetricsWriter(target)
