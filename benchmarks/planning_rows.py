"""The planner's figures as rows of the report."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean
from typing import Any

from benchmarks.measure import Spread, spread
from benchmarks.planning_runs import (
    GIVES_BACK,
    GLIMPSE,
    TRAININGS,
    bubbles,
    peak_bytes,
    predicted_bytes,
    take_profile,
)
from benchmarks.planning_search import LAYERS, equal_stages, in_a_new_process
from benchmarks.report import Row
from tests.pool import Pool
from varuna.types import Profile, ScheduleName

SEARCHES = {4096: 1.0, 16384: 5.0}
"""Devices, and the seconds in which their plan is to be found."""
BUBBLES: dict[ScheduleName, float | None] = {"zero-bubble-2x": 3.5, "zero-bubble": None, "1f1b": None}
"""Per cent to stay within."""


def planning(run: Callable[..., list[Any]], repeats: int, *, quick: bool) -> list[Row]:
    rows = []
    repeats = min(repeats, 5)
    for devices, seconds in {4096: 1.0}.items() if quick else SEARCHES.items():
        answers = [in_a_new_process(devices) for _ in range(repeats + 1)][1:]  # numba's cache is there now
        case = f"search, {devices} devices, {LAYERS} layers"
        first = spread([1e3 * answer.first for answer in answers])
        again = spread([1e3 * answer.again for answer in answers])
        rows.append(_row(f"{case}, in a new process", "what is to be reached", "ms", first, 1e3 * seconds))
        rows.append(_row(f"{case}, asked again", "what is to be reached", "ms", again, 1e3 * seconds))
    depth, microbatches = (4, 16) if quick else (64, 1024)
    times = [1e3 * equal_stages("1f1b", depth, microbatches)[1] for _ in range(repeats + 1)][1:]
    case = f"one simulation, P={depth}, M={microbatches}"
    rows.append(_row(case, "what is to be reached", "ms", spread(times), 20.0))
    return rows + _bubbles(run, repeats, quick=quick)


def _bubbles(run: Callable[..., list[Any]], repeats: int, *, quick: bool) -> list[Row]:
    rows = []
    depth, microbatches = (2, 4) if quick else (8, 32)
    for schedule, most in BUBBLES.items():
        predicted = 100 * equal_stages(schedule, depth, microbatches)[0]
        found = run(bubbles, depth, schedule, depth, microbatches, min(repeats, 3))
        measured = spread([100 * mean(ranks) for ranks in zip(*found, strict=True)])
        case = f"bubble on the engine, P={depth}, M={microbatches}, {schedule} (simulated {predicted:.1f} %)"
        against = "the simulated" if most is None else "what is to be reached"
        rows.append(_row(case, against, "%", measured, most or predicted, judged=most is not None))
    return rows


def planning_memory(*, quick: bool) -> list[Row]:
    rows = []
    trainings = GLIMPSE if quick else TRAININGS
    profiles: dict[tuple[str, str], Profile] = {}
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder, _gives_back():
        for index, trained in enumerate(trainings):
            kind = (trained.size.name, trained.optimizer)
            if kind not in profiles:
                [profiles[kind]] = _run_fresh(take_profile, 1, trained, f"{folder}/{index}")
            peaks = _run_fresh(peak_bytes, trained.depth * trained.width, trained)
            for stage, predicted in enumerate(predicted_bytes(trained, profiles[kind])):
                peak = max(peaks[stage :: trained.depth])
                measured = spread([peak / 1e6])
                case = f"memory in training, {trained}, stage {stage}"
                rows.append(_row(case, "the forecast", "MB", measured, predicted / 1e6, judged=False))
    off = [100 * abs(row.other.median / row.ours.median - 1) for row in rows]
    rows.append(_row(f"memory, worst error of {len(off)} stages", "10 %", "%", spread([max(off)]), 10.0))
    return rows


def _run_fresh(task: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    pool = Pool()
    try:
        return pool.run(task, world, *args, timeout=600)
    finally:
        pool.close()


@contextmanager
def _gives_back() -> Iterator[None]:
    """For processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in GIVES_BACK}
    os.environ.update(GIVES_BACK)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _row(case: str, against: str, unit: str, ours: Spread, other: float, *, judged: bool = True) -> Row:
    ratio = Spread(ours.median / other, ours.low / other, ours.high / other) if other else spread([0.0])
    return Row(
        benchmark="planning-memory" if unit == "MB" or case.startswith("memory") else "planning",
        case=case,
        against=against,
        unit=unit,
        ours=ours,
        other=spread([other]),
        ratio=ratio,
        target=1.0 if judged else None,
    )
