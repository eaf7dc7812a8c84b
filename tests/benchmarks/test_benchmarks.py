"""The benchmarks run to their end and say what they measured; how fast anything is, no test can tell."""

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.cases import BENCHMARKS
from benchmarks.jitter import Jitter
from benchmarks.makespan import play
from benchmarks.measure import Spread, measured_within, spread
from benchmarks.memory import SavedBytes
from benchmarks.morphing import row
from benchmarks.observing import PageTab
from benchmarks.report import Row, Saved, markdown
from varuna.schedule import build

ROOT = Path(__file__).parent.parent.parent


PARTS = 3
"""Parts of the benchmarks that run side by side."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_benchmark_runs_from_end_to_end(part: int, tmp_path: Path) -> None:
    names = list(BENCHMARKS)[part::PARTS]
    command = [sys.executable, "-m", "benchmarks", *names, "--quick", "--into", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    table = (tmp_path / "results.md").read_text()
    for name in names:
        saved = msgspec.json.decode((tmp_path / "results" / f"{name}.json").read_bytes(), type=Saved)
        assert saved.rows and all(row.ours.median > 0 for row in saved.rows)
        assert f"| {name} |" in table
        if name == "memory":
            assert all(row.reached for row in saved.rows), "V19: a stage held more than its schedule's bound"


def test_a_benchmark_that_does_not_exist_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks", "nonsense"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 2 and "nonsense" in run.stderr and "one-process" in run.stderr


class Refusing(BaseHTTPRequestHandler):
    """A page that knows no token."""

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *arguments: object) -> None: ...


def test_a_page_that_does_not_answer_fails_the_benchmark_of_its_cost() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(RuntimeError, match="status 403"):
            PageTab(f"http://127.0.0.1:{server.server_address[1]}/?token=wrong")
        server.shutdown()


def test_a_target_is_judged_by_the_printed_median() -> None:
    def row(ratio: float, cpu: float) -> Row:
        one = spread([1.0])
        return Row(
            benchmark="b",
            case="c",
            against="a",
            unit="ms",
            ours=one,
            other=one,
            ratio=spread([ratio]),
            cpu_ratio=spread([cpu]),
            target=0.95,
            cpu_target=1.0,
        )

    assert row(0.954, 1.0).reached
    assert not row(0.96, 1.0).reached
    assert not row(0.90, 1.01).reached
    assert "| NO |" in markdown([row(0.96, 1.0)])


def test_a_measurement_that_takes_too_long_has_fewer_runs_and_says_how_many() -> None:
    runs: list[int] = []

    def measure() -> float:
        runs.append(len(runs))
        return 1.0 + runs[-1]

    assert measured_within(float("inf"), 3, measure) == [1.0, 2.0, 3.0]
    found = measured_within(0.0, 3, measure)
    assert found == [4.0] and len(runs) == 4
    line = markdown([row("a worker is killed", found, [8.0])]).splitlines()[-1]
    assert "| a worker is killed; runs: 1 |" in line


def test_the_spread_is_the_quartiles() -> None:
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.parametrize("stages, microbatches", [(1, 3), (2, 5), (4, 32)])
def test_with_equal_times_the_makespan_is_the_closed_form(stages: int, microbatches: int) -> None:
    """V23's closed form: (M + P - 1) × (forward + backward)."""
    rows = build("1f1b", stages=stages, microbatches=microbatches).rows
    durations = {i: {"F": 1.0, "B": 2.0}[i.op] for row in rows for i in row}
    assert play(rows, durations) == (microbatches + stages - 1) * 3.0


def test_saved_bytes_are_counted_once_and_given_back() -> None:
    weight = torch.ones(4, requires_grad=True)
    saved = SavedBytes([weight])
    with saved.watch():
        made = (weight * 2).exp()  # keeps its result: 16 bytes
        total = (made * made).sum()  # keeps the same memory, twice
    assert (saved.now, saved.most) == (16, 16)
    total.backward()  # type: ignore[no-untyped-call]
    assert saved.now == 0


def test_both_sides_get_the_same_delays_and_ranks_different_ones() -> None:
    jitter = Jitter(0.001)
    first = [jitter.of_rank(0)(i) for i in range(100)]
    assert first == [jitter.of_rank(0)(i) for i in range(100)]
    assert first != [jitter.of_rank(1)(i) for i in range(100)]
    assert 0.0005 < sum(first) / 100 < 0.002
