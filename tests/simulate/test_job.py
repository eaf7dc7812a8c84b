"""Simulated jobs: the manager's decisions on made-up markets, and their ledgers (B5, B6, PRO-3, PRO-4)."""

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import assume, given, settings

from tests.morph.test_accounting import check_accounts
from varuna.observe.ledger import Ledger, amounts_by_cause, paid_seconds, report_ledger
from varuna.plan.search.choose import LayoutRequest
from varuna.simulate.compare import POLICIES, Question, best_interval, compare, simulate_policy
from varuna.simulate.costs import PUBLISHED_RESTART, Costs, calibrate
from varuna.simulate.job import SimulatedJob
from varuna.simulate.job_events import MeasuredEvents
from varuna.simulate.page import simulation_page
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace

COSTS = Costs(join_seconds=10, start_seconds=5, save_seconds=1, write_seconds=4, leave_seconds=2)


def planner(stages: int = 1) -> CachedPlanner:
    request = LayoutRequest(batch_size=64, num_stages=stages, microbatch_size=1)
    return CachedPlanner(request, devices_per_machine=1, steps={4: 2.0})


def market(*changes: MachineChange, end: float) -> MarketTrace:
    return MarketTrace("made up", changes, end)


def play(
    trace: MarketTrace, costs: Costs = COSTS, *, notice: float = 0.0, stages: int = 1, hot: bool = False
) -> SimulatedJob:
    plans = planner(stages)
    job = SimulatedJob(trace, plans, costs, devices_per_machine=1, notice_seconds=notice, hot=hot)
    job.run()
    check(job.ledger)
    return job


def check(ledger: Ledger) -> None:
    amounts = amounts_by_cause(ledger)
    assert sum(amounts.values()) == pytest.approx(sum(paid_seconds(ledger).values()), abs=1e-3)
    assert all(amount > -1e-6 for amount in amounts.values()), amounts


def test_idle_machines_do_not_speed_up_a_step_that_was_measured() -> None:
    """B5, PRO-3: four stages; the key of a step time is a number of machines, idle ones included."""
    request = LayoutRequest(batch_size=64, num_stages=4, microbatch_size=4)
    for steps in ({4: 2.0}, {5: 2.0}, {3: 2.0}, {8: 1.0}, {9: 1.0}):
        plans = CachedPlanner(request, devices_per_machine=1, steps=steps)
        assert [plans.size(number).step_seconds for number in (4, 5, 6, 7, 8)] == [2.0, 2.0, 2.0, 2.0, 1.0]
        assert plans.size(3).layout is None
    plans = CachedPlanner(request, devices_per_machine=3, steps={2: 2.0})  # 4 of 6 devices
    assert [plans.size(number).step_seconds for number in (2, 3, 4)] == [2.0, 1.0, 2.0 / 3]


def test_machines_that_stay_train_but_for_their_start_and_saves() -> None:
    """B5, PRO-3: 10 s to join, 5 s to start; then steps of 2 s, and saves of 1 s."""
    job = play(market(MachineChange(0, added=("a", "b", "c", "d")), end=3600))
    amounts, ledger = amounts_by_cause(job.ledger), job.ledger
    assert amounts["waiting"] == pytest.approx(4 * 10)
    assert amounts["morphing"] == pytest.approx(4 * (5 + COSTS.gather_seconds / 2))
    assert amounts["saving"] == pytest.approx(4 * ledger.saves) and ledger.saves > 1
    assert ledger.steps == int((3600 - 15.1 - ledger.saves) / 2)
    assert ledger.samples == 64 * ledger.steps


def test_a_lost_machine_costs_detection_restart_and_the_steps_since_the_last_save() -> None:
    """B5, PRO-3: a save after the first step, at 17.1 s, and no other before the loss."""
    trace = market(MachineChange(0, added=("a", "b", "c", "d")), MachineChange(100, removed=("d",)), end=1000)
    job = play(trace)
    (_, lost) = job.ledger.interruptions
    assert lost.kind == "loss" and "d was lost" in lost.why
    assert lost.seconds["ending"] == pytest.approx(COSTS.end_seconds)
    assert job.ledger.steps_redone == 40  # steps 2 to 41 ended between 18.1 + 2 s and 100 s
    step = 2.0 * 4 / 3
    assert lost.lost["redoing"] == pytest.approx(3 * 40 * step + 4 * (1.9 + COSTS.detect_seconds), rel=0.02)
    paid = trace.machine_seconds + COSTS.detect_seconds
    assert sum(paid_seconds(job.ledger).values()) == pytest.approx(paid)


