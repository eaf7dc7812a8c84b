"""Machines of the job: the machine list, agents that start, join and leave, and notices."""

from collections.abc import Sequence
from itertools import filterfalse

import msgspec

from varuna.morph import commands, events
from varuna.morph.members import Members, unsteady_members, unsteady_names
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.history import machine_lost, machine_ready
from varuna.morph.rules.orders import break_morph, may_lack_order, repeat_order
from varuna.morph.rules.survivors import ANYWAY, handing_over, log_cold_restart, why_not_recover
from varuna.morph.rules.worth import time_to_leave, trial_wait
from varuna.morph.state import Member

EMPTY_LIST = "it names no machine; nothing changes (`varuna stop` ends the job)"


def machine_list_read(decision: Decision, event: events.MachineListRead) -> None:
    if not event.machines:
        decision.log("list ignored", EMPTY_LIST)
        decision.report_problem("machine list", EMPTY_LIST)
        return
    members = Members(decision.state.members)
    added = tuple(name for name in event.machines if name not in members or not members[name].listed)
    for name in added:
        known = members.get(name)
        if known is None:
            welcome_at = _welcome_at(decision, name)
            members[name] = Member(name, retry_at=decision.state.attach_until, welcome_at=welcome_at)
        else:
            members[name] = msgspec.structs.replace(
                known, listed=True, leave_by=None, drained=False, kept=False, successors=()
            )
        decision.log("machine listed", name + _describe_wait(decision, members[name]))
    listed = set(event.machines)
    for name, member in members.items():
        if member.listed and name not in listed:
            kept = bool(member.agent) and (decision.is_working(name) or decision.state.phase != "running")
            members[name] = msgspec.structs.replace(member, listed=False, kept=kept, successors=added)
            decision.log("machine unlisted", name)
        elif member.kept:
            successors = (*member.successors, *added)
            members[name] = msgspec.structs.replace(member, successors=successors)
    decision.set(members=members)


def agent_joined(decision: Decision, event: events.AgentJoined) -> None:
    name = event.machine
    member = decision.state.members.get(name)
    # An agent ignores numbers that are not above its last one, so none is given twice.
    decision.set(next_number=max(decision.state.next_number, (event.generation or 0) + 1))
    hands_over = name in handing_over(decision)
    if member is None or not (member.listed or member.kept or hands_over or decision.is_working(name)):
        member = msgspec.structs.replace(member or Member(name), agent=event.agent, listed=False)
        member = msgspec.structs.replace(member, seen=decision.now, starting=None, workers=None)
        decision.put("members", name, member)
        _dismiss(decision, member, "the machine is not in the list")
        return
    if member.dismissed_at is not None:
        if member.agent == event.agent:
            decision.do(commands.EndAgent(name, "it was dismissed"))
            return
        member = msgspec.structs.replace(member, agent="", dismissed_at=None)
    if member.agent and member.agent != event.agent:
        lose_machine(decision, member, "another agent replaced its agent")
    is_known = name in decision.state.lost  # its survivors are about to go on without it
    lacks_order = not is_known and may_lack_order(decision, event)
    continues = lacks_order or (not is_known and _continues(decision, event))
    stays = continues and not hands_over
    decision.set_member(
        name,
        agent=event.agent,
        address=event.address or name,
        leave_by=member.leave_by if member.agent == event.agent else None,
        seen=decision.now,
        starting=None,
        start_failures=0,
        warm=event.store_port > 0 or event.generation is not None,
        store_port=0 if _serves_generation(decision, event) else event.store_port,
        workers=decision.generation.number if stays else event.generation,
        released=False,
        dismissed_at=None,
    )
    _note_ready(decision, name)
    decision.log("agent joined", name + (f", with generation {event.generation}" if continues else ""))
    if continues:
        if lacks_order:
            repeat_order(decision, name)
        if decision.state.phase == "saving":  # the earlier request may not have reached it
            decision.do(commands.SaveAndEnd(decision.generation.number, (name,), decision.state.reason))
        return
    if event.generation is not None:
        why = f"generation {event.generation} is not the current one"
        decision.do(commands.KillWorkers(event.generation, (name,), why))
    if decision.is_working(name) and decision.state.phase != "ending" and not is_known:
        decision.end_generation(f"{name} came back without its workers")


