"""`decide` looks at few of thousands of machines, and decides as if it looked at all of them (B5, PRO-3)."""

from collections.abc import Iterable
from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from varuna.morph import commands, events
from varuna.morph.accounting import TRAINING, Accountant, _joiners
from varuna.morph.decide import decide_all
from varuna.morph.members import Members, is_steady
from varuna.morph.reports import (
    Reports,
    SameReports,
    distinct_reports,
    machines_that_fail,
    merge_reports,
    reported_machines,
    total_of_reports,
)
from varuna.morph.rules.decision import Decision
from varuna.morph.state import Generation, JobState, Member, WorkerProgress
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate import job as simulated
from varuna.simulate.costs import Costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace
from varuna.types import Layout

PLACES = [f"p{index}" for index in range(7)]


def ready_by_looking_at_all(
    decision: Decision,
    *,
    without_flapping: bool = False,
    without_trials: bool = False,
    with_kept: bool = False,
) -> tuple[str, ...]:
    last, preparation = decision.state.generation, decision.state.preparation
    free = {None}
    if last is not None and decision.state.active:
        free.add(last.number)  # type: ignore[arg-type]
    if preparation is not None:
        free.add(preparation.generation.number)  # type: ignore[arg-type]
    ready = []
    for name, member in decision.state.members.items():
        works = decision.state.active and last is not None and name in last.machines
        works = works and name not in decision.state.ended
        if not (member.agent and member.warm) or not (member.listed or (with_kept and member.kept)):
            continue
        if member.dismissed_at is not None or member.drained or member.workers not in free:
            continue
        if member.leave_by is not None and (decision.now >= member.leave_at or not works):
            continue
        if decision.now < member.welcome_at and without_flapping and not works:
            continue
        if decision.now < member.trial_until and without_trials and not works:
            continue
        ready.append(name)
    first = [name for name in last.machines if name in ready] if last is not None else []
    return (*first, *(name for name in ready if name not in first))


def survivors_by_looking_at_all(decision: Decision, lost: Iterable[int]) -> dict[str, tuple[int, ...]]:
    gone, found = set(lost), {}
    for machine, ranks in zip(decision.generation.machines, decision.generation.ranks, strict=True):
        left = tuple(rank for rank in ranks if rank not in gone)
        if left == ranks or (left and machine not in decision.state.ended):
            found[machine] = left
    return found


def plain(state: JobState) -> JobState:
    """The same state in plain dictionaries, of which every entry is looked at."""
    return msgspec.structs.replace(
        state,
        members=dict(state.members),
        progress=dict(state.progress),
        reports_entered=dict(state.reports_entered),
    )


def decide_twice(
    state: JobState, batch: Iterable[events.Event], now: float
) -> tuple[JobState, tuple[commands.Command, ...]]:
    batch = list(batch)
    after, found = decide_all(state, batch, now)
    rules = "varuna.morph.rules"
    with (
        mock.patch("varuna.morph.members.is_steady", return_value=False),
        mock.patch(f"{rules}.membership.ready_machines", ready_by_looking_at_all),
        mock.patch(f"{rules}.phases.ready_machines", ready_by_looking_at_all),
        mock.patch(f"{rules}.hot.ready_machines", ready_by_looking_at_all),
        mock.patch(f"{rules}.joiners.ready_machines", ready_by_looking_at_all),
        mock.patch(f"{rules}.hot.surviving_ranks", survivors_by_looking_at_all),
        mock.patch(f"{rules}.survivors.surviving_ranks", survivors_by_looking_at_all),
    ):
        expected, ordered = decide_all(plain(state), batch, now)
    assert found == ordered
    assert plain(after) == plain(expected)
    if isinstance(after.members, Members):
        unsteady = {name for name, member in after.members.items() if not is_steady(member)}
        assert after.members.unsteady == unsteady
    return after, found


def is_held_back(member: Member, state: JobState, clock: float) -> bool:
    held = member.name in state.waiting.split(", ") and clock < state.wait_over_at
    return held or clock < max(member.welcome_at, member.trial_until)


def shares_by_looking_at_all(accountant: Accountant, state: JobState, clock: float) -> dict[str, float]:
    found = dict.fromkeys(("working", "between", "waiting", "idle"), 0.0)
    fractions = accountant._working_fractions(state)
    trains = state.phase in TRAINING and not state.holding
    joiners = _joiners(state)
    for name, member in state.members.items():
        if not accountant._is_paid(member):
            continue
        if trains and name in fractions:
            found["working"] += fractions[name]
            found["idle"] += 1 - fractions[name]
        elif not member.warm or name in joiners or (trains and is_held_back(member, state, clock)):
            found["waiting"] += 1
        elif trains or member.leaves or member.dismissed_at is not None:
            found["idle"] += 1
        else:
            found["between"] += 1
    return found


divide = Accountant._divide


