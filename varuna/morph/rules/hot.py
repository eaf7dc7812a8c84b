"""Morphs in place: workers keep their processes and state, joiners prepare while the others train.

    running ──► running, with a preparation ──► morphing ──► running
       │             the joiners start              │
       └────────────────────────────────────────────┘     nobody joins, or a worker was lost

Whatever goes wrong falls back to a restart: from a save if all workers train, else from the store.
"""

from itertools import filterfalse, product

import msgspec

from varuna.morph import commands, events
from varuna.morph.failures import describe_failure, find_cause, shorten_reason
from varuna.morph.reports import (
    distinct_reports,
    machines_that_fail,
    reported_machines,
    total_of_reports,
)
from varuna.morph.rules import workers
from varuna.morph.rules.decision import Decision, request_plan
from varuna.morph.rules.holding import NOT_REPLACED, hold_state, prepare_replacement
from varuna.morph.rules.joiners import (
    all_wait,
    count_join_failure,
    prepare,
    refuse_other_code,
    unusable_machines,
)
from varuna.morph.rules.membership import clause, lose_machine, ready_machines
from varuna.morph.rules.orders import break_morph
from varuna.morph.rules.survivors import (
    COLD,
    awaits_reports,
    handing_over,
    hurt_machines,
    joining_ranks,
    lost_ranks,
    state_holders,
    surviving_ranks,
    waits_for_reports,
    why_not_hot,
    why_not_recover,
)
from varuna.morph.rules.worth import leaves_first
from varuna.morph.state import Generation, MachinePlan, Outcome, Preparation, WorkerProgress
from varuna.units import format_bytes

WARM = "warm restart"


def change(decision: Decision, proposal: MachinePlan, why: str) -> None:
    """Change to the plan: in place if the workers can, else by a save and a restart."""
    joiners = tuple(filterfalse(decision.generation.machine_set.__contains__, proposal.used))
    if not decision.settings.hot:
        decision.save_and_end(why)
    elif decision.leavers() or _waits(decision, proposal):
        return
    elif why_warm := _why_warm(decision, proposal, joiners):
        decision.log(WARM, f"the workers cannot morph in place: {why_warm}")
        decision.save_and_end(why)
    elif not joiners:
        morph(decision, decision.next_generation(proposal, None), why, reasons=proposal.reasons)
    elif decision.now >= max(decision.state.retry_join_at, decision.state.wait_until):
        limit = decision.now + decision.settings.prepare_seconds
        prepare(decision, proposal, joiners, why, deadline=limit)


def _waits(decision: Decision, proposal: MachinePlan) -> bool:
    """Return True while the manager does not know yet whether the change is possible in place."""
    return (
        _waits_for_first_step(decision)
        or _waits_for_manager(decision)
        or _waits_for_store(decision, proposal)
    )


def _waits_for_first_step(decision: Decision) -> bool:
    """Return True until the workers know whether they can morph in place, unless a machine must leave.

    After a morph in place, joiners know it last: when they have made a step.
    """
    state = decision.state
    know = all(worker.steps or worker.hot or worker.why_not for worker in distinct_reports(state.progress))
    if (state.step_seconds and know) or not state.activity or decision.leave_by() < float("inf"):
        return False
    return decision.now - state.since < decision.settings.save_seconds


def _waits_for_store(decision: Decision, proposal: MachinePlan) -> bool:
    """Return True right after a change, while the first machine opens the store for the next one."""
    is_new = decision.now - decision.state.since < decision.settings.begin_seconds
    return is_new and decision.state.members[proposal.used[0]].store_port == 0


def _waits_for_manager(decision: Decision) -> bool:
    """Return True while a restarted manager has not heard of all workers, unless a machine must leave."""
    in_time = decision.state.attach_until < decision.leave_by()
    return in_time and waits_for_reports(decision, decision.generation.machines)


