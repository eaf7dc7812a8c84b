"""Other ways to train on the same market, for comparison: dropping replicas, and machines on demand.

Restarts from a checkpoint are simulated by `SimulatedJob` with the costs of such systems.
"""

import math
from collections.abc import Mapping

from varuna.morph.interval import interval_seconds
from varuna.observe.ledger import Accounts, Cause, Interruption, LayoutPeriod, Ledger
from varuna.simulate.costs import Costs
from varuna.simulate.planner import CachedPlanner
from varuna.simulate.traces import MachineChange, MarketTrace


class Counted:
    """A ledger that is filled from counts of machines."""

    def __init__(self, prices: Mapping[str, float] | None = None) -> None:
        self.ledger = Ledger(prices=dict(prices or {}))
        self.accounts = Accounts(self.ledger)

    def pass_time(self, until: float, shares: Mapping[float | None, Mapping[Cause, float]]) -> None:
        """Book the time since the last call for numbers of machines by cause, in each account."""
        seconds = until - self.ledger.at
        for price, machines_by_cause in shares.items():
            for cause, machines in machines_by_cause.items():
                self.accounts[price].add(cause, machines * seconds)
        self.ledger.at = until

    def set_machines(self, live: dict[str, float]) -> None:
        """Start paying for new machines, and stop paying for those that are gone."""
        ledger = self.ledger
        for name in [name for name in ledger.paid_since if name not in live]:
            ledger.machines[name] = ledger.machines.get(name, 0.0) + ledger.at - ledger.paid_since.pop(name)
        for name in live:
            ledger.paid_since.setdefault(name, ledger.at)
        ledger.num_machines.append((ledger.at, len(live)))


def simulate_on_demand(trace: MarketTrace, planner: CachedPlanner, costs: Costs) -> Ledger:
    """Return the ledger of as many machines as the trace has on average, none of which leaves."""
    machines = max(1, round(trace.mean_machines))
    while planner.size(machines).layout is None and machines < 2 * trace.most_machines:
        machines += 1
    found = planner.size(machines)
    if found.layout is None:
        raise ValueError(f"there is no layout for {machines} machines: {found.problem}")
    machines = len(found.used)  # nobody rents what the layout does not use
    counted = Counted()
    counted.set_machines({f"on-demand-{index}": 0.0 for index in range(machines)})
    start = min(trace.end, costs.first_join + costs.first_start)
    counted.pass_time(min(trace.end, costs.first_join), {None: {"waiting": machines}})
    counted.pass_time(start, {None: {"morphing": machines}})
    steps = int((trace.end - start) / found.step_seconds)
    counted.pass_time(trace.end, {None: {"useful": machines}})
    ledger = counted.ledger
    ledger.steps, ledger.samples = steps, steps * found.layout.batch_size
    ledger.has_stepped = True
    ledger.periods.append(
        LayoutPeriod(at=start, generation=1, layout=str(found.layout), machines=machines, first_step_at=start)
    )
    return ledger