def _continues(decision: Decision, event: events.AgentJoined) -> bool:
    """Return True if the agent reconnects with the workers that it has in the current generation."""
    if event.generation is None or not decision.is_working(event.machine, event.generation):
        return False
    index = decision.generation.machines.index(event.machine)
    return decision.generation.agents[index] == event.agent


def _serves_generation(decision: Decision, event: events.AgentJoined) -> bool:
    """Return True if the agent's next store is that of the current generation, which it does not know yet."""
    generation = decision.state.generation if decision.state.active else None
    if generation is None or event.machine != generation.machines[0]:
        return False
    return event.store_port == generation.master_port and event.generation != generation.number


def agent_left(decision: Decision, event: events.AgentLeft) -> None:
    if member := decision.member_of_agent(event.machine, event.agent):
        lose_machine(decision, member, event.why)


def agent_not_started(decision: Decision, event: events.AgentNotStarted) -> None:
    member = decision.state.members.get(event.machine)
    if member is None or member.agent:
        return
    failures = member.start_failures + 1
    wait = min(60.0, 2.0**failures)
    decision.set_member(event.machine, starting=None, start_failures=failures, retry_at=decision.now + wait)
    decision.log("agent not started", f"{event.machine}: {event.why} (retry in {wait:.0f} s)")


def store_ready(decision: Decision, event: events.StoreReady) -> None:
    if decision.member_of_agent(event.machine, event.agent):
        decision.set_member(event.machine, store_port=event.port, warm=True)
        _note_ready(decision, event.machine)


def _note_ready(decision: Decision, name: str) -> None:
    """Note that a machine has become usable. One that tends to leave again must stay for some time first."""
    member = decision.state.members[name]
    if not member.warm or member.ready_at:
        return
    machine_ready(decision, name, began_at=member.began_at)
    decision.set_member(name, began_at=0.0)
    if not decision.settings.greedy and (wait := trial_wait(decision, name)):
        decision.set_member(name, trial_until=decision.now + wait)
        stays = decision.state.stays[name]
        stayed = sum(stay.seconds for stay in stays) / len(stays)
        decision.log(
            "on trial",
            f"{name} stayed {len(stays)} times, for {stayed:.0f} s on average; its join and its end cost "
            f"the others {wait:.0f} machine-seconds: it is used if it stays for as long",
        )


def notice_received(decision: Decision, event: events.NoticeReceived) -> None:
    if event.machine not in decision.state.members:
        decision.log("notice ignored", f"{event.machine} is not in the list: {event.why}")
        return
    if event.deadline is None:
        decision.set_member(event.machine, drained=True, released=False)
    else:
        decision.log("notice", f"{event.machine}: {event.why}")
        leave_at = time_to_leave(decision, event.machine, event.deadline)
        decision.set_member(event.machine, leave_by=event.deadline, leave_at=leave_at, released=False)
        decision.set(retry_change_at=0.0)  # there may not be much time
        return
    decision.log("notice", f"{event.machine}: {event.why}")


def notice_withdrawn(decision: Decision, event: events.NoticeWithdrawn) -> None:
    if event.machine in decision.state.members:
        decision.set_member(event.machine, leave_by=None, released=False)
        decision.log("notice withdrawn", event.machine)


