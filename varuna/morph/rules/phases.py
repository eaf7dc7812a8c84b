"""Phases of a job: conditions to launch, to change the machines, to save, and to end."""

from itertools import filterfalse

from varuna.morph import commands, events
from varuna.morph.rules import hot
from varuna.morph.rules.decision import Decision, members_with_workers, request_plan, save_deadline
from varuna.morph.rules.history import forced_change
from varuna.morph.rules.membership import clause, kept_machines, lose_machine, ready_machines, why_kept
from varuna.morph.rules.orders import give_up_workers
from varuna.morph.rules.survivors import joining_ranks, log_cold_restart, why_not_hot, why_not_recover
from varuna.morph.rules.workers import crash_when_cause_is_known, end_hang, is_hung
from varuna.morph.rules.worth import (
    is_due,
    joins_later,
    leave_earlier,
    leave_together,
    noticed_machines,
    waits_for_joiners,
)
from varuna.morph.state import JobVerdict, MachinePlan

POSTPONED = "change postponed"
FINISHED = JobVerdict("finished", 0, "every worker ended normally")


def plan_ready(decision: Decision, event: events.PlanReady) -> None:
    proposal = event.proposal
    requested = decision.state.planning_for
    if requested is None or not proposal.is_for(requested, decision.state.planning_devices):
        return
    decision.set(planning_for=None, proposal=proposal)
    if proposal.layout is None:
        if not proposal.devices:
            decision.set(unplannable=proposal.machines)
        decision.log("no plan", f"{', '.join(proposal.machines)}: {proposal.problem}")
    elif decision.state.phase == "running" and proposal.same_as(decision.generation):
        decision.log("plan unchanged", f"{proposal.layout}; nothing restarts")


def checkpoint_found(decision: Decision, event: events.CheckpointFound) -> None:
    decision.set(finding_checkpoint=False)
    if event.problem and not event.none_left:
        decision.log("no checkpoint", event.problem)
    proposal = decision.state.proposal
    if decision.state.phase != "gathering" or proposal is None:
        return
    if event.none_left:
        decision.finish(JobVerdict("failed", 1, event.problem))
    elif proposal.is_for(_machines_to_use(decision)) and _can_launch(decision, proposal):
        decision.launch(proposal, event.step)


def stop_requested(decision: Decision, event: events.StopRequested) -> None:
    decision.set(verdict=JobVerdict("stopped", event.exit_code, event.why))
    broken = bool(
        decision.state.failures or decision.state.lost
    )  # its workers wait for others, and cannot save
    if decision.state.phase == "running" and event.save and not broken:
        decision.save_and_end(event.why)
    elif decision.state.active and (broken or not event.save):
        decision.end_generation(event.why)


def gather(decision: Decision) -> None:
    """Wait for machines, then for a plan, then for the newest checkpoint; then launch."""
    state = decision.state
    if state.verdict is not None:
        decision.finish(state.verdict)
        return
    ready = _machines_to_use(decision)
    if not ready or decision.now < state.wait_until or not _enough_machines(decision, ready):
        return
    if decision.leavers():
        return
    proposal = state.proposal
    if proposal is None or not proposal.is_for(ready):
        request_plan(decision, ready)
    elif _can_launch(decision, proposal):
        if state.generation is None and state.resume_step is not None:
            decision.launch(proposal, state.resume_step)
        elif not state.store:
            decision.launch(proposal, None)
        elif not state.finding_checkpoint:
            decision.set(finding_checkpoint=True)
            decision.do(commands.FindCheckpoint(state.store))


def _machines_to_use(decision: Decision) -> tuple[str, ...]:
    """Return the listed machines that are ready; if they are not enough, also those that are kept."""
    listed = _stable_machines(decision)
    with_kept = bool(kept_machines(decision)) and why_kept(decision, listed)
    return ready_machines(decision, with_kept=True) if with_kept else listed