class ReplicaJob:
    """A job with pipelines of a fixed depth. A replica that loses a machine is dropped until it is whole."""

    def __init__(
        self,
        trace: MarketTrace,
        planner: CachedPlanner,
        costs: Costs,
        *,
        per_replica: int,
        prices: Mapping[str, float] | None = None,
    ) -> None:
        self._trace = trace
        self._planner = planner
        self._costs = costs
        self._per_replica = per_replica
        self._counted = Counted(prices)
        self._live: dict[str, float] = {}
        self._replicas: list[list[str]] = []  # those that train
        self._spare: list[str] = []  # ready, but without a whole replica
        self._starting: dict[str, float] = {}  # machines that load the model, until then
        self._samples = 0.0
        self._steps = 0.0
        self._unsaved = 0.0  # seconds of training since the last save, for a job that loses all replicas
        self._to_redo = 0.0  # seconds, once there is a replica again
        self._save_every = max(1.0, interval_seconds(costs.save_seconds, 4 * 3600.0))

    def run(self) -> Ledger:
        for change in self._trace.changes:
            self._train_and_join(change.at)
            self._apply(change)
        self._train_and_join(self._trace.end)
        ledger = self._counted.ledger
        ledger.samples, ledger.steps, ledger.has_stepped = round(self._samples), round(self._steps), True
        return ledger

    def _train_and_join(self, until: float) -> None:
        """Train until then. Machines that become ready in between join."""
        while self._starting:
            name, at = min(self._starting.items(), key=lambda item: item[1])
            if at >= until:
                break
            self._train(at)
            del self._starting[name]
            self._spare.append(name)
            self._join()
        self._train(until)

    @property
    def _step_seconds(self) -> float:
        return self._planner.size(len(self._replicas) * self._per_replica).step_seconds

    def _train(self, until: float) -> None:
        """Train from now to `until`; saves take their share of the time."""
        working = len(self._replicas) * self._per_replica
        seconds = until - self._counted.ledger.at
        if seconds <= 0:
            return
        if not working or not self._step_seconds:
            self._pass_time(until, {"waiting": 1.0}, idle="waiting")
            return
        share = self._costs.save_seconds / (self._save_every + self._costs.save_seconds)
        self._pass_time(until, {"useful": 1 - share, "saving": share})
        steps = seconds * (1 - share) / self._step_seconds
        layout = self._planner.size(working).layout
        self._steps += steps
        self._samples += steps * (layout.batch_size if layout is not None else 0)
        self._unsaved = (self._unsaved + seconds) % self._save_every

    def _apply(self, change: MachineChange) -> None:
        lost = set(change.removed)
        for name in change.removed:
            self._live.pop(name, None)
        self._live |= dict.fromkeys(change.added, change.at)
        broken = [replica for replica in self._replicas if lost & set(replica)]
        whole = [replica for replica in self._replicas if not lost & set(replica)]
        before = len(self._replicas) * self._per_replica
        step = self._step_seconds if self._replicas else 0.0
        self._spare = [name for name in self._spare if name not in lost]
        self._starting = {name: at for name, at in self._starting.items() if name not in lost}
        start = self._counted.ledger.at + self._costs.start_seconds
        self._starting |= {name: start for replica in broken for name in replica if name not in lost}
        self._starting |= dict.fromkeys(change.added, start + self._costs.join_seconds)
        self._replicas = whole
        self._counted.set_machines(self._live)
        if broken:  # the step that ran is lost, and at the last replica all steps since the last save
            redone = self._costs.detect_seconds + step / 2
            self._pause("redoing", redone, f"{len(lost)} machines lost", machines=before)
            self._to_redo = 0.0 if whole else self._unsaved
        self._note_layout()

    def _join(self) -> None:
        """Make replicas of the machines that are ready. The others wait for their connections."""
        before = len(self._replicas) * self._per_replica
        joined = 0
        while len(self._spare) >= self._per_replica:
            self._replicas.append(self._spare[: self._per_replica])
            del self._spare[: self._per_replica]
            joined += 1
        if joined:
            self._pause("morphing", self._costs.gather_seconds, f"{joined} replicas join", machines=before)
            if self._to_redo:
                self._pause("redoing", self._to_redo, "all replicas were lost", machines=before)
                self._to_redo = 0.0
        self._note_layout()

    def _note_layout(self) -> None:
        ledger, working = self._counted.ledger, len(self._replicas) * self._per_replica
        if ledger.periods and ledger.periods[-1].machines == working:
            return
        layout = str(self._planner.size(working).layout) if working else "no replica"
        number = len(ledger.periods) + 1
        ledger.periods.append(
            LayoutPeriod(
                at=ledger.at, generation=number, layout=layout, machines=working, first_step_at=ledger.at
            )
        )

    def _pause(self, cause: Cause, seconds: float, why: str, *, machines: int) -> None:
        """Stop all replicas for some time."""
        ledger = self._counted.ledger
        until = min(self._trace.end, ledger.at + seconds)
        working = min(len(self._replicas) * self._per_replica, len(self._live))
        kind = "loss" if cause == "redoing" else "change"
        one = Interruption(at=ledger.at, why=why, kind=kind, machines=machines)  # type: ignore[arg-type]
        one.add(cause, working * (until - ledger.at))
        ledger.interruptions.append(one)
        if until > ledger.at:
            self._pass_time(until, {cause: 1.0})

    def _pass_time(self, until: float, working: Mapping[Cause, float], *, idle: Cause = "idle") -> None:
        """Book the time of all machines. `working`: parts of the time of those that train, by cause."""
        shares: dict[float | None, dict[Cause, float]] = {}
        for price in self._counted.accounts:
            num_working, num_starting, num_live = self._count(price)
            shares[price] = found = {cause: num_working * part for cause, part in working.items()}
            found["waiting"] = found.get("waiting", 0.0) + num_starting
            found[idle] = found.get(idle, 0.0) + num_live - num_working - num_starting
        self._counted.pass_time(until, shares)

    def _count(self, price: float | None) -> tuple[int, int, int]:
        """Return the numbers of machines that train, that start, and of all, in one account."""
        if price is None:
            return len(self._replicas) * self._per_replica, len(self._starting), len(self._live)
        of_price = self._counted.accounts.of_price
        working = sum(len(of_price(price, names)) for names in self._replicas)
        return working, len(of_price(price, self._starting)), len(of_price(price, self._live))


def machines_of_replica(planner: CachedPlanner, trace: MarketTrace, *, devices_per_machine: int) -> int:
    """Return the machines of one pipeline in the layout for the average number of machines."""
    machines = max(1, round(trace.mean_machines))
    while (layout := planner.size(machines).layout) is None and machines < max(2, 2 * trace.most_machines):
        machines += 1
    return max(1, math.ceil(layout.depth / devices_per_machine)) if layout is not None else 1
