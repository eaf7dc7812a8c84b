"""The ledger: every paid machine-second has one cause, whatever happens to the job (B6, PRO-4)."""

from collections.abc import Mapping

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from tests.morph.test_decide import WELL, World, killed
from varuna.morph import events
from varuna.morph.accounting import Accountant
from varuna.morph.decide import decide_all
from varuna.morph.state import WorkerProgress
from varuna.observe.ledger import (
    Ledger,
    amounts_by_cause,
    ledger_lines,
    paid_seconds,
    price_of,
    read_prices,
    report_ledger,
)
from varuna.observe.ledger_page import machine_table, money_table

PRICES = {"a": 36.0, "c": 7.2, "*": 3.6}


def check_accounts(ledger: Ledger) -> None:
    """Each price has the time of its machines, and all prices together have the time of the job."""
    if not ledger.by_price:
        return
    paid = paid_seconds(ledger)
    for price, account in ledger.by_price.items():
        booked = sum(account.amounts.values()) + account.pending
        expected = sum(seconds for name, seconds in paid.items() if price_of(name, ledger.prices) == price)
        assert booked == pytest.approx(expected, abs=1e-6), price
        assert account.pending >= 0
    for cause, amount in ledger.amounts.items():
        parts = sum(account.amounts.get(cause, 0.0) for account in ledger.by_price.values())
        assert parts == pytest.approx(amount, abs=1e-6), cause
    money = report_ledger(ledger).money
    assert money is not None and money.averaged_seconds == 0
    assert money.useful + sum(money.lost.values()) == pytest.approx(money.paid, abs=1e-6)


class AccountedWorld(World):
    """A simulated job with a ledger."""

    def __init__(
        self, *machines: str, stages: int = 1, hot: bool = False, prices: Mapping[str, float] | None = None
    ) -> None:
        ledger = Ledger(begun_at=100.0, at=100.0, prices=dict(prices or {}))
        self.accountant = Accountant(ledger, devices_per_machine=1)
        super().__init__(machines, stages=stages, hot=hot)

    def happens(self, event: events.Event) -> None:
        super().happens(event)
        self.accountant.observe(self.state, self.now)

    def check(self) -> dict[str, float]:
        ledger = self.accountant.ledger
        paid, amounts = sum(paid_seconds(ledger).values()), amounts_by_cause(ledger)
        assert sum(amounts.values()) == pytest.approx(paid, abs=1e-6)
        assert all(amount >= -1e-6 for amount in amounts.values()), amounts
        assert msgspec.json.decode(msgspec.json.encode(ledger), type=Ledger) == ledger
        check_accounts(ledger)
        return dict(amounts)


def test_a_job_that_trains_undisturbed_is_useful_but_for_its_start() -> None:
    """B6, PRO-4"""
    world = AccountedWorld("a", "b")
    world.passes(1)
    world.passes(100, steps=1)
    amounts = world.check()
    assert sum(amounts.values()) == pytest.approx(2 * (world.now - 100))
    assert amounts["useful"] > 0.97 * sum(amounts.values())
    assert amounts["redoing"] == amounts["idle"] == 0


def test_a_lost_machine_is_not_paid_and_its_steps_are_redone() -> None:
    """B6, PRO-4: the checkpoint is up to ten steps old, and the interrupted step is lost too."""
    world = AccountedWorld("a", "b")
    world.passes(1)
    world.passes(2, steps=1)
    before = world.check()
    world.starts_agents = False
    world.iteration = 17
    world.lose_agent("b")
    lost_at = world.now
    world.carry_out()
    world.iteration = 10
    world.passes(20, steps=1)
    amounts, ledger = world.check(), world.accountant.ledger
    assert paid_seconds(ledger)["b"] == pytest.approx(lost_at - 100)
    assert paid_seconds(ledger)["a"] == pytest.approx(world.now - 100)
    assert amounts["useful"] > before["useful"]
    assert [one.kind for one in ledger.interruptions] == ["start", "loss"]
    assert "b was lost" in ledger.interruptions[-1].why


class LoadedSteps(AccountedWorld):
    """The script has loaded a checkpoint of step 40 that the manager does not know."""

    def progress(self, machine: str, *, in_step: bool) -> tuple[WorkerProgress, ...]:
        workers = super().progress(machine, in_step=in_step)
        return tuple(
            msgspec.structs.replace(worker, iteration=worker.iteration + 40) if worker.steps else worker
            for worker in workers
        )


