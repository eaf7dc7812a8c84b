"""Is a change of machines worth its pause? Applies `varuna.morph.policy` to a decision, and says why."""

import math
from collections.abc import Iterable
from statistics import fmean, median

import msgspec

from varuna.morph import policy
from varuna.morph.members import unsteady_members
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.history import change_cost
from varuna.morph.state import Member


def is_due(decision: Decision, member: Member) -> bool:
    """Return True if the machine must leave the generation now."""
    return member.drained or (member.leave_by is not None and decision.now >= member.leave_at)


def time_to_leave(decision: Decision, name: str, deadline: float) -> float:
    """Return when a machine with a notice begins to leave: now, or as late as is safe."""
    state, history = decision.state, decision.state.history
    if decision.settings.greedy or not state.step_seconds or not decision.is_working(name):
        return decision.now
    num_leaving = len({name, *(member.name for member in noticed_machines(decision))})
    needed = _seconds_to_leave(decision, num_leaving)
    if needed is None:
        return decision.now
    seconds = deadline - needed - decision.now
    if not policy.worth_staying(history, seconds=seconds, num_machines=len(decision.generation.machines)):
        return decision.now
    slowest = policy.slowest_leave(history, all_leave=_all_leave(decision, num_leaving))
    decision.set(history=msgspec.structs.replace(history, held=history.held + 1))
    decision.log(
        "leaves later",
        f"{name} works on for {seconds:.0f} s, until {needed:.0f} s before its deadline: a step takes "
        f"{state.step_seconds:.1f} s, and a leave after it {slowest:.1f} s at most so far",
    )
    return deadline - needed


def _seconds_to_leave(decision: Decision, num_leaving: int) -> float | None:
    """Return how long before its deadline a machine must begin to leave; None: at once.

    Machines that leave one after another make steps longer, by their share. The last ones leave together.
    """
    num_machines = len(decision.generation.machines)
    return policy.seconds_to_leave(
        decision.state.history,
        step_seconds=decision.state.step_seconds * num_machines / max(1, num_machines - num_leaving),
        all_leave=_all_leave(decision, num_leaving),
    )


def _all_leave(decision: Decision, num_leaving: int) -> bool:
    return num_leaving >= len(decision.generation.machines)


def noticed_machines(decision: Decision) -> list[Member]:
    """Return the machines of the generation that have a notice, or are drained."""
    found = [m for m in unsteady_members(decision.state.members) if m.leaves]
    return [m for m in found if m.name in decision.generation.machine_set]


def leave_earlier(decision: Decision, noticed: list[Member]) -> None:
    """Let machines leave earlier than was intended, as steps have become longer or more machines leave."""
    needed = _seconds_to_leave(decision, len(noticed))
    for member in noticed:
        if member.leave_by is not None and decision.now < member.leave_at:
            leave_at = decision.now if needed is None else member.leave_by - needed
            if leave_at < member.leave_at:
                decision.set_member(member.name, leave_at=leave_at)


def leave_together(decision: Decision) -> None:
    """Let machines leave now that would leave so soon that a second change costs more than they add.

    So do machines whose deadline leaves no time for a second change.
    """
    history, machines = decision.state.history, decision.generation.machines
    cost = median(history.change_seconds) * len(machines) if history.change_seconds else 0.0
    for name in machines:
        member = decision.state.members.get(name)
        if member is None or member.leave_by is None or member.leave_at <= decision.now:
            continue
        if member.leave_at - decision.now <= cost or not _fits_before(decision, member.leave_by):
            decision.set_member(name, leave_at=decision.now)


def _fits_before(decision: Decision, deadline: float) -> bool:
    state = decision.state
    return policy.fits_before(state.history, deadline - decision.now, step_seconds=state.step_seconds)


def leaves_first(decision: Decision, staying: Iterable[str]) -> bool:
    """Return True if a machine with a notice must leave before a change in which it stays."""
    members = (decision.state.members.get(name) for name in staying)
    deadlines = [m.leave_by for m in members if m is not None and m.leave_by is not None]
    if decision.settings.greedy or not deadlines:
        return False
    return not _fits_before(decision, min(deadlines))


