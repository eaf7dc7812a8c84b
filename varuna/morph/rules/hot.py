"""Morphs in place: workers keep their processes and state, joiners prepare while the others train.

    running ──► running, with a preparation ──► morphing ──► running
       │             the joiners start              │
       └────────────────────────────────────────────┘     nobody joins, or a worker was lost

Whatever goes wrong falls back to a restart: from a save if all workers train, else from the store.
"""

import msgspec

from varuna.morph import commands, events
from varuna.morph.failures import describe_failure, find_cause, shorten_reason
from varuna.morph.rules import workers
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.membership import lose_machine, ready_machines
from varuna.morph.rules.survivors import (
    can_recover,
    lost_ranks,
    match_ranks,
    surviving_machines,
    why_not_hot,
)
from varuna.morph.state import Generation, MachinePlan, Outcome, Preparation
from varuna.units import format_bytes

WARM = "warm restart"


def change(decision: Decision, proposal: MachinePlan, why: str) -> None:
    """Change to the plan: in place if the workers can, else by a save and a restart."""
    joiners = tuple(name for name in proposal.used if name not in decision.generation.machines)
    if not decision.settings.hot:
        decision.save_and_end(why)
    elif decision.leavers() or _waits_for_first_step(decision):
        return
    elif why_warm := _why_warm(decision, proposal, joiners):
        decision.log(WARM, f"the workers cannot morph in place: {why_warm}")
        decision.save_and_end(why)
    elif not joiners:
        morph(decision, decision.next_generation(proposal, None), why, reasons=proposal.reasons)
    elif decision.now >= max(decision.state.retry_join_at, decision.state.wait_until):
        _prepare(decision, proposal, joiners, why)


def _waits_for_first_step(decision: Decision) -> bool:
    """Return True until the workers know whether they can morph in place, unless a machine must leave."""
    state = decision.state
    if state.step_seconds or not state.activity or decision.leave_by() < float("inf"):
        return False
    return decision.now - state.since < decision.settings.save_seconds


def _why_warm(decision: Decision, proposal: MachinePlan, joiners: tuple[str, ...]) -> str:
    generation, state = decision.generation, decision.state
    if joiners and state.join_failures >= decision.settings.join_limit:
        return f"joiners have failed {state.join_failures} times in a row"
    if len(joiners) == len(proposal.used):
        return "no machine stays"
    if state.members[proposal.used[0]].store_port == 0:
        return f"{proposal.used[0]} has no store for the next generation"
    old_ranks = dict(zip(generation.machines, generation.ranks, strict=True))
    for machine, ranks in zip(proposal.used, proposal.ranks, strict=True):
        if machine not in joiners and len(ranks) > len(old_ranks[machine]):
            return f"{machine} gets {len(ranks)} workers, and has {len(old_ranks[machine])}"
    lost = lost_ranks(decision)
    return why_not_hot(decision, surviving_machines(decision, lost) if lost else generation.machines)


# ---------------------------------------------------------------- joiners


def _prepare(decision: Decision, proposal: MachinePlan, joiners: tuple[str, ...], why: str) -> None:
    """Start the joiners; the current generation trains on."""
    generation = decision.next_generation(proposal, None)
    preparation = Preparation(
        generation,
        joiners,
        deadline=decision.now + decision.settings.prepare_seconds,
        leave_by=decision.leave_by(),
        why=why,
        reasons=proposal.reasons,
    )
    decision.set(preparation=preparation, joiners={}, leaving=(), next_number=generation.number + 1)
    for name in joiners:
        decision.set_member(name, workers=generation.number)
    decision.log(
        "preparing", f"{', '.join(joiners)} builds the model for generation {generation.number} ({why})"
    )
    decision.do(commands.Prepare(generation, joiners, why))


def continue_preparation(decision: Decision, preparation: Preparation) -> None:
    """Morph once all joiners are prepared. Drop the preparation if its machines changed or time is over."""
    generation, members = preparation.generation, decision.state.members
    ready = ready_machines(decision, with_kept=True)
    gone = [
        name
        for name, agent in zip(generation.machines, generation.agents, strict=True)
        if name not in ready or members[name].agent != agent
    ]
    if gone:
        decision.drop_preparation(f"{', '.join(gone)} is no longer usable")
    elif decision.leave_by() < preparation.leave_by:
        decision.drop_preparation("another machine must leave first")
    elif why := why_not_hot(decision, decision.generation.machines):
        decision.drop_preparation(f"the workers can no longer morph in place: {why}")
    elif _all_wait(decision, preparation):
        if members[generation.machines[0]].store_port:
            morph(decision, generation, preparation.why, reasons=preparation.reasons)
    elif decision.now >= preparation.deadline:
        limit = decision.settings.prepare_seconds
        _joiners_failed(decision, f"they were not prepared within {limit:.0f} s")