def _stable_machines(decision: Decision) -> tuple[str, ...]:
    """Return the machines that are ready, without those that tend to leave again if the others are enough."""
    ready, unplannable = ready_machines(decision), decision.state.unplannable
    if decision.settings.greedy or ready == unplannable:
        return ready
    stable = ready_machines(decision, without_trials=True)
    return ready if stable in ((), unplannable) else stable


def _enough_machines(decision: Decision, ready: tuple[str, ...]) -> bool:
    """Return False while a new job still waits for listed machines."""
    if decision.state.generation is not None:
        return not waits_for_joiners(decision)
    waited = decision.now - decision.state.since >= decision.settings.gather_seconds
    expected = {m.name for m in decision.state.members.values() if m.listed and not m.leaves}
    return waited or expected <= set(ready)


def _can_launch(decision: Decision, proposal: MachinePlan) -> bool:
    """Return True if there is a layout, no newer plan is on the way, and rank 0 has a store."""
    if proposal.layout is None or decision.state.planning_for is not None:
        return False
    return decision.state.members[proposal.used[0]].store_port > 0


def run(decision: Decision) -> None:
    if decision.state.failures or decision.state.lost:
        if not hot.recover(decision):
            _end_after_loss(decision)
    elif decision.all_ended():
        _finish_or_gather(decision)
    elif is_hung(decision):
        end_hang(decision)
    elif decision.state.preparation is not None:
        hot.continue_preparation(decision, decision.state.preparation)
    elif decision.state.postponed:
        try_postponed_change(decision)
    elif decision.settings.morphs:
        consider_change(decision)


def _end_after_loss(decision: Decision) -> None:
    why_not = why_not_recover(decision)
    if not decision.state.lost and decision.state.failures:
        crash_when_cause_is_known(decision)
    elif not decision.state.lost:
        decision.end_generation(decision.state.morph_broken)
    else:
        losses = (f"{machine} was lost: {why}" for machine, why in decision.state.lost.items())
        decision.set(losses=decision.state.losses + 1)
        decision.end_generation("; ".join(losses))
    log_cold_restart(decision, why_not)


def _finish_or_gather(decision: Decision) -> None:
    """Finish the job after its last worker, unless the workers ended because the manager requested it."""
    if _saved_on_demand(decision) and decision.state.save_requested and not decision.state.verdict:
        decision.enter("gathering", decision.state.reason)
    elif _saved_on_demand(decision):
        stopped = JobVerdict("stopped", 0, "all workers saved and exited after SIGUSR1")
        decision.finish(decision.state.verdict or stopped)
    else:
        decision.finish(FINISHED)


def wait_for_morph(decision: Decision) -> None:
    """Wait until all workers have entered the generation. Restart from the store if they do not."""
    hot.follow_progress(decision)
    last = decision.state.morphed_from
    before = last.machine_set if last is not None else frozenset()
    staying = list(filter(before.__contains__, decision.generation.machines))
    has_ended = all(name in decision.state.ended for name in staying)  # before it saw the order
    if not has_ended and (ended := _ended_before_entering(decision)):
        give_up_workers(decision, ended, "its workers ended in the middle of the change")
    state = decision.state
    if state.failures or state.lost or state.morph_broken:
        if not hot.recover(decision):
            _end_after_loss(decision)
    elif has_ended:
        _finish_or_gather(decision)
    elif hot.is_complete(decision):
        hot.end_morph(decision)
    elif decision.now >= state.deadline:
        _morph_takes_long(decision)


def _ended_before_entering(decision: Decision) -> list[str]:
    """Return the machines whose workers have ended normally, though others are in the middle of the change.

    If no worker that stays has taken its order, the script may be at its end: then all of them end.
    """
    state, number = decision.state, decision.generation.number
    if not state.ended:  # as nearly always
        return []
    joining = joining_ranks(decision)
    reports = (worker for found in state.progress.values() for worker in found)
    if not any((worker.taken or 0) >= number for worker in reports if worker.rank not in joining):
        return []
    return [
        name
        for name, outcomes in state.ended.items()
        if name not in state.lost and any(not one.failure and one.entered < number for one in outcomes)
    ]