def _why_warm(decision: Decision, proposal: MachinePlan, joiners: tuple[str, ...]) -> str:
    generation, state = decision.generation, decision.state
    if joiners and state.join_failures >= decision.settings.join_limit:
        return f"joiners have failed {state.join_failures} times in a row"
    lost = lost_ranks(decision)
    if state.slow_morph and not (lost or state.morph_broken):
        return f"a change in place took too long before ({state.slow_morph})"
    if len(joiners) == len(proposal.used):
        return "no machine stays"
    if state.members[proposal.used[0]].store_port == 0:
        return f"{proposal.used[0]} has no store for the next generation"
    old_ranks, joining = surviving_ranks(decision, lost), frozenset(joiners)
    for machine, ranks in zip(proposal.used, proposal.ranks, strict=True):
        if machine not in joining and len(ranks) > len(old_ranks[machine]):
            return f"{machine} gets {len(ranks)} workers, and has {len(old_ranks[machine])}"
    if state.phase == "morphing":  # their reports are those of the generation before
        return ""
    return why_not_hot(decision, old_ranks if lost else generation.machines, lost=lost)


# ---------------------------------------------------------------- joiners


def continue_preparation(decision: Decision, preparation: Preparation) -> None:
    """Morph once all joiners are prepared. Drop the preparation if its machines changed or time is over."""
    generation, members = preparation.generation, decision.state.members
    if gone := unusable_machines(decision, generation):
        decision.drop_preparation(f"{', '.join(gone)} is no longer usable")
    elif decision.leave_by(due=True) < preparation.leave_by:
        decision.drop_preparation("another machine must leave first")
    elif why := why_not_hot(decision, decision.generation.machines):
        decision.drop_preparation(f"the workers can no longer morph in place: {why}")
    elif refuse_other_code(decision, preparation):
        return
    elif not all_wait(decision, preparation):
        _limit_preparation(decision, preparation, "they were not prepared")
    elif not members[generation.machines[0]].store_port:
        why = f"{generation.machines[0]} has opened no store for the next generation"
        _limit_preparation(decision, preparation, why)
    elif not leaves_first(decision, generation.machines):
        morph(decision, generation, preparation.why, reasons=preparation.reasons)


def _limit_preparation(decision: Decision, preparation: Preparation, why: str) -> None:
    if decision.now >= preparation.deadline:
        _joiners_failed(decision, f"{why} within {decision.settings.prepare_seconds:.0f} s")


def _is_joiner(decision: Decision, event: events.WorkerFailed | events.WorkersEnded) -> bool:
    found = decision.state.preparation
    return (
        found is not None and found.generation.number == event.generation and event.machine in found.joiners
    )


def _joiner_ended(decision: Decision, machine: str, outcomes: tuple[Outcome, ...]) -> None:
    preparation = decision.state.preparation
    assert preparation is not None
    lines = {outcome.failure: outcome.last_lines for outcome in outcomes if outcome.failure is not None}
    why = "it ended before it was prepared"
    if lines:
        cause = find_cause(list(lines))
        why = describe_failure(cause, preparation.generation.layout, last_lines=lines[cause])
    _joiners_failed(decision, f"{machine}: {why}")


def _joiners_failed(decision: Decision, why: str) -> None:
    wait = count_join_failure(decision)
    decision.drop_preparation(f"retry in {wait:.0f} s, nothing happens to the other workers; {why}")


# ---------------------------------------------------------------- orders


def morph(
    decision: Decision,
    generation: Generation,
    why: str,
    *,
    lost: frozenset[int] | None = None,
    reasons: tuple[str, ...] = (),
) -> None:
    """Order all workers into the next generation, which is the current one from now on.

    `lost`: the workers abandon what they do, and go on without these ranks. None: a planned change.
    """
    last = decision.generation
    gone_ranks = () if lost is None else tuple(sorted(lost)) or (last.layout.num_ranks,)
    master = decision.state.members[generation.machines[0]]
    generation = msgspec.structs.replace(generation, master_port=master.store_port)
    gone = tuple(filterfalse(generation.machine_set.__contains__, last.machines))
    whole = all(worker.replicated for worker in distinct_reports(decision.state.progress))  # none in a morph
    whole = whole and (decision.state.phase != "morphing" or decision.state.morph_whole)
    base, holds = state_holders(decision, generation, gone_ranks)
    if interrupted := handing_over(decision):  # the others do without them
        assert decision.state.morphed_from is not None
        decision.do(commands.KillWorkers(decision.state.morphed_from.number, interrupted, why))
    decision.begin_generation("morphing", generation, why)
    decision.set(morphed_from=last, morph_lost=gone_ranks, morph_whole=whole)
    decision.set(morph_base=base, morph_holds=holds)
    follow_progress(decision)
    decision.add_leaving(gone)
    decision.do(commands.Morph(generation, last, gone_ranks, shorten_reason(why), reasons))