def divide_twice(accountant: Accountant, state: JobState, clock: float) -> None:
    expected = shares_by_looking_at_all(accountant, state, clock)
    divide(accountant, state, clock)
    ledger = accountant.ledger
    assert {name: getattr(ledger.shares, name) for name in expected} == pytest.approx(expected)
    assert sum(expected.values()) == ledger.num_machines[-1][1] == len(ledger.paid_since)
    with_agents = {name for name, member in state.members.items() if member.agent}
    assert with_agents <= ledger.connected


@st.composite
def markets(draw: st.DrawFn) -> MarketTrace:
    times = sorted(draw(st.lists(st.integers(0, 2000), min_size=1, max_size=12, unique=True)))
    live: set[str] = set()
    changes = []
    for at in times:
        toggled = draw(st.sets(st.sampled_from(PLACES), min_size=1))
        removed, added = tuple(sorted(toggled & live)), tuple(sorted(toggled - live))
        live ^= toggled
        noticed = tuple(sorted(live - set(added)))[: draw(st.integers(0, 1))]
        changes.append(MachineChange(at, removed, added, noticed))
    return MarketTrace("drawn", tuple(changes), times[-1] + 500)


FLAPPING = MarketTrace(
    "p0 is on trial",
    (
        MachineChange(0, added=("p0", "p1", "p2", "p4")),
        *(MachineChange(at, removed=("p0",)) for at in (6, 13, 52)),
        *(MachineChange(at, added=("p0",)) for at in (7, 16, 322)),
    ),
    822,
)
FLAPPING = msgspec.structs.replace(FLAPPING, changes=tuple(sorted(FLAPPING.changes, key=lambda one: one.at)))


@settings(max_examples=60, deadline=None)
@given(
    trace=markets(),
    notice=st.sampled_from([0.0, 30.0]),
    stages=st.integers(1, 2),
    devices=st.integers(1, 2),
    pause=st.sampled_from([0.5, 20.0]),
    hot=st.booleans(),
    greedy=st.booleans(),
)
@example(trace=FLAPPING, notice=0.0, stages=1, devices=1, pause=0.5, hot=False, greedy=False)
def test_few_machines_are_looked_at_and_all_decisions_are_the_same(
    trace: MarketTrace, notice: float, stages: int, devices: int, pause: float, hot: bool, greedy: bool
) -> None:
    request = LayoutRequest(batch_size=64, num_stages=stages, microbatch_size=1)
    planner = CachedPlanner(request, devices_per_machine=devices, steps={4: 2.0})
    costs = Costs(join_seconds=5, start_seconds=5, leave_seconds=2, morph_seconds=pause, prepare_seconds=10)
    job = simulated.SimulatedJob(
        trace,
        planner,
        costs,
        devices_per_machine=devices,
        notice_seconds=notice,
        hot=hot,
        greedy=greedy,
    )
    with (
        mock.patch("varuna.simulate.job.decide_all", side_effect=decide_twice) as decided,
        mock.patch.object(Accountant, "_divide", autospec=True, side_effect=divide_twice) as divided,
    ):
        job.run()
    assert decided.called and divided.called


@given(st.data())
def test_one_report_for_all_workers_answers_as_a_report_of_each(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    names = tuple(f"m{index}" for index in range(len(sizes)))
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    ranks = tuple(tuple(range(first, end)) for first, end in pairwise(ends))
    layout = Layout((tuple(range(ends[-1])),), ends[-1], 1)
    generation = Generation(1, names, ranks, names, layout, None, names[0], 1)
    worker = WorkerProgress(0, iteration=3, activity=3, generation=1, hot=True)
    machines = st.sets(st.sampled_from(names))
    same = SameReports(worker, generation, missing=data.draw(machines))
    each = {
        name: tuple(msgspec.structs.replace(worker, rank=rank) for rank in generation.ranks_of[name])
        for name in names
        if name not in same.missing
    }
    for _ in range(data.draw(st.integers(0, 2))):
        changed = {
            name: (WorkerProgress(generation.ranks_of[name][0], iteration=4, activity=9),)
            for name in data.draw(machines)
        }
        without = data.draw(machines)
        merged = merge_reports(same, changed, without=without)
        assert isinstance(merged, SameReports)
        same, each = merged, dict(merge_reports(each, changed, without=without))
    assert same == each and len(same) == len(each) and reported_machines(same) == each.keys()

    def without_rank(reports: Reports) -> set[str]:
        return {repr(msgspec.structs.replace(worker, rank=0)) for worker in distinct_reports(reports)}

    assert without_rank(same) == without_rank(each)
    assert total_of_reports(same, lambda one: one.activity) == total_of_reports(
        each, lambda one: one.activity
    )
    for passes in (lambda one: one.hot, lambda one: not one.hot):
        fail = [list(machines_that_fail(found, generation, passes)) for found in (same, each)]
        assert fail[0] == fail[1]