def test_steps_of_a_checkpoint_that_the_script_has_loaded_do_not_count() -> None:
    """B6, PRO-4: only steps that the job has trained."""
    world = LoadedSteps("a", "b")
    world.passes(1)
    world.passes(20, steps=1)
    ledger = world.accountant.ledger
    world.check()
    assert ledger.steps == world.iteration > 0 and world.state.iteration == world.iteration + 40
    assert world.state.generation is not None
    assert ledger.samples == ledger.steps * world.state.generation.layout.batch_size


def test_steps_that_only_the_end_of_the_workers_reports_count() -> None:
    """B6, PRO-4: all steps of a short job lie between two heartbeats."""
    world = AccountedWorld("a", "b")
    world.passes(2)
    for machine in list(world.workers):
        last = WorkerProgress(0, iteration=12, steps=12, step_seconds=0.05, step_age=0.01)
        number, agent = world.workers.pop(machine), world.agents[machine]
        world.happens(events.WorkersEnded(machine, agent, number, (WELL,), (last,)))
    amounts, ledger = world.check(), world.accountant.ledger
    assert world.state.phase == "over" and ledger.steps == 12
    assert amounts["useful"] == pytest.approx(2 * 12 * 0.05, rel=0.1)


class LateReports(AccountedWorld):
    """Steps of 4 s; each report comes 3 s after the end of a step."""

    def progress(self, machine: str, *, in_step: bool) -> tuple[WorkerProgress, ...]:
        workers = super().progress(machine, in_step=in_step)
        return tuple(
            msgspec.structs.replace(worker, step_age=3.0, step_seconds=4.0 * bool(worker.iteration))
            for worker in workers
        )


@pytest.mark.parametrize("hot", [False, True])
def test_the_interrupted_step_is_redone_although_the_report_before_it_came_late(hot: bool) -> None:
    """B6, PRO-4: of the 3 s between the end of the last step and its report, none was useful."""
    world = LateReports("a", "b", hot=hot)
    world.passes(1)
    for _ in range(10):
        world.passes(3.75)
        world.passes(0.25, steps=1)
    before, ledger = world.check(), world.accountant.ledger
    assert ledger.steps == 10 and ledger.pending == pytest.approx(2 * 3.0)
    world.starts_agents = False
    world.lose_agent("b")
    world.passes(0.5)
    amounts = world.check()
    assert amounts["redoing"] - before["redoing"] == pytest.approx(2 * 3.0, abs=0.3)
    assert ledger.amounts["useful"] == pytest.approx(before["useful"] - 2 * 3.0)
    assert ledger.interruptions[-1].lost["redoing"] == pytest.approx(2 * 3.0, abs=0.3)


def test_a_step_that_is_reported_together_with_the_order_after_a_loss_is_useful() -> None:
    """B6, PRO-4: the manager hears of both at once; only the time after the end of the step is lost."""
    world = AccountedWorld("a", "b", hot=True)
    world.passes(1)
    world.passes(5, steps=1)
    before, steps = world.check(), world.accountant.ledger.steps
    world.starts_agents = False
    world.lose_agent("b")
    world.now, world.iteration = world.now + 0.5, world.iteration + 1
    workers = [msgspec.structs.replace(one, step_age=0.2) for one in world.progress("a", in_step=True)]
    report = events.Tick({"a": (world.agents["a"], world.workers["a"], tuple(workers))})
    world.state, _ = decide_all(world.state, (report, events.PlanReady(world.plan(("a",)))), world.now)
    world.accountant.observe(world.state, world.now)
    amounts, ledger = world.check(), world.accountant.ledger
    assert world.state.phase == "morphing" and ledger.steps == steps + 1
    assert amounts["useful"] - before["useful"] == pytest.approx(0.3)
    assert amounts["redoing"] - before["redoing"] == pytest.approx(0.2)


def test_steps_that_no_heartbeat_reported_count_once_they_are_found_in_a_checkpoint() -> None:
    """B6, PRO-4: a machine may be lost between a save and its next heartbeat."""
    world = AccountedWorld("a", "b")
    world.passes(1)
    world.passes(2, steps=1)
    world.starts_agents = False
    world.iteration = 100
    world.lose_agent("b")
    world.carry_out()
    world.passes(20, steps=1)
    ledger = world.accountant.ledger
    assert ledger.best_iteration >= 100 and ledger.steps == ledger.best_iteration
    world.check()