def test_a_step_that_a_loss_interrupts_is_redone_whatever_happened_in_it() -> None:
    """B5, PRO-3, PRO-4: a machine that joins within the step makes the manager count steps; none ends."""
    start = MachineChange(0, added=("a", "b", "c", "d"))
    costs = msgspec.structs.replace(COSTS, join_seconds=3.0, detect_seconds=1.0)
    slow = CachedPlanner(
        LayoutRequest(batch_size=64, num_stages=1, microbatch_size=1),
        devices_per_machine=1,
        steps={4: 10.0},
    )
    lost = MachineChange(108, removed=("d",))
    found = []
    for changes in ((start, lost), (start, MachineChange(103, added=("e",)), lost)):
        job = SimulatedJob(market(*changes, end=109.5), slow, costs, devices_per_machine=1, hot=True)
        job.run()
        check(job.ledger)
        steps = job.ledger.steps
        (ends,) = {one.first_step_at for one in job.ledger.periods if one.first_step_at is not None}
        useful = 4 * 10.0 * steps
        assert job.ledger.amounts["useful"] == pytest.approx(useful, rel=1e-6), ends
        found.append(steps)
    assert found[0] == found[1] > 5


def test_a_notice_saves_the_work_and_a_join_waits_for_the_end_of_a_step() -> None:
    """B5, PRO-3"""
    trace = market(
        MachineChange(0, added=("a", "b", "c")),
        MachineChange(300, added=("d",)),
        MachineChange(600, removed=("a",)),
        end=1000,
    )
    job = play(trace, notice=60.0)
    assert [one.kind for one in job.ledger.interruptions] == ["start", "change", "change"]
    assert job.ledger.steps_redone == 0
    assert [period.machines for period in job.ledger.periods] == [3, 4, 3]
    assert sum(paid_seconds(job.ledger).values()) == pytest.approx(trace.machine_seconds)


def test_a_notice_of_the_trace_without_a_removal_changes_nothing() -> None:
    """B5, PRO-3: as in `varuna chaos`."""
    start, more = MachineChange(0, added=("a", "b")), MachineChange(500, added=("c",))
    plain = play(market(start, more, end=1000))
    noticed = play(market(start, MachineChange(300, noticed=("b",)), more, end=1000))
    assert (noticed.log, noticed.ledger.samples) == (plain.log, plain.ledger.samples)


def test_workers_that_morph_in_place_lose_no_step() -> None:
    """B5, PRO-3, HOT-3: a machine vanishes, one joins, one leaves with a notice; one step runs again."""
    trace = market(
        MachineChange(0, added=("a", "b", "c", "d")),
        MachineChange(301, removed=("b",)),
        MachineChange(600, added=("e",)),
        MachineChange(900, removed=("a",)),
        end=1200,
    )
    costs = msgspec.structs.replace(COSTS, morph_seconds=0.5)
    trace = msgspec.structs.replace(
        trace, changes=(*trace.changes[:3], MachineChange(850, noticed=("a",)), trace.changes[3])
    )
    job, warm = play(trace, costs, hot=True), play(trace, costs)
    amounts = amounts_by_cause(job.ledger)
    assert [one.kind for one in job.ledger.interruptions] == ["start", "loss", "change", "change"]
    assert [period.machines for period in job.ledger.periods] == [4, 3, 4, 3]
    assert job.ledger.steps_redone == 0 and warm.ledger.steps_redone > 0
    assert amounts["redoing"] < 4 * (2.0 + COSTS.detect_seconds + COSTS.gather_seconds)
    assert amounts["morphing"] == pytest.approx(4 * 5.1 + 0.5 * (3 + 4 + 3), abs=1.0)
    assert report_ledger(job.ledger).goodput > report_ledger(warm.ledger).goodput