def follow_progress(decision: Decision) -> None:
    """Move the deadline of the morph while tensors travel, or a worker is busy before it begins.

    An order waits for the end of a step and of the script's own work between steps.
    """
    state, settings = decision.state, decision.settings
    last = state.morphed_from
    before = last.machine_set if last is not None else frozenset()
    staying = list(filter(before.__contains__, decision.generation.machines))
    number = decision.generation.number
    reported = reported_machines(state.progress)
    reports: list[WorkerProgress] = []

    def waits(worker: WorkerProgress) -> bool:
        return worker.taken is not None and not _has_begun(worker, number, state.morph_lost)

    is_waiting = not state.morph_begun_at and any(map(waits, distinct_reports(state.progress)))
    if is_waiting:  # joiners do not count
        reports = [worker for name in staying for worker in state.progress.get(name, ())]
        is_waiting = any(map(waits, reports))
    if not (is_waiting or state.morph_begun_at) and all(map(reported.__contains__, staying)):
        decision.set(morph_begun_at=decision.now)
    limit = max(settings.morph_seconds, settings.hang_steps * state.step_seconds)
    deadline = max(state.since, decision.state.morph_begun_at, state.progressed_at) + limit
    if is_waiting:
        idle = max(settings.idle_seconds, 10 * settings.hang_steps * state.step_seconds)
        computes = any(worker.in_step and not worker.waits for worker in reports)
        deadline = min(deadline, state.since + idle) if computes else state.since + idle
    decision.set(deadline=deadline)


def _has_begun(worker: WorkerProgress, number: int, lost: tuple[int, ...]) -> bool:
    """Return whether a worker has begun to carry out its order.

    After a loss, it takes its order in the middle of a step, and may end its loop before it begins.
    """
    begins = worker.taken is not None and worker.taken >= number
    return begins and (not lost or worker.waits or worker.generation >= number)


def is_late(decision: Decision) -> bool:
    """Return whether a worker that stays has not begun to carry out its order."""
    number, lost = decision.generation.number, decision.state.morph_lost
    joining, progress = joining_ranks(decision), decision.state.progress
    reports = (worker for name in decision.generation.machines for worker in progress.get(name, ()))
    staying = (worker for worker in reports if worker.rank not in joining and worker.taken is not None)
    return not all(_has_begun(worker, number, lost) for worker in staying)


def is_complete(decision: Decision) -> bool:
    """Return True when every worker of the generation reports that it has entered it."""
    generation = decision.generation
    late = machines_that_fail(
        decision.state.progress, generation, lambda worker: worker.generation == generation.number
    )
    return next(late, None) is None


def end_morph(decision: Decision) -> None:
    """Report the completed morph; the generation trains."""
    progress = decision.state.progress
    slowest = max(distinct_reports(progress), key=lambda worker: worker.morph_seconds)
    moved = format_bytes(total_of_reports(progress, lambda worker: worker.morph_bytes))
    pause = f"pause {slowest.morph_seconds:.3f} s, {moved} moved"
    decision.log("morphed", f"{decision.generation.number}: in place, {pause} ({slowest.morph_parts})")
    _note_steps(decision)
    decision.enter(
        "running",
        decision.state.reason,
        joined=tuple(sorted(joining_ranks(decision))),
        leaving_since=decision.now,
        morphed_from=None,
        morph_base=None,
        morph_broken="",
        slow_morph="",
    )
    if decision.state.verdict is not None:  # a stop was requested meanwhile
        decision.save_and_end(decision.state.verdict.reason)


def _note_steps(decision: Decision) -> None:
    """Forget crashes if a worker has made steps since it last entered a generation in place.

    After a loss, workers may go back to copies of an earlier step: the best iteration does not grow, though
    they make progress.
    """
    state, before = decision.state, decision.state.reports_entered
    if state.crashes > 1 and any(
        worker.pid == old.pid and worker.steps > old.steps
        for name, found in state.progress.items()
        for worker, old in product(found, before.get(name, ()))
    ):
        decision.set(crashes=1)
    decision.set(reports_entered=state.progress)