def _all_wait(decision: Decision, preparation: Preparation) -> bool:
    for machine, ranks in zip(preparation.generation.machines, preparation.generation.ranks, strict=True):
        if machine in preparation.joiners:
            waiting = {worker.rank for worker in decision.state.joiners.get(machine, ()) if worker.waits}
            if not set(ranks) <= waiting:
                return False
    return True


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
    failures = decision.state.join_failures + 1
    wait = min(60.0, 2.0**failures)
    decision.set(join_failures=failures, retry_join_at=decision.now + wait)
    decision.drop_preparation(f"retry in {wait:.0f} s, nothing happens to the other workers; {why}")


# ---------------------------------------------------------------- orders


def morph(
    decision: Decision,
    generation: Generation,
    why: str,
    *,
    lost: frozenset[int] = frozenset(),
    reasons: tuple[str, ...] = (),
) -> None:
    """Order all workers into the next generation, which is the current one from now on."""
    last = decision.generation
    master = decision.state.members[generation.machines[0]]
    generation = msgspec.structs.replace(generation, master_port=master.store_port)
    previous, leaving = match_ranks(last, generation, lost)
    gone = tuple(name for name in last.machines if name not in generation.machines)
    limit = max(decision.settings.morph_seconds, decision.settings.hang_steps * decision.state.step_seconds)
    deadline = min(decision.now + limit, decision.leave_by())
    decision.begin_generation("morphing", generation, why)
    decision.set(deadline=deadline, morphed_from=last, morph_lost=tuple(sorted(lost)))
    decision.add_leaving(gone)
    decision.do(
        commands.Morph(generation, last, previous, leaving, tuple(sorted(lost)), shorten_reason(why), reasons)
    )


def is_complete(decision: Decision) -> bool:
    """Return True when every worker of the generation reports that it has entered it."""
    generation, progress = decision.generation, decision.state.progress
    return all(
        {worker.rank for worker in progress.get(machine, ()) if worker.generation == generation.number}
        >= set(ranks)
        for machine, ranks in zip(generation.machines, generation.ranks, strict=True)
    )


def end_morph(decision: Decision) -> None:
    """Report the completed morph; the generation trains."""
    reports = [worker for found in decision.state.progress.values() for worker in found]
    seconds = max(worker.morph_seconds for worker in reports)
    moved = sum(worker.morph_bytes for worker in reports)
    number = decision.generation.number
    decision.log("morphed", f"{number}: in place, pause {seconds:.3f} s, {format_bytes(moved)} moved")
    decision.enter(
        "running", decision.state.reason, join_failures=0, leaving_since=decision.now, morphed_from=None
    )
    if decision.state.verdict is not None:  # a stop was requested meanwhile
        decision.save_and_end(decision.state.verdict.reason)


def worker_failed(decision: Decision, event: events.WorkerFailed) -> None:
    if decision.member_of_agent(event.machine, event.agent) and not _is_joiner(decision, event):
        workers.worker_failed(decision, event)
    elif decision.state.preparation is not None:
        _joiner_ended(decision, event.machine, (event.outcome,))


def workers_ended(decision: Decision, event: events.WorkersEnded) -> None:
    """Drop a preparation that lost a joiner. End a morph that lost a machine before its handover."""
    if decision.member_of_agent(event.machine, event.agent) is None:
        return
    joined = _is_joiner(decision, event)
    workers.workers_ended(decision, event)
    if joined:
        _joiner_ended(decision, event.machine, event.outcomes)
    elif decision.state.phase == "morphing" and event.machine in decision.state.leaving:
        failures = [outcome.failure for outcome in event.outcomes if outcome.failure is not None]
        if any(failure.rank not in decision.state.morph_lost for failure in failures):
            decision.end_generation(f"{event.machine} failed while it handed its state over")


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
    """Morph without the lost ranks; return False if the generation must end."""
    if not can_recover(decision):
        return False
    lost = lost_ranks(decision)
    survivors = surviving_machines(decision, lost)
    ready = ready_machines(decision, with_kept=True)
    remaining = tuple(name for name in ready if name in survivors)
    proposal = decision.state.proposal
    if not remaining or decision.now - decision.state.failed_at > decision.settings.replan_seconds:
        return False
    if proposal is None or proposal.machines != remaining:
        if decision.state.planning_for is None:
            decision.set(planning_for=remaining)
            decision.do(commands.MakePlan(remaining))
        return True
    if proposal.layout is None or _why_warm(decision, proposal, ()):
        return False
    why = _describe_loss(decision)
    workers.count_crash(decision, why)
    if decision.state.verdict is not None:
        return False
    decision.drop_preparation(why)
    decision.log("recovering", f"{why}; the others hold every stage and go on in place")
    generation = decision.next_generation(proposal, None)
    morph(decision, generation, why, lost=lost, reasons=proposal.reasons)
    return True


def _describe_loss(decision: Decision) -> str:
    found = [f"{machine} was lost: {why}" for machine, why in decision.state.lost.items()]
    if failures := [outcome.failure for outcome in decision.state.failures if outcome.failure is not None]:
        cause = describe_failure(find_cause(failures), decision.generation.layout)
        found.append(shorten_reason(cause))
    return "; ".join(found)