def test_a_machine_that_vanishes_in_a_change_ends_no_step_and_is_detected_later() -> None:
    """B5, PRO-3: in the pause of a morph; in a requested save; and after a notice, while it still works."""
    slow = msgspec.structs.replace(COSTS, morph_seconds=20.0, leave_seconds=20.0)
    start = MachineChange(0, added=("a", "b", "c", "d"))
    join = MachineChange(300, added=("e",))
    for hot in (True, False):
        job = play(market(start, join, MachineChange(325, removed=("b",)), end=900), slow, hot=hot)
        (lost,) = [at for at, line in job.log if line.startswith("machine lost: b")]
        assert lost == pytest.approx(325 + COSTS.detect_seconds)
        *_, last = job.ledger.interruptions
        entered = [at for at, line in job.log if line.startswith("morphed")]
        if hot:  # the others enter the next generation without it
            assert entered == [pytest.approx(lost + 20.1)] and last.kind == "loss"
        else:  # the save is not complete
            assert last.lost["redoing"] > 0 and job.ledger.steps_redone > 0
    trace = market(start, MachineChange(400, noticed=("a",)), MachineChange(440, removed=("a",)), end=900)
    job = play(trace, msgspec.structs.replace(COSTS, leave_seconds=60.0))
    (lost,) = [at for at, line in job.log if line.startswith("machine lost: a")]
    assert lost == pytest.approx(440 + COSTS.detect_seconds), "its save was too slow"


def test_a_loss_of_a_stage_without_replicas_goes_back_to_the_store_at_once() -> None:
    """B5, PRO-3: nothing else happens for an hour; the job does not wait for it."""
    trace = market(MachineChange(0, added=("a", "b", "c", "d")), MachineChange(40, removed=("b",)), end=4000)
    job = play(trace, stages=3, hot=True)
    (_, lost) = job.ledger.interruptions
    assert lost.kind == "loss" and sum(lost.lost.values()) < 3 * 120
    assert job.state.history.survived == 0 and report_ledger(job.ledger).goodput > 0.9


def test_losses_that_are_survived_in_place_do_not_make_saves_frequent() -> None:
    """B5, PRO-3: 12 losses; only those that went back to a checkpoint count fully for the interval."""
    changes = [MachineChange(0, added=tuple(f"m{n}" for n in range(4)))]
    changes += [MachineChange(300.0 * n, removed=(f"m{n - 1}",), added=(f"m{n + 3}",)) for n in range(1, 13)]
    trace = market(*changes, end=4000)
    hot, cold = play(trace, hot=True), play(trace)
    assert hot.state.losses == cold.state.losses == 12
    assert (hot.state.history.survived, cold.state.history.survived) == (12, 0)
    assert hot.ledger.saves < cold.ledger.saves


def test_a_market_without_machines_and_too_few_of_them() -> None:
    """B5, PRO-3: three stages need three machines; in between all wait."""
    trace = market(
        MachineChange(0, added=("a", "b")),
        MachineChange(500, added=("c",)),
        MachineChange(1000, removed=("a", "b", "c")),
        MachineChange(5000, added=("d", "e", "f")),
        MachineChange(5400, removed=("d",), added=("d",)),
        end=6000,
    )
    job = play(trace, stages=3)
    amounts = amounts_by_cause(job.ledger)
    assert amounts["waiting"] > 2 * 500
    assert len(job.ledger.periods) == 3 and job.ledger.periods[1].at > 5000
    assert job.ledger.best_iteration > 0


def test_policies_are_compared_and_drawn() -> None:
    """B5, PRO-3: published restarts lose more than measured ones, and on-demand machines cost more."""
    names = [f"m{index}" for index in range(8)]
    rounds = [
        MachineChange(600.0 * (index + 1), removed=(names[index % 8],), added=(f"n{index}",))
        for index in range(8)
    ]
    trace = market(MachineChange(0, added=tuple(names)), *rounds, end=6000)
    question = Question(trace=trace, costs=COSTS, notice_seconds=120, prices={"*": 1.0}, on_demand_price=3.0)
    ledgers: dict[str, Ledger] = {}
    results = {
        one.policy: one for one in compare(POLICIES, question, planner(2), on_result=ledgers.__setitem__)
    }
    for ledger in ledgers.values():
        check(ledger)
    goodput = {name: one.report.goodput for name, one in results.items()}
    assert goodput["varuna"] > goodput["restart"] > goodput["torchrun"]
    assert goodput["on-demand"] > 0.98
    assert goodput["drop-replicas"] < 1
    paid = {name: one.report.money.paid for name, one in results.items() if one.report.money is not None}
    assert paid["on-demand"] == pytest.approx(3 * paid["varuna"], rel=0.01)
    text = simulation_page(question, list(results.values()), ledgers, best_interval(question, planner(2)))
    assert text.startswith("<!DOCTYPE html>") and "<svg" in text and "src=" not in text