def test_a_morph_in_place_costs_its_pause_only_and_no_step() -> None:
    """B6, PRO-4, HOT-2, HOT-3"""
    world = AccountedWorld("a", "b", hot=True)
    world.passes(1)
    world.passes(5, steps=1)
    before, steps = world.check(), world.accountant.ledger.steps
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(10, steps=1)
    world.end_workers("b", killed(1))
    world.passes(10, steps=1)
    amounts, ledger = world.check(), world.accountant.ledger
    assert [one.kind for one in ledger.interruptions] == ["start", "change", "loss", "change"]
    assert amounts["redoing"] == amounts["saving"] == 0 and ledger.steps_redone == 0
    assert ledger.steps - steps == 80
    assert amounts["morphing"] - before["morphing"] == pytest.approx(4 * 0.1 * 8 / 4, rel=1)


class ShortEpochs(AccountedWorld):
    """Every fifth step has 7 samples instead of 12."""

    def progress(self, machine: str, *, in_step: bool) -> tuple[WorkerProgress, ...]:
        missing = self.iteration // 5 * 5
        workers = super().progress(machine, in_step=in_step)
        return tuple(msgspec.structs.replace(worker, missing_samples=missing) for worker in workers)


def test_short_steps_at_the_end_of_an_epoch_count_with_their_own_samples() -> None:
    """B6, PRO-4: prices per sample and samples/s are those of samples that were trained."""
    world = ShortEpochs("a", "b")
    world.passes(1)
    world.passes(25, steps=1)
    ledger = world.accountant.ledger
    assert ledger.steps == 100 and ledger.samples == 100 * 12 - 20 * 5
    world.passes(1)  # nothing new
    assert ledger.samples == 100 * 12 - 20 * 5


def test_steps_that_survivors_repeat_from_copies_are_redone() -> None:
    """B6, PRO-4, HOT-3: one replica; c replaces b, and both stages go back by seven steps."""
    world = AccountedWorld("a", "b", "c", stages=2, hot=True)
    world.copies = True
    world.passes(1)
    world.passes(5, steps=1)
    before, best = world.check(), world.iteration
    world.starts_agents = False
    world.lose_agent("b")
    world.carry_out()
    world.iteration -= 7
    world.passes(1)
    assert world.morphed and world.state.phase == "running"
    world.passes(10, steps=1)
    amounts, ledger = world.check(), world.accountant.ledger
    assert ledger.steps_redone == 7 and ledger.steps == world.iteration == best + 33
    seven = 7 / 40 * 10 * 2  # of 40 steps in 10 s, on two machines
    assert seven <= amounts["redoing"] - before["redoing"] < seven + 2
    assert amounts["useful"] - before["useful"] == pytest.approx(20 - seven, abs=1)
    assert world.state.history.loss_seconds[-1] == pytest.approx(7.5 * 0.5, abs=0.2), (
        "and the interrupted one"
    )


def test_survivors_that_hold_their_state_wait_and_redo_only_the_interrupted_step() -> None:
    """B6, PRO-4, HOT-3: the machine that is left waits for 20 s until another one comes."""
    world = AccountedWorld("a", "b", stages=2, hot=True)
    world.copies = True
    world.passes(1)
    world.passes(5, steps=1)
    before = world.check()
    world.unreachable.add("b")
    world.lose_agent("b")
    world.passes(20)
    assert world.state.holding
    world.happens(events.MachineListRead(("a", "c")))
    world.passes(2)
    world.passes(5, steps=1)
    amounts, ledger = world.check(), world.accountant.ledger
    lost = ledger.interruptions[-1]
    assert [one.kind for one in ledger.interruptions] == ["start", "loss"] and "b was lost" in lost.why
    assert amounts["redoing"] - before["redoing"] < 0.5
    assert 20 <= lost.lost["waiting"] < 22 and 20 <= lost.seconds["waiting"] < 22
    assert world.state.history.loss_seconds[-1] < 1.0, "the wait for a machine is no cost of a loss"


def test_the_time_until_the_order_after_a_loss_is_booked_once() -> None:
    """B6, PRO-4: workers count it as part of their pause; it was in the step that is lost."""
    world = AccountedWorld("a", "b", "c", hot=True)
    world.passes(1)
    world.passes(10, steps=1)
    world.waited = 3.0
    world.starts_agents = False
    world.lose_agent("b")
    before = world.check()
    world.passes(5, steps=1)
    amounts = world.check()
    assert world.morphed and amounts["morphing"] - before["morphing"] < 1.0
    assert amounts["useful"] - before["useful"] > 5.0