def _morph_takes_long(decision: Decision) -> None:
    """Go on without joiners, or restart from the store, once the workers have written their stacks.

    Joiners are not at fault if a worker that stays has not begun: one of these hangs. The workers are in the
    middle of the change, and cannot save. So after a restart, the next planned changes are not made in place.
    """
    state, generation = decision.state, decision.generation
    if state.stacks_at < state.since and decision.now < decision.leave_by():
        decision.set(stacks_at=decision.now)
        decision.do(commands.DumpStacks(generation.number, generation.machines))
    elif decision.now - state.stacks_at >= decision.settings.stacks_seconds:
        joining = joining_ranks(decision)
        if joining and not hot.is_late(decision):
            places = zip(generation.machines, generation.ranks, strict=True)
            joiners = [name for name, ranks in places if joining.issuperset(ranks)]
            give_up_workers(decision, joiners, "the workers did not enter the generation in time with it")
            return
        if not state.morph_lost:
            seconds = decision.now - max(state.since, state.progressed_at)
            decision.set(slow_morph=f"{state.reason}: no progress for {seconds:.0f} s")
        decision.end_generation(f"{state.reason}; but the workers did not morph in time")


def _saved_on_demand(decision: Decision) -> bool:
    return any(outcome.on_demand for outcomes in decision.state.ended.values() for outcome in outcomes)


def consider_change(decision: Decision) -> None:
    """Change the generation if machines joined or leave and the plan for the others differs."""
    machines = decision.generation.machines
    noticed = noticed_machines(decision)
    if noticed and not decision.settings.greedy:
        leave_earlier(decision, noticed)
    urgent = any([is_due(decision, decision.state.members[member.name]) for member in noticed])
    if urgent and not decision.settings.greedy:
        leave_together(decision)
    if _keeps_machines(decision) and not urgent:
        return
    usable = decision.state.usable if not urgent else _machines_to_use(decision)
    if urgent and decision.leave_by() < float("inf") and not why_not_hot(decision, machines):  # join after it
        staying = tuple(filter(decision.generation.machine_set.__contains__, usable))
        usable = usable if staying in ((), decision.state.unplannable) else staying
    leaving = list(filterfalse(set(usable).__contains__, machines))
    proposal = decision.state.proposal
    if not usable:
        if leaving and (urgent or _is_settled(decision)):
            decision.save_and_end(f"{clause(leaving, 'leave')}, and no other machine is ready")
    elif proposal is None or not proposal.is_for(usable):
        if urgent or _is_settled(decision):
            request_plan(decision, usable)
    elif proposal.layout is None:
        if leaving:
            decision.save_and_end(f"{clause(leaving, 'leave')}; {proposal.problem}")
    elif not proposal.same_as(decision.generation):
        joining = list(filterfalse(decision.generation.machine_set.__contains__, proposal.used))
        gone = list(filterfalse(set(proposal.used).__contains__, machines))
        if gone:
            forced_change(decision)
        elif joining and joins_later(decision, joining):
            return
        changes = [clause(joining, "join")] if joining else []
        changes += [clause(gone, "leave")] if gone else []
        hot.change(decision, proposal, "; ".join(changes) or f"a better plan: {proposal.layout}")


def _keeps_machines(decision: Decision) -> bool:
    """Return True while machines that were removed from the list must stay, and report why."""
    kept = kept_machines(decision)
    why = why_kept(decision, decision.state.usable) if kept else ""
    names = ", ".join(member.name for member in kept)
    decision.report_problem(
        "machines kept",
        why and f"{names} is off the list, but works on: {why} (`varuna drain` leaves a machine now)",
    )
    return bool(why)


