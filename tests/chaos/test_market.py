"""Playing a trace on a job that is not real (B5, PRO-2)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.chaos import market
from varuna.chaos.injector import MachineListing
from varuna.chaos.job import JobStuck
from varuna.chaos.market import MarketPlayer, names_of
from varuna.simulate.traces import parse_trace

PATIENCE = 100.0


class FakeClock:
    """Seconds that pass only while the player sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    time = monotonic = now

    def sleep(self, _: float) -> None:
        self.seconds += 0.5


class FakeMachine:
    def __init__(self, name: str) -> None:
        self.name = self.address = name

    def kill(self) -> None: ...

    def boot(self) -> None: ...


class FakeJob:
    """Makes a step each second until `stops_at`, and again from `goes_on_at`."""

    patience_seconds = PATIENCE
    generation = 1

    def __init__(self, clock: FakeClock, stops_at: float, goes_on_at: float) -> None:
        self._clock, self._stops_at, self._goes_on_at = clock, stops_at, goes_on_at
        self.steps: dict[tuple[int, int], float] = {}

    def read_output(self) -> bool:
        now = self._clock.seconds
        if now < self._stops_at or now >= self._goes_on_at:
            self.steps.setdefault((1 if now < self._stops_at else 2, int(now)), now)
        return False

    def answering(self) -> None:
        return None

    def request(self, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(ok=True)


def play(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    rows: str,
    *,
    stages: int,
    stops_at: float = 1e9,
    goes_on_at: float = 1e9,
    notice: float = 0.0,
) -> tuple[bool, float]:
    """Return whether the job trained on, and the seconds that were played."""
    trace = parse_trace(f"seconds,event,machine\n{rows}".encode(), source="market")
    clock = FakeClock()
    monkeypatch.setattr(market, "time", clock)
    monkeypatch.setattr(market, "clock", clock)
    machines: dict[str, Any] = {name: FakeMachine(name) for name in names_of(trace)}
    listing = MachineListing(folder / "machines", list(machines.values()))
    listing.off = [one for name, one in machines.items() if name not in trace.changes[0].added]
    run: Any = SimpleNamespace(
        job=FakeJob(clock, stops_at, goes_on_at),
        listing=listing,
        stages=stages,
        history=[],
        count_redone=lambda: None,
    )
    player = MarketPlayer(run, trace, machines, notice_seconds=notice)
    return player.play(started=0.0, on_progress=lambda *_: None), clock.seconds


LOSS = "0,add,a\n0,add,b\n0,add,c\n50,remove,c\n500,end,\n"


def test_a_job_that_makes_no_step_after_a_removal_is_stuck(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PRO-2: two machines are left, which are enough for two stages."""
    with pytest.raises(JobStuck, match="no step for 100 s, although there are enough machines"):
        play(monkeypatch, tmp_path, LOSS, stages=2, stops_at=50)


def test_a_job_with_too_few_machines_is_not_stuck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PRO-2: a machine with a notice may have left long before its removal."""
    assert play(monkeypatch, tmp_path, LOSS, stages=3, stops_at=50) == (True, 500)
    assert play(monkeypatch, tmp_path, LOSS, stages=3, stops_at=0, goes_on_at=99) == (True, 500)
    announced = LOSS.replace("50,remove,c", "400,remove,c")
    assert play(monkeypatch, tmp_path, announced, stages=3, stops_at=50, notice=350) == (True, 500)


def test_the_time_counts_from_when_there_are_enough_machines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PRO-2"""
    back = LOSS.replace("500,end", "300,add,c\n500,end")
    assert play(monkeypatch, tmp_path, back, stages=3, stops_at=50, goes_on_at=390) == (True, 500)
    with pytest.raises(JobStuck):
        play(monkeypatch, tmp_path, back, stages=3, stops_at=50)


def test_a_change_at_the_end_of_the_trace_must_be_survived_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PRO-2: the job has the usual time for a step, also after the trace."""
    late = LOSS.replace("50,remove,c", "490,remove,c")
    assert play(monkeypatch, tmp_path, late, stages=2, stops_at=490, goes_on_at=560) == (True, 560.5)
    with pytest.raises(JobStuck):
        play(monkeypatch, tmp_path, late, stages=2, stops_at=490)
