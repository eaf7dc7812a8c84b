"""Books every paid machine-second of a job, from the states that `decide` returns.

The manager and the simulation call `Accountant.observe` after each decision. Between two calls, each paid
machine is in one place, so its time has one cause. Time since the last finished step is pending: it becomes
useful when the step ends, and lost if it does not. Steps are reported late, so the time from the end of the
last one to its report stays pending.

A machine is paid from the start of its first agent to the loss or the end of its agent. After a loss, it is
paid again when an agent connects.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import filterfalse
from typing import Literal

from varuna.morph.failures import shorten_reason
from varuna.morph.members import unsteady_members
from varuna.morph.reports import distinct_reports
from varuna.morph.state import Generation, JobState, Member
from varuna.observe.ledger import (
    ROUNDING,
    Accounts,
    Cause,
    Interruption,
    InterruptionKind,
    LayoutPeriod,
    Ledger,
    Shares,
)

Place = Literal["between", "waiting", "idle"]
TRAINING = ("running", "morphing", "saving")
PARTS = {"running": "starting"}
"""Parts of an interruption have the names of phases, but for this one."""
MOST_JOINS = 1000
"""Measured joins that are kept."""


class Accountant:
    def __init__(self, ledger: Ledger, *, devices_per_machine: int) -> None:
        """Each price has an account of its own, if the ledger's prices differ between machines."""
        self.ledger = ledger
        self._accounts = Accounts(ledger)
        self._num_paid: Counter[float | None] = Counter()
        self._count_paid(ledger.paid_since, 1)
        self._devices = devices_per_machine
        self._starts: dict[str, float] = {}  # first agent of a machine is starting since then
        self._known: tuple[object, ...] = ()
        self._fractions: dict[str, float] = {}  # machines of the generation: share of devices with a rank
        self._total_fractions = dict.fromkeys(self._accounts, 0.0)  # their sum, by account
        self._fractions_of = -1
        self._next_welcome = math.inf  # a machine waits until then, by the clock of `decide`

    def observe(self, state: JobState, now: float, *, clock: float | None = None) -> None:
        """Book the time since the last call, and note what `state` changes from now on.

        `now`: the ledger's time. `clock`: the time of `decide`, as that of all times in `state`; None: `now`.
        """
        clock = now if clock is None else clock
        ledger = self.ledger
        seconds = now - ledger.at
        if seconds > 0:
            self._book(seconds)
            ledger.at = now
        self._follow(state, clock)
        # Heartbeats change nothing here. Where members, phase and generation stay, so do the shares.
        known = (
            *(state.members, state.phase, _working_generation(state), state.holding),
            *(state.proposal, state.planning_for, state.preparation, state.waiting),
        )
        changed = len(self._known) != len(known) or any(
            a is not b for a, b in zip(known, self._known, strict=True)
        )
        if changed or clock >= self._next_welcome:
            self._known = known
            self._divide(state, clock)

    def pay_unused(self, machine: str, seconds: float) -> None:
        """Book time for which a machine was paid, but had no agent."""
        ledger = self.ledger
        ledger.machines[machine] = ledger.machines.get(machine, 0.0) + seconds
        for price, account in self._accounts.items():
            if self._accounts.of_price(price, [machine]):
                account.add("idle", seconds)

    # ------------------------------------------------------------ time

    def _book(self, seconds: float) -> None:
        ledger, shares = self.ledger, self.ledger.shares
        for account in self._accounts.values():
            account.pending += account.shares.working * seconds
            account.add("idle", account.shares.idle * seconds)
            account.add("waiting", account.shares.waiting * seconds)
            if account.shares.between:
                account.add(account.shares.between_cause, account.shares.between * seconds)
        if shares.between:
            self._blame(shares.between_cause, shares.between * seconds)
        if ledger.interruptions and (ledger.phase != "running" or not ledger.has_stepped or ledger.holding):
            parts = ledger.interruptions[-1].seconds
            part = PARTS.get(ledger.phase, ledger.phase)
            if ledger.holding or (ledger.phase == "gathering" and shares.between_cause == "waiting"):
                part = "waiting"
            parts[part] = parts.get(part, 0.0) + seconds

    def _blame(self, cause: Cause, machine_seconds: float) -> None:
        """Note time that the last interruption has cost."""
        if self.ledger.interruptions:
            self.ledger.interruptions[-1].add(cause, machine_seconds)

    def _settle(self, cause: Cause, machine_seconds: float) -> None:
        """Book a part of the pending time; it is the same part of each account."""
        if not self.ledger.pending:
            return
        part = machine_seconds / self.ledger.pending
        if part > 1 - ROUNDING:
            part = 1.0
        for account in self._accounts.values():
            moved = account.pending * part
            account.pending -= moved
            account.add(cause, moved)

    def _lose(self, cause: Cause, machine_seconds: float) -> None:
        """Book pending time that the last interruption has cost."""
        self._settle(cause, machine_seconds)
        self._blame(cause, machine_seconds)

    def _lose_pending(self, cause: Cause) -> None:
        if self.ledger.pending:
            self._lose(cause, self.ledger.pending)

    # ------------------------------------------------------------ progress and phases

    def _follow(self, state: JobState, clock: float) -> None:
        ledger, generation = self.ledger, state.generation
        number = generation.number if generation is not None else 0
        if not ledger.interruptions:
            self._interrupt(state, "start")
        goes_on = number == ledger.generation or state.phase == "morphing"  # with the same processes
        if goes_on and ledger.phase in TRAINING:
            self._follow_steps(state, clock)
        if state.holding and not ledger.holding:  # the step that was interrupted runs again
            self._interrupt(state, "loss")
            self._lose_pending("redoing")
        if number != ledger.generation or state.phase != ledger.phase:
            self._change_phase(state, number)
        ledger.holding = state.holding

    def _follow_steps(self, state: JobState, clock: float) -> None:
        """Book the time of finished steps, and of automatic saves. The step that runs stays pending."""
        ledger = self.ledger
        assert state.generation is not None
        if state.step_seconds:
            ledger.step_seconds = ledger.periods[-1].step_seconds = state.step_seconds
        if state.saved_step > ledger.saved_step:
            if ledger.phase == "running":
                self._book_save(state.save_seconds)
                ledger.write_seconds += state.write_seconds
            ledger.saved_step = state.saved_step
        if not ledger.has_stepped:
            ledger.iteration = max(ledger.iteration, state.first_iteration)
        steps = state.iteration - ledger.iteration
        if steps <= 0 or (not ledger.has_stepped and not state.step_seconds):
            return  # the time of one step is not known yet
        unfinished = min(ledger.pending, max(0.0, clock - state.stepped_at) * ledger.shares.working)
        finished = ledger.pending - unfinished
        if not ledger.has_stepped:
            training = min(finished, steps * state.step_seconds * ledger.shares.working)
            self._lose("morphing", finished - training)
            finished = training
            ledger.has_stepped = True
            ledger.periods[-1].first_step_at = ledger.at
            parts = ledger.interruptions[-1].seconds
            if ledger.shares.working and "starting" in parts:
                trained = (training + unfinished) / ledger.shares.working
                parts["starting"] = max(0.0, parts["starting"] - trained)
        redone = max(0, min(state.iteration, ledger.best_iteration) - ledger.iteration)
        if redone:
            repeated = finished * redone / steps
            self._lose("redoing", repeated)
            finished -= repeated
        self._settle("useful", finished)
        ledger.steps += steps - redone
        ledger.steps_redone += redone
        full, missing = steps * state.generation.layout.batch_size, self._missing_samples(state)
        ledger.samples += round((full - missing) * (steps - redone) / steps)
        ledger.iteration = state.iteration
        ledger.best_iteration = max(ledger.best_iteration, state.iteration)

    def _missing_samples(self, state: JobState) -> int:
        """Return the samples that the new steps were short of full batches, as at the end of an epoch."""
        found = state.missing_samples
        before, self.ledger.missing_samples = self.ledger.missing_samples, found
        if found < 0:  # the script chooses its own batches, which are larger than those of the layout
            return found - before
        return max(0, found - before)  # below 0: new processes, which count from 0

    def _book_save(self, seconds: float) -> None:
        """Book an automatic save. Its end is reported later, so its time may be booked as useful."""
        self.ledger.saves += 1
        self.ledger.save_seconds += seconds
        self._book_pause("saving", seconds)

    def _book_pause(self, cause: Cause, seconds: float) -> float:
        """Book a pause of the working machines, which may be booked as useful; return its machine-seconds."""
        ledger = self.ledger
        working = ledger.shares.working
        cost = seconds * working
        late = min(cost, ledger.pending)
        early = min(cost - late, ledger.amounts.get("useful", 0.0))
        self._settle(cause, late)
        for account in self._accounts.values() if early else ():
            taken = early * account.shares.working / working
            account.add("useful", -taken)
            account.add(cause, taken)
        return late + early

    def _change_phase(self, state: JobState, number: int) -> None:
        ledger, before = self.ledger, self.ledger.phase
        changed = number != ledger.generation
        morphs = changed and state.phase == "morphing"  # in place: the workers train on, but for a pause
        if morphs:
            self._interrupt(state, "loss" if state.morph_lost else "change")
            if state.morph_lost:  # the step that was interrupted runs again
                self._lose_pending("redoing")
        elif before == "morphing" and state.phase == "running":
            self._blame("morphing", self._book_pause("morphing", _morph_pause(state)))
            ledger.periods[-1].first_step_at = ledger.at
            ledger.iteration = min(ledger.iteration, state.iteration)  # they may have gone back to copies
        elif before in TRAINING and (state.phase not in TRAINING or changed):
            lost = state.phase == "ending" or (before == "running" and changed)
            if before == "running" and (state.phase != "over"):
                self._interrupt(state, "loss" if lost else "change")
            self._lose_pending(self._cause_at_end(state, lost=lost))
        elif before == "running" and state.phase == "saving":
            self._interrupt(state, "change")
        ledger.phase = state.phase
        if changed and state.generation is not None:
            is_first, ledger.generation = not ledger.periods, number
            if not morphs:
                ledger.iteration = state.generation.resume_step or 0
                ledger.has_stepped = False
                ledger.missing_samples = 0
                if not is_first:
                    self._count_unseen_steps(state.generation)
            ledger.periods.append(
                LayoutPeriod(
                    at=ledger.at,
                    generation=number,
                    layout=str(state.generation.layout),
                    machines=len(state.generation.machines),
                )
            )

    def _count_unseen_steps(self, generation: Generation) -> None:
        """Count steps that were saved, but whose end no heartbeat has reported: their machine was lost."""
        ledger = self.ledger
        unseen = max(0, ledger.iteration - ledger.best_iteration)
        ledger.steps += unseen
        ledger.samples += unseen * generation.layout.batch_size
        ledger.best_iteration += unseen

    def _cause_at_end(self, state: JobState, *, lost: bool) -> Cause:
        """Return the cause of the time since the last step of a generation that ends."""
        if not self.ledger.has_stepped:
            return "morphing"
        if state.phase == "over" and state.verdict is not None and state.verdict.how == "finished":
            return "useful"  # the end of the script
        return "redoing" if lost else "saving"

    def _interrupt(self, state: JobState, kind: InterruptionKind) -> None:
        ledger, why = self.ledger, shorten_reason(state.reason)
        if ledger.holding:  # the reason of the loss is known when the survivors go on, or give up
            ledger.interruptions[-1].why = why
            return
        machines = round(ledger.shares.working)
        ledger.interruptions.append(Interruption(at=ledger.at, why=why, kind=kind, machines=machines))

    # ------------------------------------------------------------ machines

    def _divide(self, state: JobState, clock: float) -> None:
        """Divide the paid machines by what happens to their time from now on."""
        fractions = self._working_fractions(state)
        trains = state.phase in TRAINING and not state.holding
        joiners = _joiners(state)
        held = frozenset(state.waiting.split(", "))
        self._next_welcome = math.inf
        members, unsteady = state.members, unsteady_members(state.members)
        unpaid = {member.name for member in unsteady if not self._is_paid(member)}
        self._update_payments(state, unpaid)
        # Thousands of steady members work in the generation, or wait for the next one. Look at the others.
        others = {member.name for member in unsteady} | (joiners & members.keys())
        if trains:
            others.update(filterfalse(fractions.__contains__, members))
            others -= fractions.keys()
        placed: list[tuple[str, Place]] = []
        for member in [members[name] for name in others - unpaid]:
            held_until = state.wait_over_at if member.name in held else 0.0
            welcome_at = max(member.welcome_at, member.trial_until, held_until)
            if not member.warm or member.name in joiners or (trains and clock < welcome_at):
                placed.append((member.name, "waiting"))
                if clock < welcome_at:
                    self._next_welcome = min(self._next_welcome, welcome_at)
            elif trains or member.leaves or member.dismissed_at is not None:
                placed.append((member.name, "idle"))
            else:
                placed.append((member.name, "between"))
        gone = (fractions.keys() & unpaid) | (fractions.keys() - members.keys()) if trains else set()
        cause = _between_cause(state)
        for price, account in self._accounts.items():
            account.shares = self._shares_of(price, placed, gone if trains else None, cause)

    def _shares_of(
        self,
        price: float | None,
        placed: Sequence[tuple[str, Place]],
        gone: Collection[str] | None,
        between_cause: Cause,
    ) -> Shares:
        """Return the shares of one account: of the machines in `placed`, and of the rest.

        `gone`: machines of the generation that are not paid; None: no generation trains.
        """
        if price is not None:
            placed = [(name, place) for name, place in placed if self._accounts.price_of(name) == price]
            gone = gone and self._accounts.of_price(price, gone)
        counts = Counter(place for _, place in placed)
        shares = Shares(
            between=counts["between"],
            waiting=counts["waiting"],
            idle=counts["idle"],
            between_cause=between_cause,
        )
        rest = self._num_paid[price] - len(placed)
        if gone is None:
            shares.between += rest
        elif rest:
            lost = sum(self._fractions[name] for name in gone)
            shares.working = self._total_fractions[price] - lost
            shares.idle += rest - shares.working
        return shares

    def _count_paid(self, names: Collection[str], change: int) -> None:
        """Count machines that are paid from now on, or no longer, in each account."""
        self._num_paid[None] += change * len(names)
        for name in names if self.ledger.by_price else ():
            self._num_paid[self._accounts.price_of(name)] += change

    def _update_payments(self, state: JobState, unpaid: Collection[str]) -> None:
        """Start paying for new machines, and stop paying for those that are gone."""
        ledger, members = self.ledger, state.members
        paid_since, connected = ledger.paid_since, ledger.connected
        for name in [name for name in self._starts if name in members and members[name].warm]:
            self._note_join(name)
        for name in list(filterfalse(connected.__contains__, members)):
            if members[name].agent:
                connected.add(name)
        new = list(filterfalse(unpaid.__contains__, filterfalse(paid_since.__contains__, members)))
        for name in new:
            paid_since[name] = ledger.at
            if not members[name].agent:
                self._starts[name] = ledger.at
        self._count_paid(new, 1)
        num_paid = len(members) - len(unpaid)
        if num_paid != len(paid_since):
            self._close_accounts(state, unpaid)
        if not ledger.num_machines or ledger.num_machines[-1][1] != num_paid:
            ledger.num_machines.append((ledger.at, num_paid))

    def _is_paid(self, member: Member) -> bool:
        if member.agent:
            return True
        starts = member.starting is not None and member.start_failures == 0
        return starts and member.name not in self.ledger.connected

    def _close_accounts(self, state: JobState, unpaid: Collection[str]) -> None:
        """Stop paying for machines that are gone."""
        ledger = self.ledger
        gone = [name for name in ledger.paid_since if name in unpaid or name not in state.members]
        self._count_paid(gone, -1)
        for name in gone:
            ledger.machines[name] = ledger.machines.get(name, 0.0) + ledger.at - ledger.paid_since.pop(name)
            self._starts.pop(name, None)
        ledger.connected &= state.members.keys()

    def _note_join(self, name: str) -> None:
        """The first joins of a job differ: all at once, and with nothing in any cache."""
        started, periods = self._starts.pop(name), self.ledger.periods
        is_first = not periods or started < periods[0].at
        found = self.ledger.first_join_seconds if is_first else self.ledger.join_seconds
        if len(found) < MOST_JOINS:
            found.append(self.ledger.at - started)

    def _working_fractions(self, state: JobState) -> dict[str, float]:
        """Return the share of devices with a rank, of each machine of the generation."""
        generation = _working_generation(state)
        if generation is not None and generation.number != self._fractions_of:
            self._fractions_of = generation.number
            counts = list(map(len, generation.ranks))
            fractions = {count: min(1.0, count / self._devices) for count in set(counts)}
            shares = map(fractions.__getitem__, counts)
            self._fractions = dict(zip(generation.machines, shares, strict=True))
            self._total_fractions = dict.fromkeys(self._accounts, 0.0)
            self._total_fractions[None] = math.fsum(self._fractions.values())
            for name, fraction in self._fractions.items() if self.ledger.by_price else ():
                self._total_fractions[self._accounts.price_of(name)] += fraction
        return self._fractions