def _is_settled(decision: Decision) -> bool:
    """Return True if the machines have stayed the same for `settle_seconds`.

    While some listed machines are not usable yet, only the usable ones count.
    """
    state = decision.state
    others = filterfalse(frozenset(state.usable).__contains__, state.members)
    waiting = any(state.members[name].listed and not state.members[name].leaves for name in others)
    last_change = state.changed_at if waiting else state.present_at
    return decision.now - last_change >= decision.settings.settle_seconds


def wait_for_save(decision: Decision) -> None:
    if decision.state.failures:
        crash_when_cause_is_known(decision)
    elif decision.all_ended():
        may_have_saved = _saved_on_demand(decision) or decision.state.script_saves
        if not may_have_saved and decision.state.best_iteration:
            decision.finish(FINISHED)
        else:
            decision.enter("gathering", decision.state.reason)
    elif 0 <= decision.state.failed_before < decision.state.failed_saves:
        postpone_change(decision)
    elif is_hung(decision):  # it will never reach the save, or never end it
        end_hang(decision)
    elif decision.now >= decision.state.deadline:
        _save_takes_long(decision)


def _save_takes_long(decision: Decision) -> None:
    """Kill workers that must leave now, or that have not begun to save and may never do so.

    Others have made a step, and keep what they have computed.
    """
    state = decision.state
    may_save = bool(state.step_seconds) and not state.script_saves
    if decision.now >= decision.leave_by() or not (may_save or state.saving_now):
        decision.end_generation(f"{state.reason}; but the workers did not save and end in time")
        return
    decision.set(deadline=save_deadline(decision))
    if state.saving_now:
        decision.log("saving", "the save takes long; the job waits for it")
    else:  # the request may be lost, or the workers are far from the end of a step
        decision.log("saving", "the workers have not begun to save; the job requests it again")
        decision.do(
            commands.SaveAndEnd(decision.generation.number, decision.generation.machines, state.reason)
        )


def postpone_change(decision: Decision) -> None:
    """Let the workers train on after a save that failed, and try again later."""
    state, settings = decision.state, decision.settings
    wait = min(settings.postpone_limit, settings.postpone_seconds * 2.0**state.postponements)
    wait = max(1.0, min(wait, (decision.leave_by() - decision.now) / 2))
    decision.enter(
        "running",
        f"training goes on, because the job cannot save: {state.save_problem}",
        postponed=state.reason,
        postponed_step=state.saved_step,
        postponements=state.postponements + 1,
        retry_change_at=decision.now + wait,
    )
    way_out = "" if state.verdict is None else "; `varuna stop --now` ends the job without a save"
    decision.report_problem(
        POSTPONED,
        f"{state.reason}: the job cannot save: {state.save_problem}; training goes on, "
        f"next try in {wait:.0f} s{way_out}",
    )


def try_postponed_change(decision: Decision) -> None:
    """Try again once it is time, or once another save has succeeded. A machine leaves at its deadline."""
    state = decision.state
    soon = min(state.retry_change_at, state.since + decision.settings.postpone_seconds)
    if decision.now >= decision.leave_by():
        decision.end_generation(f"{state.postponed}; the time is over, and the job could not save")
    elif decision.now < (soon if state.saved_step > state.postponed_step else state.retry_change_at):
        return
    elif state.verdict is not None or not decision.settings.morphs:
        decision.save_and_end(state.postponed)
    else:
        consider_change(decision)
        if decision.state.phase == "running" and decision.state.planning_for is None:  # no longer needed
            decision.set(postponed="", postponements=0)
            decision.report_problem(POSTPONED, "")


def wait_for_end(decision: Decision) -> None:
    waiting = members_with_workers(decision)
    if waiting and decision.now < decision.state.deadline:
        return
    for member in waiting:
        decision.do(commands.EndAgent(member.name, "it does not end its workers", unresponsive=True))
        lose_machine(decision, member, "it did not end its workers in time")
    decision.enter("gathering", decision.state.reason)
