"""Faults and the report about them, without a job (B5, PRO-2)."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.chaos.faults.machines import lose_all_machines
from varuna.chaos.injector import LEFT_OUT, InjectedFault
from varuna.chaos.leftovers import Leftovers
from varuna.chaos.report import ChaosReport
from varuna.chaos.undisturbed import LossComparison


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_all_machines_are_lost_and_come_back_also_if_the_job_needs_each(count: int, stages: int) -> None:
    """PRO-2: with D = 1 on each machine, the job runs only once all of them are back."""
    returns: list[list[str]] = []
    machines = [f"machine {number}" for number in range(count)]
    run: Any = SimpleNamespace(
        all_machines=machines,
        stages=stages,
        random=random.Random(5),
        any_death=lambda: True,
        at_work=lambda: None,
        happens=lambda what: None,
        lose=lambda lost, dies: None,
        job=SimpleNamespace(wait_for=lambda text: None),
        bring_back=lambda back, died: returns.append(list(back)),
        recovers=lambda: None,
    )
    lose_all_machines(run)
    first, last = returns
    assert len(first) >= stages and sorted(first + last) == machines


@pytest.mark.parametrize(
    ("whats", "plays_trace", "exit_code"),
    [
        (["kill -9 of the worker of a"], False, 0),
        (["kill -9 of the worker of a", f"{LEFT_OUT}no checkpoint"], False, 0),
        ([f"{LEFT_OUT}no checkpoint"], False, 1),
        ([""], False, 1),
        ([], False, 1),
        ([], True, 0),
    ],
)
def test_a_run_without_a_fault_proves_nothing(whats: list[str], plays_trace: bool, exit_code: int) -> None:
    """PRO-2: the script ended before the first fault, or none was possible."""
    report = ChaosReport(
        outcome="finished",
        problem="",
        seed=1,
        machines=2,
        seconds=3.0,
        steps=9,
        generations=1,
        faults=tuple(InjectedFault("kill-worker", what) for what in whats),
        steps_redone=0,
        samples_redone=0,
        losses=LossComparison(steps=9, tolerance=1e-3),
        left_behind=Leftovers(),
        plays_trace=plays_trace,
    )
    assert report.exit_code == exit_code
    assert ("no fault has happened" in report.verdict) == (exit_code == 1)
    left_out = sum(not what or what.startswith(LEFT_OUT) for what in whats)
    assert any("did not happen" in line for line in report.lines()) == bool(left_out)