def test_a_spare_machine_is_idle_and_a_planned_change_costs_saving_and_morphing() -> None:
    """B6, PRO-4"""
    world = AccountedWorld("a", "b", stages=2)
    world.passes(1)
    world.passes(2, steps=1)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(10, steps=1)
    amounts = world.check()
    assert 9 < amounts["idle"] <= 10
    world.happens(events.NoticeReceived("b", world.now + 60, "it leaves"))
    world.passes(10, steps=1)
    world.check()
    assert world.generations[-1] == ("a", "c")
    assert world.accountant.ledger.interruptions[-1].kind == "change"


@pytest.mark.parametrize("reason", ["welcome_at", "trial_until", "joins later"])
def test_a_machine_that_is_held_back_waits_until_it_is_welcome(reason: str) -> None:
    """B6, PRO-4: in a real job, the ledger has Unix time, and the manager's clock counts from the boot."""
    world = AccountedWorld("a", "b", stages=2)
    world.passes(1)
    world.passes(2, steps=1)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(2, steps=1)
    spare = world.state.members["c"]
    assert spare.warm and world.state.phase == "running"
    if reason == "joins later":
        state = msgspec.structs.replace(world.state, waiting="c, d", wait_over_at=world.now + 30)
    else:
        held = msgspec.structs.replace(spare, **{reason: world.now + 30})
        members = {**world.state.members, "c": held}
        state = msgspec.structs.replace(world.state, members=members)
    ahead = 1.76e9
    accountant = Accountant(Ledger(begun_at=world.now + ahead, at=world.now + ahead), devices_per_machine=1)
    shares = []
    for seconds in (0, 29, 30):
        clock = world.now + seconds
        accountant.observe(state, clock + ahead, clock=clock)
        shares.append((accountant.ledger.shares.waiting, accountant.ledger.shares.idle))
    assert shares == [(1, 0), (1, 0), (0, 1)]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["wait", "list", "lose", "kill", "silent", "back", "notice", "withdraw", "save fails", "morphs"]
        ),
        st.sampled_from("abcd"),
        st.floats(0.25, 20),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.integers(1, 2), st.booleans(), st.booleans(), st.sampled_from([{}, PRICES]))
def test_all_machine_seconds_are_booked_once(
    actions: list[tuple[str, str, float]],
    stages: int,
    hot: bool,
    copies: bool,
    prices: dict[str, float],
) -> None:
    """B6, PRO-4: the causes add up to the paid time after any sequence of events, also if workers morph.

    "morphs": workers carry no orders out from then on, or do so again.
    """
    world = AccountedWorld("a", "b", stages=stages, hot=hot, prices=prices)
    world.copies = copies
    listed = {"a", "b"}
    for action, machine, seconds in actions:
        if action == "list":
            listed ^= {machine}
            world.happens(events.MachineListRead(tuple(sorted(listed))))
        elif action == "lose":
            world.lose_agent(machine)
        elif action == "kill" and world.ranks.get(machine):
            world.kill_worker(machine, world.ranks[machine][0])
        elif action == "morphs":
            world.morphs = not world.morphs
        elif action == "silent":
            world.go_silent(machine)
        elif action == "back":
            world.come_back(machine)
        elif action == "notice":
            world.happens(events.NoticeReceived(machine, world.now + seconds, "leaves"))
        elif action == "withdraw":
            world.happens(events.NoticeWithdrawn(machine))
        elif action == "save fails":
            world.cannot_save = not world.cannot_save
        world.carry_out()
        world.passes(seconds if action == "wait" else 0.5, steps=int(action == "wait"))
        world.check()


def test_a_restarted_manager_continues_the_ledger() -> None:
    """B6, PRO-4: the time without a manager is paid, and counts as what the workers did in it."""
    world = AccountedWorld("a", "b")
    world.passes(1)
    world.passes(10, steps=1)
    kept = msgspec.json.encode(world.accountant.ledger)
    world.accountant = Accountant(msgspec.json.decode(kept, type=Ledger), devices_per_machine=1)
    world.now += 30
    world.iteration += 60
    world.passes(1, steps=1)
    amounts = world.check()
    assert sum(amounts.values()) == pytest.approx(2 * (world.now - 100))
    assert amounts["useful"] > 0.9 * sum(amounts.values())


