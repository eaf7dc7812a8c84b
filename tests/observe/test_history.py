"""History of a job: one monotone curve in bounded memory, in a file that survives restarts and full disks."""

import errno
import itertools
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from varuna.files import LineFile
from varuna.observe import history_file
from varuna.observe.history import MAX_NAMES, MAX_STEPS, JobHistory, ScalarPoint, StepPoint
from varuna.observe.history_file import HOLD_SECONDS, HistoryKeeper, read_history


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def point(step: int, loss: float | None = 0.5) -> StepPoint:
    return StepPoint(step, 1000.0 + step, loss, 0.25, 8, 64)


def test_a_history_has_each_step_once_and_knows_the_speed() -> None:
    """SEE-3"""
    history = JobHistory()
    assert (history.last, history.step_seconds, history.samples_per_second) == (None, None, None)
    for step in (1, 2, 3, 2, 3, 4):  # steps 2 and 3 run again after a restart
        history.add(point(step, None if step == 3 else step / 10))
    assert all(found.has_loss for found in history.steps()), "a loss that is not finite is known"
    assert history.steps() == [point(1, 0.1), point(2, 0.2), point(3, None), point(4, 0.4)]
    assert history.steps(after=2) == [point(3, None), point(4, 0.4)]
    assert (history.step_seconds, history.samples_per_second, history.tokens_per_second) == (0.25, 32, 256)
    history.begin_layout()
    assert not history.add(point(2)) and history.newest == point(2), "it runs again, and its speed is known"
    assert history.samples_per_second == 32
    history.begin_layout()
    assert history.step_seconds is None and history.last == point(4, 0.4)


def test_a_loss_that_is_not_known_stays_so_in_the_file(tmp_path: Path) -> None:
    """SEE-3: a job whose script computes its loss."""
    keeper = HistoryKeeper(tmp_path, continues=False, monotonic=Clock())
    points = [point(1, None), StepPoint(2, 1002.0, None, 0.25, 8, 64, has_loss=False)]
    keeper.add(points, [])
    keeper.release(all_of_them=True)
    assert keeper.history.steps() == read_history(tmp_path).steps() == points


def test_ten_million_steps_and_many_scalars_stay_below_ten_megabytes() -> None:
    """SEE-3: a tenth of the steps is measured; the memory is that of all of them."""
    history = JobHistory()
    tracemalloc.start()
    for step in range(1, 1_000_001):
        history.add(point(step))
    for name in range(MAX_NAMES + 50):
        for step in range(5000 if name < 20 else 1):
            history.add_scalar(ScalarPoint(f"name {name}", step, 0.0, 1.0))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 2.5e6, size  # all 256 names at 1,024 points have 6.3 MB
    steps = [found.step for found in history.steps()]
    assert len(steps) <= MAX_STEPS + 1 and steps[-1] == 1_000_000
    strides = {b - a for a, b in itertools.pairwise(steps[:-1])}
    assert len(strides) == 1, "points are evenly chosen"
    assert len(history.steps(100)) <= 101
    assert len(history.scalar_names) == MAX_NAMES and history.dropped == 50


def test_of_several_ranks_the_lowest_one_that_logs_counts() -> None:
    history = JobHistory()
    for rank, step, value in ((2, 1, 0.2), (1, 2, 0.1), (2, 3, 0.2), (1, 3, math.inf), (1, 4, None)):
        history.add_scalar(ScalarPoint("accuracy", step, 0.0, value), rank)
    values = [(found.step, found.value) for found in history.scalar("accuracy")]
    assert values == [(1, 0.2), (2, 0.1), (3, None), (4, None)]
    assert history.last_scalars() == {"accuracy": None} and history.scalar("unknown") == []


def test_a_file_continues_after_a_restart_and_skips_damaged_lines(tmp_path: Path) -> None:
    """SEE-3: a late report of the machine that led before fills the gap; other gaps do not wait long."""
    clock = Clock()
    first = HistoryKeeper(tmp_path, continues=False, monotonic=clock)
    first.add([point(1), point(2), point(5)], [ScalarPoint("a", 2, 0.0, 0.5)])
    steps, scalars = first.release()
    assert [one.step for one in steps] == [1, 2] and not scalars
    first.add([point(3), point(4)], [])
    assert [one.step for one in first.release()[0]] == [3, 4, 5]
    first.add([point(8)], [])
    clock.now += HOLD_SECONDS
    assert first.release() == ([point(8)], [ScalarPoint("a", 2, 0.0, 0.5)])
    with (tmp_path / history_file.NAME).open("ab") as file:
        file.write(b'{"step":9,"at":')  # a crash
    second = HistoryKeeper(tmp_path, continues=True, monotonic=clock)
    second.add([point(8), point(9, None)], [])
    second.release()
    found = read_history(tmp_path)
    assert [one.step for one in found.steps()] == [1, 2, 3, 4, 5, 8, 9]
    assert found.last == point(9, None) and found.scalar("a") == [ScalarPoint("a", 2, 0.0, 0.5)]


def test_a_full_disk_stops_nothing_and_the_lines_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    keeper = HistoryKeeper(tmp_path, continues=False, monotonic=clock)
    with monkeypatch.context() as full:

        def refuse(file: LineFile, line: bytes) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(LineFile, "append", refuse)
        keeper.add([point(1)], [])
        keeper.release()
    assert "metrics.jsonl cannot be written: No space left on device" in keeper.problem
    clock.now += history_file.RETRY_SECONDS
    keeper.add([point(2)], [])
    keeper.release()
    assert keeper.problem == "" and [one.step for one in read_history(tmp_path).steps()] == [1, 2]


def test_the_file_of_a_long_job_grows_more_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_file, "LINES_PER_STRIDE", 10)
    keeper = HistoryKeeper(tmp_path, continues=False, monotonic=Clock())
    keeper.add(map(point, range(1, 71)), [])
    keeper.release()
    steps = [one.step for one in read_history(tmp_path).steps()]
    assert steps == [*range(1, 11), *range(11, 31, 2), *range(33, 70, 4)]