def _working_generation(state: JobState) -> Generation | None:
    """Return the generation whose machines train: until all have begun a planned morph, the one before."""
    if state.phase == "morphing" and not state.morph_lost and not state.morph_begun_at:
        return state.morphed_from or state.generation
    return state.generation


def _joiners(state: JobState) -> frozenset[str]:
    """Return the machines that build their model, or wait for the end of the last step without them."""
    if state.preparation is not None:
        return frozenset(state.preparation.joiners)
    before, following = _working_generation(state), state.generation
    if before is following or before is None or following is None:
        return frozenset()
    return following.machine_set - before.machine_set


def _morph_pause(state: JobState) -> float:
    """Return the pause of a morph that is over. Before the order, survivors of a loss were in a step."""
    workers = distinct_reports(state.progress)
    waited = [worker.morph_parts.waited if state.morph_lost else 0.0 for worker in workers]
    pauses = [worker.morph_seconds - before for worker, before in zip(workers, waited, strict=True)]
    return max(0.0, *pauses) if pauses else 0.0


def _between_cause(state: JobState) -> Cause:
    """Return "waiting" if the job waits for machines, "morphing" if it prepares the next generation."""
    if state.holding:
        return "waiting"
    if state.phase != "gathering":
        return "morphing"
    if state.planning_for is not None or state.finding_checkpoint:
        return "morphing"
    proposal = state.proposal
    return "morphing" if proposal is not None and proposal.layout is not None else "waiting"