def worker_failed(decision: Decision, event: events.WorkerFailed) -> None:
    if event.generation != _current_number(decision, event.machine, event.generation):
        (outcome,) = _with_new_ranks(decision, event.machine, (event.outcome,)) or (None,)
        if outcome is None:
            return
        event = msgspec.structs.replace(event, generation=decision.generation.number, outcome=outcome)
    if decision.member_of_agent(event.machine, event.agent) and not _is_joiner(decision, event):
        workers.worker_failed(decision, event)
    elif decision.state.preparation is not None:
        _joiner_ended(decision, event.machine, (event.outcome,))


def leaver_failed(decision: Decision, event: events.LeaverFailed) -> None:
    """End a morph that lost a worker before its handover."""
    known_agent = decision.member_of_agent(event.machine, event.agent)
    is_current = decision.state.phase == "morphing" and event.generation == decision.generation.number
    if known_agent and is_current:
        _break_handover(decision, event.machine, (event.outcome,))


def workers_ended(decision: Decision, event: events.WorkersEnded) -> None:
    """Drop a preparation that lost a joiner. End a morph that lost a machine before its handover."""
    if decision.member_of_agent(event.machine, event.agent) is None:
        return
    if event.generation != _current_number(decision, event.machine, event.generation):
        outcomes = _with_new_ranks(decision, event.machine, event.outcomes)
        number = decision.generation.number
        decision.set_member(event.machine, workers=number)
        event = msgspec.structs.replace(event, generation=number, outcomes=outcomes)
    joined = _is_joiner(decision, event)
    workers.workers_ended(decision, event)
    if joined:
        _joiner_ended(decision, event.machine, event.outcomes)
    elif _leaves_morph(decision, event):
        _break_handover(decision, event.machine, event.outcomes)


def _break_handover(decision: Decision, machine: str, outcomes: tuple[Outcome, ...]) -> None:
    """Break the morph if one of these workers, which leave in it, failed before all had its state."""
    number, lost = decision.generation.number, decision.state.morph_lost
    late = (one.failure for one in outcomes if one.entered < number)
    if any(failure is not None and failure.rank not in lost for failure in late):
        break_morph(decision, f"{machine} failed while it handed its state over")


def _current_number(decision: Decision, machine: str, number: int) -> int:
    """Return the generation of workers that ended before their agent got the order for the current one."""
    state, last = decision.state, decision.state.morphed_from
    if state.phase != "morphing" or last is None or number != last.number:
        return number
    stays = machine in last.machines and machine in decision.generation.machines
    return decision.generation.number if stays else number


