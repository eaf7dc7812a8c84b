"""Faults and the report about them, without a job (B5, PRO-2)."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.chaos.faults.machines import lose_all_machines
from varuna.chaos.injector import LEFT_OUT, InjectedFault, Injector, goes_on_without
from varuna.chaos.leftovers import Leftovers
from varuna.chaos.market import has_faults
from varuna.chaos.report import ChaosReport
from varuna.chaos.run import ChaosRun
from varuna.chaos.undisturbed import LossComparison
from varuna.morph.protocol.messages import MachineStatus, WorkerStatus
from varuna.secure.framing import FramingError
from varuna.simulate.traces import parse_trace


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
    ("whats", "trace", "exit_code"),
    [
        (["kill -9 of the worker of a"], None, 0),
        (["kill -9 of the worker of a", f"{LEFT_OUT}no checkpoint"], None, 0),
        ([f"{LEFT_OUT}no checkpoint"], None, 1),
        ([""], None, 1),
        ([], None, 1),
        ([], "0,add,a\n0,add,b\n900,end,", 0),
        ([], "0,add,a\n500,notice,a\n900,end,", 0),
        ([], "0,add,a\n0,add,b\n500,remove,b\n900,end,", 1),
        (["removed: b"], "0,add,a\n0,add,b\n500,remove,b\n900,end,", 0),
    ],
)
def test_a_run_without_a_fault_proves_nothing(whats: list[str], trace: str | None, exit_code: int) -> None:
    """PRO-2: the script ended before the first fault, or none was possible."""
    text = f"seconds,event,machine\n{trace}\n".encode()
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
        needs_faults=trace is None or has_faults(parse_trace(text, source="trace")),
    )
    assert report.exit_code == exit_code
    assert ("no fault has happened" in report.verdict) == (exit_code == 1)
    left_out = sum(not what or what.startswith(LEFT_OUT) for what in whats)
    assert any("did not happen" in line for line in report.lines()) == bool(left_out)


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(), FramingError("closed"), ValueError("no contact")]
)
@pytest.mark.parametrize(("code", "outcome"), [(0, "finished"), (1, "failed")])
def test_a_job_that_ends_before_it_is_stopped_has_a_report(error: Exception, code: int, outcome: str) -> None:
    """PRO-2: its manager is gone when the time is over."""

    def request(what: str, *, why: str) -> None:
        raise error

    job = SimpleNamespace(
        wait_for_generation=lambda after: None,
        wait_for_steps=lambda count: None,
        answering=lambda: None,
        request=request,
        wait_for_ended=lambda: code,
        lines=["the last line"],
    )
    listing = SimpleNamespace(add=lambda *machines: None, off=[])
    injector: Any = SimpleNamespace(job=job, start_clock=lambda: None, listing=listing)
    run: Any = SimpleNamespace(
        _request=SimpleNamespace(trace=None),
        _schedule=lambda injector: iter(()),
        _written_ledger=lambda: None,
    )
    played = ChaosRun._play(run, injector, {})
    assert (played.outcome, played.problem) == (outcome, "the last line" if code else "")


def test_faults_wait_for_the_workers_of_machines_that_a_resumed_manager_has_not_heard() -> None:
    """PRO-2"""
    here, there = (SimpleNamespace(address=one, name=one, outer_pid=lambda pid: pid) for one in "ab")
    worker = WorkerStatus(rank=0, pid=7, iteration=1, compute_seconds=0.0, step_seconds=0.0)
    unheard, heard = (MachineStatus("a", "at work", 1, 0.1, workers) for workers in ((), (worker,)))
    leaving = MachineStatus("b", "leaving", 1, 0.1, (worker,))
    answers = [SimpleNamespace(machines=(one, leaving)) for one in (unheard, heard, unheard, heard)]
    job = SimpleNamespace(
        patience_seconds=60.0,
        read_all=lambda: None,
        answering=lambda: answers.pop(0),
        status=lambda: answers.pop(0),
    )
    injector: Any = Injector.__new__(Injector)
    vars(injector).update(job=job, all_machines=[here, there], _choose=lambda found, count: found[:count])
    (chosen,) = injector.at_work()
    assert chosen is here and len(answers) == 2
    assert injector.worker_pid(here) == 7 and not answers


def test_a_machine_leaves_when_its_workers_have_ended_whatever_else_changes_meanwhile() -> None:
    """PRO-2: it was put back when another change, which had begun before, was done."""
    worker = WorkerStatus(rank=0, pid=7, iteration=1, compute_seconds=0.0, step_seconds=0.0)
    joins = MachineStatus("b", "at work", 1, 0.1, (worker,))
    states = [
        MachineStatus("a", "at work", 1, 0.1, (worker,)),
        MachineStatus("a", "leaving", 1, 0.1, (worker,)),
    ]
    answers: list[Any] = [SimpleNamespace(machines=(one, joins)) for one in states]
    answers += [None, SimpleNamespace(machines=(joins,))]
    job = SimpleNamespace(patience_seconds=60.0, read_all=lambda: None, answering=lambda: answers.pop(0))
    injector: Any = Injector.__new__(Injector)
    injector.job = job
    injector.wait_until_left([SimpleNamespace(address="a", name="a")])
    assert not answers


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("10.0.0.12, 10.0.0.4, in place (10.0.0.4 joins; 10.0.0.1 leaves)", True),
        ("10.0.0.1, 10.0.0.4, in place (10.0.0.4 joins)", False),
        ("10.0.0.4, 10.0.0.1, from step 10 (10.0.0.2 was lost)", False),
    ],
)
def test_a_job_goes_on_without_a_machine_that_leaves_if_another_one_is_ready_in_time(
    place: str, expected: bool
) -> None:
    """PRO-2: the fault waited for the loss of this machine."""
    leaves: Any = SimpleNamespace(address="10.0.0.1")
    line = f"varuna: generation: 16: 2 stages x 1 replica, batch 48 in micro-batches of 4 on {place}"
    assert goes_on_without([leaves], line) == expected
    assert not goes_on_without([leaves], f"varuna: notice: {place}")