def next_leave(decision: Decision) -> float:
    """Return when the next machine of the generation with a notice begins to leave."""
    times = (m.leave_at for m in noticed_machines(decision) if m.leave_by is not None)
    return min(times, default=float("inf"))


def joins_later(decision: Decision, joiners: list[str]) -> bool:
    """Return True while these machines are not worth a change of their own, and log why."""
    why, seconds = _why_later(decision, joiners)
    if why:
        decision.set(wait_over_at=decision.now + seconds)
        names = ", ".join(joiners)
        if decision.state.waiting != names:
            decision.set(waiting=names)
            decision.log("joins later", f"{names}: {why}")
    elif decision.state.waiting:
        decision.set(waiting="")
    return bool(why)


def _why_later(decision: Decision, joiners: list[str]) -> tuple[str, float]:
    """Return why the joiners wait, and for how many seconds at most; "" if they should join now."""
    state, history, now = decision.state, decision.state.history, decision.now
    if decision.settings.greedy or not history.change_seconds:
        return "", 0.0
    pause, num_machines = median(history.change_seconds), len(decision.generation.machines)
    limit = pause * num_machines  # to wait never costs more than a change
    idle = sum(now - state.members[name].ready_at for name in joiners)
    left = (limit - idle) / len(joiners)
    if left <= 1e-6:
        return "", 0.0
    cost = f"a change stops {num_machines} machines for {pause:.1f} s"
    restarts = not decision.settings.hot  # other changes take joiners along; in place, they do not
    leave = next_leave(decision) - now
    if restarts and leave * len(joiners) < limit:
        return f"{cost}, and another machine leaves in {leave:.0f} s anyway", min(left, leave)
    since = history.since or 0.0
    joins = policy.rate([at for at, _ in history.joins], since=since, now=now)
    forced = policy.rate(history.forced, since=since, now=now) if restarts else 0.0
    together = sum(number for _, number in history.joins) / max(1, len(history.joins))
    enough = len(history.joins) >= policy.FEWEST
    events = policy.joins_per_change(limit / together, joins=joins, forced=forced) if enough else 1
    wanted = math.ceil(events * together)
    if events == 1 or len(joiners) >= wanted:
        return "", 0.0
    others = f", other changes every {1 / forced:.0f} s" if forced else ""
    why = f"{cost}; machines join every {1 / joins:.0f} s{others}: {wanted} joiners are worth one"
    return f"{why} (at the latest in {left:.0f} s)", left


def trial_wait(decision: Decision, name: str) -> float:
    """Return how long a machine that left before must stay before it is used; 0: it is used at once."""
    stays = decision.state.stays.get(name, ())
    if not stays:
        return 0.0
    cost = change_cost(decision, share_lost=fmean(stay.was_lost for stay in stays))
    return policy.trial_seconds([stay.seconds for stay in stays], cost=cost) if cost else 0.0


def waits_for_joiners(decision: Decision) -> bool:
    """Return True while a restart should wait for machines that are about to be ready, and log why."""
    state, history, now = decision.state, decision.state.history, decision.now
    if decision.settings.greedy or not history.change_seconds:
        return False
    later, num_machines = median(history.change_seconds), len(state.usable)
    if forced := policy.rate(history.forced, since=history.since or 0.0, now=now):
        later = min(later, 1 / forced / max(1, num_machines))  # a machine that is late may wait that long
    if now - state.since >= later:
        return False
    starting = [
        member
        for member in unsteady_members(state.members)
        if member.began_at and not member.warm and member.listed and not member.leaves
    ]
    waits = [now - member.began_at for member in starting]
    seconds = policy.worth_waiting(history, waits, later_seconds=later - (now - state.since))
    if seconds <= 1e-6:
        return False
    names = ", ".join(member.name for member in starting)
    # The pause that follows is longer than that of a change, and is not measured as one.
    unmeasured = msgspec.structs.replace(history, stopped_at=None)
    decision.set(wait_over_at=now + seconds, history=unmeasured)
    if state.waiting != names:
        decision.set(waiting=names)
        decision.log(
            "waiting",
            f"{names} is ready in {seconds:.1f} s; to join after the restart costs all {later:.1f} s",
        )
    return True