def test_a_loss_in_the_last_step_before_a_change_redoes_that_step_only() -> None:
    """B5, PRO-3, PRO-4: the change is ordered at 1015.1 s; the steps before it have ended."""
    first = MachineChange(0, added=("a", "b", "c"))
    joins, lost = MachineChange(1000, added=("d",)), MachineChange(1015.5, removed=("c",))
    job = play(market(first, joins, lost, end=2000), hot=True)
    step = 2.0 * 4 / 3
    assert amounts_by_cause(job.ledger)["redoing"] < 3 * step + 4 * (step + COSTS.detect_seconds)
    assert job.ledger.steps_redone == 0


def test_a_joiner_waits_for_the_end_of_the_last_step_without_it() -> None:
    """B6, PRO-3, PRO-4: steps of 80 s on one machine. Its share in later steps is useful, not its wait."""
    request = LayoutRequest(batch_size=64, num_stages=1, microbatch_size=1)
    plans = CachedPlanner(request, devices_per_machine=1, steps={1: 80.0})
    trace = market(MachineChange(0, added=("a",)), MachineChange(1000, added=("b", "c", "d")), end=2000)
    ledger = SimulatedJob(trace, plans, COSTS, devices_per_machine=1, hot=True).run()
    amounts = amounts_by_cause(ledger)
    check(ledger)
    assert 0 <= amounts["useful"] - 80.0 * ledger.steps < 80  # the step at the end
    assert 4 * 10 + 3 * 5 <= amounts["waiting"] <= 4 * 10 + 3 * (5 + 80)


@pytest.mark.parametrize(("lost_at", "redone"), [(122.0, 25), (126.0, 1)])
def test_a_checkpoint_that_is_being_written_when_its_workers_are_killed_stays_incomplete(
    lost_at: float, redone: int
) -> None:
    """B5, PRO-3: saved after steps 1 and 26, which end at 19.1 s and 120.1 s; complete 5 s later."""
    trace = market(MachineChange(0, added=("a", "b")), MachineChange(lost_at, removed=("b",)), end=900)
    job = SimulatedJob(trace, planner(), COSTS, devices_per_machine=1, save_every_seconds=100)
    job.run()
    assert job.ledger.steps_redone == redone


def test_a_join_waits_for_settled_machines_while_its_agent_imports_torch() -> None:
    """B5, PRO-3: as in a real job, where an agent connects before it is ready."""
    trace = market(MachineChange(0, added=("a", "b")), MachineChange(1000, added=("c",)), end=2000)
    job = play(trace, hot=True)
    amounts = amounts_by_cause(job.ledger)
    assert amounts["idle"] == pytest.approx(COSTS.gather_seconds / 2)  # until the plan is made
    prepared = next(at for at, text in job.log if at > 1000 and text.startswith("preparing"))
    assert prepared == pytest.approx(1000 + COSTS.join_seconds + COSTS.gather_seconds / 2)
    gone = play(market(*trace.changes, MachineChange(1009.5, removed=("c",)), end=2000), hot=True)
    assert not any(text.startswith("preparing") for at, text in gone.log if at > 1000)


def test_a_machine_that_leaves_before_its_agent_starts_is_paid_as_idle() -> None:
    """B6, PRO-3, PRO-4: its notice comes with it, so no agent is started there; the market bills it."""
    trace = market(
        MachineChange(0, added=("a", "b")),
        MachineChange(1000, added=("c",)),
        MachineChange(1060, removed=("c",)),
        MachineChange(2900, added=("c",)),  # until the end of the trace
        MachineChange(3000, removed=("c",)),
        end=3000,
    )
    ledger = play(trace, notice=120).ledger
    assert paid_seconds(ledger) == pytest.approx({"a": 3000, "b": 3000, "c": 160})
    assert amounts_by_cause(ledger)["idle"] == pytest.approx(160)


PLACES = [f"p{index}" for index in range(6)]


@st.composite
def markets(draw: st.DrawFn) -> MarketTrace:
    times = sorted(draw(st.lists(st.integers(0, 3000), min_size=1, max_size=10, unique=True)))
    live: set[str] = set()
    found = []
    for at in times:
        toggled = draw(st.sets(st.sampled_from(PLACES), min_size=1))
        removed, added = tuple(sorted(toggled & live)), tuple(sorted(toggled - live))
        live ^= toggled
        found.append(MachineChange(at, removed, added))
    return market(*found, end=times[-1] + draw(st.integers(1, 2000)))