def test_money_follows_from_prices_by_name_and_pattern() -> None:
    """B6, PRO-4"""
    prices = read_prices("machine,price\na, 3.6\n*,1.8  # others\n", source="prices")
    world = AccountedWorld("a", "b", prices=prices)
    world.passes(1)
    world.passes(100, steps=1)
    ledger = world.accountant.ledger
    ledger.on_demand_price = 7.2
    report = report_ledger(ledger)
    assert report.money is not None and report.money.on_demand is not None
    assert report.money.paid == pytest.approx((world.now - 100) * (3.6 + 1.8) / 3600)
    assert report.money.useful + sum(report.money.lost.values()) == pytest.approx(report.money.paid)
    assert report.money.on_demand == pytest.approx(report.useful_seconds * 7.2 / 3600)
    assert ledger_lines(report)[1].startswith("money: 0.15, of which")
    assert report.money.unpriced == () and len(ledger_lines(report)) == 2


def test_money_by_cause_is_that_of_the_machines_that_spent_the_time() -> None:
    """B6, PRO-4: an idle machine that costs a tenth makes a tenth of the loss, in a restarted manager too."""
    world = AccountedWorld("a", "b", stages=2, prices={"c": 0.36, "*": 3.6})
    world.passes(1)
    world.passes(2, steps=1)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(10, steps=1)
    kept = msgspec.json.encode(world.accountant.ledger)
    world.accountant = Accountant(msgspec.json.decode(kept, type=Ledger), devices_per_machine=1)
    world.passes(10, steps=1)
    amounts, ledger = world.check(), world.accountant.ledger
    assert 19 < amounts["idle"] <= 20
    money = report_ledger(ledger).money
    assert money is not None and money.averaged_seconds == 0
    assert money.lost["idle"] == pytest.approx(amounts["idle"] * 0.36 / 3600)
    assert money.useful == pytest.approx(amounts["useful"] * 3.6 / 3600)
    ledger.prices = {"c": 7.2, "*": 1.8}  # of the same groups of machines
    money = report_ledger(ledger).money
    assert money is not None and money.averaged_seconds == 0
    assert money.lost["idle"] == pytest.approx(amounts["idle"] * 7.2 / 3600)


def test_prices_that_the_job_did_not_have_are_averaged_over_causes_and_the_ledger_says_so() -> None:
    """B6, PRO-4: the ledger knows neither which causes b had, nor those before its manager had a table."""
    world = AccountedWorld("a", "b", prices={"*": 3.6})
    world.passes(1)
    world.passes(10, steps=1)
    ledger = world.accountant.ledger
    assert ledger.by_price == {} and len(ledger_lines(report_ledger(ledger))) == 2
    before = sum(amounts_by_cause(ledger).values())
    ledger.prices = {"a": 3.6, "*": 7.2}
    report = report_ledger(ledger)
    assert report.money is not None and report.money.averaged_seconds == pytest.approx(before)
    assert report.money.useful == pytest.approx(report.useful_seconds * 5.4 / 3600)
    assert "have the mean price of the machines" in ledger_lines(report)[-1]
    assert "have the mean price of the machines" in money_table(report)
    world.accountant = Accountant(ledger, devices_per_machine=1)
    world.passes(10, steps=1)
    money = report_ledger(ledger).money
    assert money is not None and before <= money.averaged_seconds < before + 1
    assert money.paid == pytest.approx(sum(paid_seconds(ledger).values()) / 2 * (3.6 + 7.2) / 3600)
    assert money.useful + sum(money.lost.values()) == pytest.approx(money.paid)


def test_machines_without_a_price_are_named() -> None:
    """B6, PRO-4: a table that does not fit is not a cheaper job."""
    paid = {"a": 3600.0, **{f"node{index}": 3600.0 for index in range(10)}}
    ledger = Ledger(at=3600.0, machines=paid, amounts={"useful": 11 * 3600.0}, prices={"a": 2.0})
    report = report_ledger(ledger)
    assert report.money is not None and report.money.paid == 2.0
    assert report.money.unpriced == tuple(f"node{index}" for index in range(10))
    line = ledger_lines(report)[2]
    assert line.startswith("money: no price for node0, node1, ")
    assert "node7 and 2 more: counted as free" in line
    assert "no price for node0" in money_table(report) and ">-</td>" in machine_table(ledger)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("cheap", "expected a price per machine-hour"),
        ("-1", "expected a price per machine-hour"),
        ("a,1\nb,x", "line 2"),
        ("a,1\n,2", "line 2"),
        ("a,nan", "line 1"),
    ],
)
def test_prices_that_are_none_are_refused_with_their_line(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_prices(text, source="prices.csv")