def lose_machine(decision: Decision, member: Member, why: str) -> None:
    """Give the machine up. If it comes back, its old workers are killed before it is used again."""
    if member.dismissed_at is not None:  # this was to be expected
        _forget(decision, member.name)
        if member.listed:  # again: it may have a new agent now
            fresh = Member(member.name, welcome_at=member.welcome_at)
            decision.put("members", member.name, fresh)
        return
    was_working = decision.is_working(member.name)
    if member.name in handing_over(decision):
        break_morph(decision, f"{member.name} was lost while it handed its state over: {why}")
    _note_absence(decision, member.name)
    machine_lost(decision, member, was_working=was_working)
    wait = max(0.0, _welcome_at(decision, member.name) - decision.now)
    decision.set_member(
        member.name,
        agent="",
        workers=None,
        warm=False,
        store_port=0,
        starting=None,
        ready_at=0.0,
        began_at=0.0,
        retry_at=decision.now + wait / 10.0,
        welcome_at=decision.now + wait,
    )
    waits = _describe_wait(decision, decision.state.members[member.name])
    decision.log("machine lost", f"{member.name}: {why}{waits}")
    if was_working:
        # Machines that are lost together are checked together, by `hot.recover`.
        why_not = "" if decision.state.lost else why_not_recover(decision, member.name)
        if decision.state.phase in ("running", "morphing") and why_not != ANYWAY:
            first = not (decision.state.failures or decision.state.lost)
            failed_at = decision.now if first else decision.state.failed_at
            decision.set(lost={**decision.state.lost, member.name: why}, failed_at=failed_at)
        elif decision.state.phase != "ending":  # else an earlier loss has ended the generation
            decision.set(losses=decision.state.losses + 1)
            decision.end_generation(f"{member.name} was lost: {why}")
            log_cold_restart(decision, why_not)


def _note_absence(decision: Decision, name: str) -> None:
    """Remember that a machine was lost or dismissed just now; `forget_absences` drops what is long ago."""
    since = decision.now - decision.settings.flap_seconds
    recent = tuple(at for at in decision.state.absences.get(name, ()) if at > since)
    decision.put("absences", name, (*recent, decision.now))


def _welcome_at(decision: Decision, name: str) -> float:
    """Return the time before which a machine is not used: after its first absence it need not wait."""
    times = decision.state.absences.get(name, ())
    return times[-1] + 10.0 * 2.0 ** min(len(times) - 1, 5) if len(times) > 1 else 0.0


def _describe_wait(decision: Decision, member: Member) -> str:
    wait = member.welcome_at - decision.now
    count = len(decision.state.absences.get(member.name, ()))
    return f" (left or lost {count} times recently: not used for {wait:.0f} s)" if wait > 0 else ""


def _dismiss(decision: Decision, member: Member, why: str) -> None:
    """End the agent. The machine may get another one as soon as this one is gone."""
    _note_absence(decision, member.name)
    decision.set_member(
        member.name,
        dismissed_at=decision.now,
        kept=False,
        welcome_at=_welcome_at(decision, member.name),
    )
    decision.do(commands.EndAgent(member.name, why))


def lose_silent_machines(decision: Decision) -> None:
    since = decision.now - decision.settings.lost_seconds
    for member in [m for m in decision.state.members.values() if m.seen < since and m.agent]:
        silence = decision.now - member.seen
        decision.do(commands.EndAgent(member.name, "it sends no heartbeat", unresponsive=True))
        lose_machine(decision, member, f"no heartbeat for {silence:.1f} s")


def start_and_end_agents(decision: Decision) -> None:
    """Start missing agents, end agents of unlisted machines, and retry starts that took too long."""
    for member in unsteady_members(decision.state.members):
        name = member.name
        if member.dismissed_at is not None:
            if decision.now - member.dismissed_at > decision.settings.end_seconds:
                decision.do(commands.EndAgent(name, "it does not exit", unresponsive=True))
                lose_machine(decision, member, "it did not exit")
        elif member.agent:
            in_use = member.listed or member.kept or decision.is_working(name)
            if not in_use and member.workers is None:
                _dismiss(decision, member, "the machine is no longer in the list")
        elif member.starting is not None:
            limit = decision.settings.start_seconds
            if decision.now - member.starting > limit:
                decision.do(commands.EndAgent(name, "it did not connect"))
                why = f"it did not connect within {limit:.0f} s (can it reach the manager's address?)"
                agent_not_started(decision, events.AgentNotStarted(name, why))
        elif not member.listed:
            _forget(decision, name)
        elif decision.now >= max(member.retry_at, member.leave_by or 0.0) and not decision.state.verdict:
            decision.set_member(name, starting=decision.now, began_at=decision.now)
            decision.do(commands.StartAgent(name))