@settings(max_examples=40, deadline=None)
@given(markets(), st.sampled_from(POLICIES), st.sampled_from([0.0, 30.0, 120.0]), st.integers(1, 3))
def test_every_policy_books_all_machine_seconds_of_any_market(
    trace: MarketTrace, policy: str, notice: float, stages: int
) -> None:
    """B5, PRO-3, PRO-4: the causes add up to what is paid, which is what the market lent."""
    plans = planner(stages)
    assume(trace.most_machines >= stages)
    prices = {"p0": 36.0, "p1": 7.2, "*": 3.6}
    question = Question(trace=trace, costs=COSTS, notice_seconds=notice, hot=stages % 2 == 0, prices=prices)
    ledger = simulate_policy(policy, question, plans)  # type: ignore[arg-type]
    check(ledger)
    assert bool(ledger.by_price) == (policy != "on-demand")
    check_accounts(ledger)
    if policy in ("varuna", "restart", "torchrun"):
        paid = sum(paid_seconds(ledger).values())
        removals = sum(len(change.removed) for change in trace.changes)
        assert trace.machine_seconds <= paid + 1e-3, "the market bills every second of a machine"
        if stages == 1:  # each machine-second of a step is 1/8 of a step, at any number of machines
            steps = ledger.steps * 8.0
            assert amounts_by_cause(ledger)["useful"] == pytest.approx(
                steps, abs=16 * (len(ledger.periods) + 1)
            )
        assert paid <= trace.machine_seconds + 3.1 * removals + 1e-3, "paid until its loss is detected"


def test_costs_come_from_a_ledger_and_play_back_to_it() -> None:
    """B5, PRO-3: a job that is simulated with the costs of its own ledger has the same goodput."""
    changes = [MachineChange(0, added=("a", "b", "c", "d"))]
    changes += [
        MachineChange(400.0 * n, removed=(f"{'abcd'[n % 4]}",) if n % 2 else (), added=(f"e{n}",))
        for n in range(1, 8)
    ]
    live: set[str] = set()
    tidy = []
    for change in changes:
        removed = tuple(name for name in change.removed if name in live)
        live = live - set(removed) | set(change.added)
        tidy.append(msgspec.structs.replace(change, removed=removed))
    trace = market(*tidy, end=4000)
    first = play(trace).ledger
    found = calibrate(first, source="itself")
    again = report_ledger(play(trace, found).ledger)
    assert found.write_seconds == COSTS.write_seconds and "write_seconds" not in found.estimated
    assert found.join_seconds == pytest.approx(10) and found.start_seconds == pytest.approx(5, rel=0.05)
    assert again.goodput == pytest.approx(report_ledger(first).goodput, rel=0.02)
    with pytest.raises(ValueError, match="no change of machines"):
        calibrate(Ledger(), source="an empty ledger")


def test_first_joins_are_measured_and_simulated_for_themselves() -> None:
    """B5, PRO-3: the first machines take 30 s to start, later ones 3 s; a mean of both fits neither."""
    costs = msgspec.structs.replace(COSTS, first_join_seconds=30.0, join_seconds=3.0)
    trace = market(
        MachineChange(0, added=("a", "b", "c")),
        MachineChange(300, added=("d",)),
        MachineChange(600, removed=("a",), added=("e",)),
        end=900,
    )
    first = play(trace, costs, hot=True).ledger
    ends = 2 * (2.0 * 4 / 3 + COSTS.morph_seconds)  # of the last steps without them
    waiting = amounts_by_cause(first)["waiting"]
    assert waiting == pytest.approx(3 * 30 + 2 * (3 + 5) + ends / 2, abs=ends / 2)
    found = calibrate(first, source="itself", measured=MeasuredEvents(prepare_seconds=(5.0,)))
    assert (found.first_join, found.join_seconds) == (pytest.approx(30), pytest.approx(3))
    again = play(trace, found, hot=True).ledger
    assert amounts_by_cause(again)["waiting"] == pytest.approx(amounts_by_cause(first)["waiting"], abs=1)
    assert again.periods[0].at == pytest.approx(first.periods[0].at)
    only_first = msgspec.structs.replace(first, join_seconds=[])
    assert calibrate(only_first, source="no later join").join_seconds == pytest.approx(30)
    assert Costs(join_seconds=4.0).first_join == 4.0


def test_published_costs_are_valid_and_wrong_ones_are_refused() -> None:
    assert PUBLISHED_RESTART.start_seconds + PUBLISHED_RESTART.leave_seconds == 50
    for wrong in ({"join_seconds": -1.0}, {"save_seconds": float("nan")}, {"steps": {0: 1.0}}):
        with pytest.raises(ValueError, match="must"):
            msgspec.convert(wrong, Costs) if "steps" in wrong else Costs(**wrong)  # type: ignore[arg-type]