def _with_new_ranks(decision: Decision, machine: str, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
    """Return the outcomes with the ranks that these workers have in the current generation."""
    last, generation = decision.state.morphed_from, decision.generation
    assert last is not None
    old, new = (one.ranks[one.machines.index(machine)] for one in (last, generation))
    ranks = dict(zip((rank for rank in old if rank not in decision.state.morph_lost), new, strict=False))
    found = []
    for outcome in outcomes:
        if (failure := outcome.failure) is not None:
            if failure.rank not in ranks:
                continue  # lost before this morph, or leaves in it
            failure = msgspec.structs.replace(failure, rank=ranks[failure.rank])
            outcome = msgspec.structs.replace(outcome, failure=failure)
        found.append(outcome)
    return tuple(found)


def _leaves_morph(decision: Decision, event: events.WorkersEnded) -> bool:
    """Return whether these workers hand their state over. Joiners that were killed do not."""
    state, last = decision.state, decision.state.morphed_from
    is_old = last is not None and event.generation == last.number
    return state.phase == "morphing" and is_old and event.machine in state.leaving


def end_leavers(decision: Decision) -> None:
    """Give up machines whose leaving workers do not end."""
    if decision.state.phase == "morphing":
        return
    for name in decision.leavers():
        if decision.now - decision.state.leaving_since > decision.settings.end_seconds:
            decision.do(commands.EndAgent(name, "it does not end its workers", unresponsive=True))
            lose_machine(decision, decision.state.members[name], "its leaving workers did not end in time")


# ---------------------------------------------------------------- losses


def recover(decision: Decision) -> bool:
    """Morph without the lost ranks; return False if the generation must end.

    A machine that lost one of several workers leaves and joins again, if the other machines have a plan. If
    not, its other workers go on.
    """
    if why_not_recover(decision):
        return awaits_reports(decision)
    lost = lost_ranks(decision)
    survivors = surviving_ranks(decision, lost)
    remaining = tuple(filter(survivors.__contains__, ready_machines(decision, with_kept=True)))
    if not remaining:
        return False
    whole = tuple(filterfalse(hurt_machines(decision, lost).__contains__, remaining))
    if decision.state.holding:
        return _continue_holding(decision, whole)
    if decision.now - decision.state.failed_at > decision.settings.replan_seconds:
        return False
    if waits_for_reports(decision, remaining):
        return True
    machines, devices = whole, 0
    if whole != remaining and whole in ((), decision.state.unplannable):
        machines, devices = remaining, min(len(survivors[name]) for name in remaining)
    proposal = decision.state.proposal
    if proposal is None or not proposal.is_for(machines, devices):
        request_plan(decision, machines, devices)
        return True
    if proposal.layout is None:
        return hold_state(decision, whole, proposal.problem) and _continue_holding(decision, whole)
    if not decision.state.members[proposal.used[0]].store_port:
        return True  # it opens one: two losses came one after the other
    if why_warm := _why_warm(decision, proposal, ()):
        decision.log(COLD, why_warm)
        return False
    if not _count_loss(decision):
        return False
    why = _describe_loss(decision)
    decision.drop_preparation(why)
    planned = decision.now - decision.state.failed_at
    decision.log(
        "recovering", f"{why}; the others hold every stage and go on in place, planned in {planned:.3f} s"
    )
    generation = decision.next_generation(proposal, None)
    morph(decision, generation, why, lost=lost, reasons=proposal.reasons)
    return True


def _continue_holding(decision: Decision, survivors: tuple[str, ...]) -> bool:
    """Morph once replacements of the lost machines are prepared; return False if the generation must end."""
    why = _describe_loss(decision)
    preparation = decision.state.preparation
    if preparation is None:
        return prepare_replacement(decision, survivors, why)
    generation = preparation.generation
    usable = frozenset((*survivors, *preparation.joiners))
    if gone := unusable_machines(decision, generation):
        decision.drop_preparation(f"{', '.join(gone)} is no longer usable")
    elif hurt := list(filterfalse(usable.__contains__, generation.machines)):
        decision.drop_preparation(f"{', '.join(hurt)} has lost a worker of the next generation")
    elif decision.now >= preparation.deadline:
        decision.log(COLD, NOT_REPLACED)
        return False
    elif not refuse_other_code(decision, preparation) and all_wait(decision, preparation):
        if not decision.state.members[generation.machines[0]].store_port:
            return True
        if not _count_loss(decision):
            return False
        waited = decision.now - decision.state.failed_at
        join = clause(preparation.joiners, "join")
        decision.log("recovering", f"{why}; the others have held every stage for {waited:.1f} s until {join}")
        lost = lost_ranks(decision)
        morph(decision, generation, why, lost=lost, reasons=preparation.reasons)
    return True


def _count_loss(decision: Decision) -> bool:
    """Count a failed joiner, a crash or a loss; return False if it ends the job."""
    lost = lost_ranks(decision)
    if lost and lost <= joining_ranks(decision).union(decision.state.joined):
        count_join_failure(decision)
        decision.set(losses=decision.state.losses + 1)
    elif decision.state.failures:
        workers.count_crash(decision, _describe_loss(decision))
    else:  # machines that go are no crash of the job
        decision.set(losses=decision.state.losses + 1)
    return decision.state.verdict is None


def _describe_loss(decision: Decision) -> str:
    state = decision.state
    found = [state.morph_broken] if state.morph_broken else []
    found += [f"{machine} was lost: {why}" for machine, why in state.lost.items()]
    if failures := [outcome.failure for outcome in state.failures if outcome.failure is not None]:
        cause = describe_failure(find_cause(failures), decision.generation.layout)
        found.append(shorten_reason(cause))
    return "; ".join(found)