def _forget(decision: Decision, name: str) -> None:
    decision.drop("members", name)


def ready_machines(
    decision: Decision,
    *,
    without_flapping: bool = False,
    without_trials: bool = False,
    with_kept: bool = False,
) -> tuple[str, ...]:
    """Return the listed machines that can run workers now, those of the last generation first.

    `without_flapping` leaves out machines that were lost several times recently, `without_trials` those that
    are not worth a change yet. `with_kept` adds machines that were removed from the list but are kept.
    """
    last, members = decision.state.generation, decision.state.members
    current = last.number if last is not None and decision.state.active else None
    preparation = decision.state.preparation
    prepared = preparation.generation.number if preparation is not None else None

    def is_ready(name: str) -> bool:
        member = members[name]
        if not (member.agent and member.warm) or not (member.listed or (with_kept and member.kept)):
            return False
        if member.dismissed_at is not None or member.drained or member.workers not in free:
            return False
        if member.leave_by is not None and (decision.now >= member.leave_at or not decision.is_working(name)):
            return False
        waits = (decision.now < member.welcome_at and without_flapping) or (
            decision.now < member.trial_until and without_trials
        )
        return not waits or decision.is_working(name)

    free = {None, current, prepared}
    # Steady members are ready, unless they have other workers. Thousands of them: no calls for each.
    steady = free.issuperset({member.workers for member in members.values()})
    unready = set(filterfalse(is_ready, unsteady_names(members) if steady else members))
    if last is None:
        return tuple(filterfalse(unready.__contains__, members))
    first = filterfalse(unready.__contains__, filter(members.__contains__, last.machines))
    others = filterfalse(last.machine_set.__contains__, members)
    return (*first, *filterfalse(unready.__contains__, others))


def kept_machines(decision: Decision) -> list[Member]:
    """Return the machines that were removed from the list but are still used."""
    return [m for m in unsteady_members(decision.state.members) if m.kept and not m.leaves]


def why_kept(decision: Decision, listed: tuple[str, ...]) -> str:
    """Say why the job cannot do with the `listed` machines that are ready; "" if it can or may try."""
    members = decision.state.members
    expected = dict.fromkeys(name for member in kept_machines(decision) for name in member.successors)
    absent = [
        name
        for name in expected
        if name not in listed and name in members and members[name].listed and not members[name].leaves
    ]
    if absent:
        return f"{', '.join(absent)} has not joined"
    if not listed:
        return "no machine of the list is ready"
    if listed == decision.state.unplannable:
        return f"{', '.join(listed)} is not enough"
    return ""


def note_usable_machines(decision: Decision) -> None:
    """Update the present and the usable machines, with the times of their last changes."""
    absent = {
        m.name
        for m in unsteady_members(decision.state.members)
        if not (m.listed and m.agent) or m.leaves or m.dismissed_at is not None
    }
    present = tuple(filterfalse(absent.__contains__, decision.state.members))
    if present != decision.state.present:
        decision.set(present=present, present_at=decision.now)
    usable = ready_machines(decision, without_flapping=True, without_trials=True)
    if usable != decision.state.usable:
        decision.set(usable=usable, changed_at=decision.now)


def release_machines(decision: Decision) -> None:
    """Report machines that may be taken away now, before their deadline."""
    for member in unsteady_members(decision.state.members):
        name = member.name
        if not member.leaves:
            continue
        needed = decision.is_working(name) or name in decision.leavers()
        if member.agent and not member.released and not needed:
            decision.set_member(name, released=True)
            decision.do(commands.ReleaseMachines((name,)))


def clause(names: Sequence[str], verb: str) -> str:
    """Return machines with a verb: "a joins", or "a, b join"."""
    return f"{', '.join(names)} {verb}{'s' if len(names) == 1 else ''}"
