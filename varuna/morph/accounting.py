"""Books every paid machine-second of a job, from the states that `decide` returns.

The manager and the simulation call `Accountant.observe` after each decision. Between two calls, each paid
machine is in one place, so its time has one cause. Time since the last finished step is pending: it becomes
useful when the step ends, and lost if it does not. Steps are reported late, so the time from the end of the
last one to its report stays pending.

A machine is paid from the start of its first agent to the loss or the end of its agent. After a loss, it is
paid again when an agent connects.
"""

import math
from collections.abc import Collection
from itertools import filterfalse

from varuna.morph.failures import shorten_reason
from varuna.morph.members import unsteady_members
from varuna.morph.reports import distinct_reports
from varuna.morph.state import Generation, JobState, Member
from varuna.observe.ledger import Cause, Interruption, InterruptionKind, LayoutPeriod, Ledger, Shares

TRAINING = ("running", "morphing", "saving")
PARTS = {"running": "starting"}
"""Parts of an interruption have the names of phases, but for this one."""
MOST_JOINS = 1000
"""Measured joins that are kept."""


class Accountant:
    def __init__(self, ledger: Ledger, *, devices_per_machine: int) -> None:
        self.ledger = ledger
        self._devices = devices_per_machine
        self._starts: dict[str, float] = {}  # first agent of a machine is starting since then
        self._known: tuple[object, ...] = ()
        self._fractions: dict[str, float] = {}  # machines of the generation: share of devices with a rank
        self._total_fraction = 0.0  # of all of them
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
            *(state.members, state.phase, state.generation, state.holding),
            *(state.proposal, state.planning_for, state.preparation, state.waiting),
        )
        changed = len(self._known) != len(known) or any(
            a is not b for a, b in zip(known, self._known, strict=True)
        )
        if changed or clock >= self._next_welcome:
            self._known = known
            self._divide(state, clock)

    # ------------------------------------------------------------ time

    def _book(self, seconds: float) -> None:
        ledger, shares = self.ledger, self.ledger.shares
        ledger.pending += shares.working * seconds
        ledger.add("idle", shares.idle * seconds)
        ledger.add("waiting", shares.waiting * seconds)
        if shares.between:
            self._lose(shares.between_cause, shares.between * seconds)
        if ledger.interruptions and (ledger.phase != "running" or not ledger.has_stepped or ledger.holding):
            parts = ledger.interruptions[-1].seconds
            part = PARTS.get(ledger.phase, ledger.phase)
            if ledger.holding or (ledger.phase == "gathering" and shares.between_cause == "waiting"):
                part = "waiting"
            parts[part] = parts.get(part, 0.0) + seconds

    def _lose(self, cause: Cause, machine_seconds: float) -> None:
        """Book time that the last interruption has cost."""
        self.ledger.add(cause, machine_seconds)
        if self.ledger.interruptions:
            self.ledger.interruptions[-1].add(cause, machine_seconds)

    def _lose_pending(self, cause: Cause) -> None:
        if self.ledger.pending:
            self._lose(cause, self.ledger.pending)
            self.ledger.pending = 0.0

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
        ledger.add("useful", finished)
        ledger.pending = unfinished
        ledger.steps += steps - redone
        ledger.steps_redone += redone
        full, missing = steps * state.generation.layout.batch_size, self._missing_samples(state)
        ledger.samples += round((full - missing) * (steps - redone) / steps)
        ledger.iteration = state.iteration
        ledger.best_iteration = max(ledger.best_iteration, state.iteration)

    def _missing_samples(self, state: JobState) -> int:
        """Return the samples that the new steps were short of full batches, as at the end of an epoch."""
        workers = distinct_reports(state.progress)
        if not workers:  # a morph begins: their reports are forgotten, and come again
            return 0
        found = max(worker.missing_samples for worker in workers)
        before, self.ledger.missing_samples = self.ledger.missing_samples, found
        return max(0, found - before)  # below 0: new processes, which count from 0

    def _book_save(self, seconds: float) -> None:
        """Book an automatic save. Its end is reported later, so its time may be booked as useful."""
        self.ledger.saves += 1
        self.ledger.save_seconds += seconds
        self.ledger.add("saving", self._take(seconds))

    def _take(self, seconds: float) -> float:
        """Take back the machine-seconds of a pause, which may be booked as useful; return them."""
        ledger = self.ledger
        cost = seconds * ledger.shares.working
        late = min(cost, ledger.pending)
        early = min(cost - late, ledger.amounts.get("useful", 0.0))
        ledger.pending -= late
        ledger.add("useful", -early)
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
            self._lose("morphing", self._take(_morph_pause(state)))
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
        ledger = self.ledger
        shares = Shares(between_cause=_between_cause(state))
        fractions = self._working_fractions(state)
        paid_since, connected = ledger.paid_since, ledger.connected
        trains = state.phase in TRAINING and not state.holding
        joiners = frozenset(() if state.preparation is None else state.preparation.joiners)
        held = frozenset(state.waiting.split(", "))
        self._next_welcome = math.inf
        members, unsteady = state.members, unsteady_members(state.members)
        unpaid = {member.name for member in unsteady if not self._is_paid(member)}
        for name in [name for name in self._starts if name in members and members[name].warm]:
            self._note_join(name)
        for name in list(filterfalse(connected.__contains__, members)):
            if members[name].agent:
                connected.add(name)
        for name in list(filterfalse(unpaid.__contains__, filterfalse(paid_since.__contains__, members))):
            paid_since[name] = ledger.at
            if not members[name].agent:
                self._starts[name] = ledger.at
        # Thousands of steady members work in the generation, or wait for the next one. Look at the others.
        others = {member.name for member in unsteady} | (joiners & members.keys())
        if trains:
            others.update(filterfalse(fractions.__contains__, members))
            others -= fractions.keys()
        for member in [members[name] for name in others - unpaid]:
            held_until = state.wait_over_at if member.name in held else 0.0
            welcome_at = max(member.welcome_at, member.trial_until, held_until)
            if not member.warm or member.name in joiners or (trains and clock < welcome_at):
                shares.waiting += 1.0
                if clock < welcome_at:
                    self._next_welcome = min(self._next_welcome, welcome_at)
            elif trains or member.leaves or member.dismissed_at is not None:
                shares.idle += 1.0
            else:
                shares.between += 1.0
        num_paid = len(members) - len(unpaid)
        rest = num_paid - len(others - unpaid)
        if trains:
            gone = (fractions.keys() & unpaid) | (fractions.keys() - members.keys())
            shares.working = self._total_fraction - sum(fractions[name] for name in gone) if rest else 0.0
            shares.idle += rest - shares.working
        else:
            shares.between += rest
        if num_paid != len(paid_since):
            self._close_accounts(state, unpaid)
        if not ledger.num_machines or ledger.num_machines[-1][1] != num_paid:
            ledger.num_machines.append((ledger.at, num_paid))
        ledger.shares = shares

    def _is_paid(self, member: Member) -> bool:
        if member.agent:
            return True
        starts = member.starting is not None and member.start_failures == 0
        return starts and member.name not in self.ledger.connected

    def _close_accounts(self, state: JobState, unpaid: Collection[str]) -> None:
        """Stop paying for machines that are gone."""
        ledger = self.ledger
        for name in [name for name in ledger.paid_since if name in unpaid or name not in state.members]:
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
        generation = state.generation
        if generation is not None and generation.number != self._fractions_of:
            self._fractions_of = generation.number
            counts = list(map(len, generation.ranks))
            fractions = {count: min(1.0, count / self._devices) for count in set(counts)}
            shares = map(fractions.__getitem__, counts)
            self._fractions = dict(zip(generation.machines, shares, strict=True))
            self._total_fraction = math.fsum(self._fractions.values())
        return self._fractions


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
