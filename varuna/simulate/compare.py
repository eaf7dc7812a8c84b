"""Simulates several policies on one trace, and finds the best save interval."""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from varuna.morph.interval import interval_seconds
from varuna.observe.ledger import Ledger, LedgerReport, report_ledger
from varuna.simulate.costs import PUBLISHED_RESTART, TORCHRUN, Costs
from varuna.simulate.job import SimulatedJob
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.policies import ReplicaJob, machines_of_replica, simulate_on_demand
from varuna.simulate.traces import MarketTrace

PolicyName = Literal["varuna", "restart", "torchrun", "drop-replicas", "on-demand"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)
MEANINGS: dict[PolicyName, str] = {
    "varuna": "this library: its manager, its planner, the given costs",
    "restart": "restart from a checkpoint at each change, with published costs",
    "torchrun": "elastic restart from the last periodic checkpoint; joins lose work, too",
    "drop-replicas": "pipelines of fixed depth; a broken one is dropped until it is whole (torchft)",
    "on-demand": "the average number of machines, never taken away, at the on-demand price",
}
INTERVALS = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3840.0)


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a simulation depends on."""

    trace: MarketTrace
    costs: Costs
    devices_per_machine: int = 1
    notice_seconds: float = 0.0
    save_every_seconds: float | None = None
    hot: bool = True  # workers morph in place, where the policy is ours
    greedy: bool = False  # change at every chance, as with `varuna run --greedy`
    prices: dict[str, float] = {}
    on_demand_price: float = 0.0


class PolicyResult(msgspec.Struct, frozen=True):
    """One policy on one trace."""

    policy: PolicyName
    costs: str
    report: LedgerReport
    samples_per_second: float


class SaveInterval(msgspec.Struct, frozen=True):
    """Goodput at a fixed interval between automatic saves."""

    seconds: float
    goodput: float


def simulate_policy(policy: PolicyName, question: Question, planner: CachedPlanner) -> Ledger:
    """Simulate one policy; return its ledger."""
    trace, costs = question.trace, question.costs
    if policy == "on-demand":
        ledger = simulate_on_demand(trace, planner, costs)
        ledger.prices = {"*": question.on_demand_price} if question.on_demand_price else {}
        return ledger
    if policy == "drop-replicas":
        per_replica = machines_of_replica(planner, trace, devices_per_machine=question.devices_per_machine)
        prices = question.prices
        ledger = ReplicaJob(trace, planner, costs, per_replica=per_replica, prices=prices).run()
    else:
        ledger = _job(policy, question, planner).run()
    ledger.on_demand_price = question.on_demand_price
    return ledger


def _job(policy: PolicyName, question: Question, planner: CachedPlanner) -> SimulatedJob:
    notice, every, costs = question.notice_seconds, question.save_every_seconds, question.costs
    if policy == "restart":
        costs = PUBLISHED_RESTART
    elif policy == "torchrun":
        costs, notice = TORCHRUN, 0.0
        # Every change goes back to the last save, so the best interval follows from all of them.
        between = question.trace.end / max(1, len(question.trace.changes))
        every = every if every is not None else max(1.0, interval_seconds(costs.save_seconds, between))
    return SimulatedJob(
        question.trace,
        planner,
        costs,
        devices_per_machine=question.devices_per_machine,
        notice_seconds=notice,
        save_every_seconds=every,
        hot=question.hot and policy == "varuna",
        greedy=question.greedy or policy != "varuna",
        prices=question.prices,
    )


def compare(
    policies: Sequence[PolicyName],
    question: Question,
    planner: CachedPlanner,
    *,
    on_result: Callable[[PolicyName, Ledger], None] = lambda policy, ledger: None,
) -> list[PolicyResult]:
    results = []
    for policy in policies:
        ledger = simulate_policy(policy, question, planner)
        on_result(policy, ledger)
        report = report_ledger(ledger)
        used = {"restart": PUBLISHED_RESTART, "torchrun": TORCHRUN}.get(policy, question.costs)
        rate = report.samples / question.trace.end if question.trace.end else 0.0
        results.append(PolicyResult(policy, used.source, report, rate))
    return results


def best_interval(question: Question, planner: CachedPlanner) -> list[SaveInterval]:
    """Return the goodput at several save intervals, the best one first."""
    found = []
    for seconds in INTERVALS:
        if seconds > question.trace.end:
            break
        fixed = msgspec.structs.replace(question, save_every_seconds=seconds, prices={})
        report = report_ledger(simulate_policy("varuna", fixed, planner))
        found.append(SaveInterval(seconds, report.goodput))
    return sorted(found, key=lambda one: -one.goodput)
