"""Workers of the current generation: their heartbeats, progress, hangs and failures."""

from collections.abc import Sequence

from varuna.morph import commands, events
from varuna.morph.failures import describe_failure, find_cause
from varuna.morph.reports import Reports, distinct_reports, merge_reports, total_of_reports
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.joiners import note_first_steps
from varuna.morph.rules.membership import lose_silent_machines
from varuna.morph.rules.orders import break_morph
from varuna.morph.state import JobVerdict, Outcome, WorkerProgress


def worker_failed(decision: Decision, event: events.WorkerFailed) -> None:
    known_agent = decision.member_of_agent(event.machine, event.agent)
    if known_agent and decision.is_working(event.machine, event.generation):
        _add_failure(decision, event.outcome)


def workers_ended(decision: Decision, event: events.WorkersEnded) -> None:
    member = decision.member_of_agent(event.machine, event.agent)
    if member is None:
        return
    if decision.is_working(event.machine, event.generation):
        if decision.state.phase != "ending":  # workers that the manager killed did not fail
            for outcome in event.outcomes:
                if outcome.failure is not None:
                    _add_failure(decision, outcome)
        decision.put("ended", event.machine, event.outcomes)
        if event.progress:
            keep_facts(decision, event.progress)
    elif not decision.state.store:  # a journal that was cut does not name it
        stores = (worker.store for worker in event.progress if worker.store)
        decision.set(store=next(stores, ""))
    if member.workers == event.generation:
        decision.set_member(event.machine, workers=None)


def _add_failure(decision: Decision, outcome: Outcome) -> None:
    """Add the failure, unless one of the same rank is known."""
    assert outcome.failure is not None
    failures = decision.state.failures
    if outcome.failure.rank in {known.failure.rank for known in failures if known.failure is not None}:
        return
    failed_at = decision.state.failed_at if failures else decision.now
    decision.set(failures=(*failures, outcome), failed_at=failed_at)


def store_ended(decision: Decision, event: events.StoreEnded) -> None:
    """Restart the generation if it lost its store: it could report no error any more.

    Workers that enter it in place go on to another generation, which has a store.
    """
    member = decision.member_of_agent(event.machine, event.agent)
    if member is None:
        return
    if member.store_port == event.port:
        decision.set_member(event.machine, store_port=0)
        decision.log("store ended", f"{event.machine}: {event.why}; it opens another one")
    elif decision.state.phase == "running" and _is_store_of(decision, event):
        reason = f"the store of the job on {event.machine} has ended: {event.why}"
        if event.trains:
            decision.save_and_end(reason)
        else:
            count_crash(decision, reason)
            decision.end_generation(reason)
    elif decision.state.phase == "morphing" and _is_store_of(decision, event):
        break_morph(decision, f"the store of the job on {event.machine} has ended: {event.why}")
    elif not (decision.state.active and _is_store_of(decision, event)):
        decision.log("store ended", f"{event.machine}: {event.why}; no running generation needs it")


def _is_store_of(decision: Decision, event: events.StoreEnded) -> bool:
    generation = decision.generation
    host = (generation.machines[0], generation.agents[0], generation.master_port)
    return host == (event.machine, event.agent, event.port)


def tick(decision: Decision, event: events.Tick) -> None:
    latest, joiners = dict[str, tuple[WorkerProgress, ...]](), {**decision.state.joiners}
    preparation = decision.state.preparation
    for name, (agent, generation, found) in event.heartbeats.items():
        if decision.member_of_agent(name, agent):
            decision.set_member(name, seen=event.heard.get(name, decision.now))
            if decision.state.active and generation == decision.generation.number:
                latest[name] = found
            elif preparation is not None and generation == preparation.generation.number:
                joiners[name] = found
    # A tick rarely has a heartbeat of every machine: progress is what all of them reported last.
    reports: Reports = {}
    if decision.state.active:
        reports = merge_reports(decision.state.progress, latest, without=decision.state.ended)
    decision.set(progress=reports, joiners=joiners)
    if progress := distinct_reports(reports):
        activity = total_of_reports(reports, lambda worker: worker.activity)
        if activity != decision.state.activity:
            decision.set(activity=activity, progressed_at=decision.now)
        decision.set(
            in_step=any(worker.in_step for worker in progress),
            step_seconds=max(worker.step_seconds for worker in progress),
            saving_now=any(worker.saving for worker in progress),
            failed_saves=max(worker.failed_saves for worker in progress),
            save_problem=next((worker.save_problem for worker in progress if worker.save_problem), ""),
        )
        if decision.state.failed_before < 0:
            decision.set(failed_before=decision.state.failed_saves)
        keep_facts(decision, progress)
    note_first_steps(decision)
    lose_silent_machines(decision)
    _end_if_not_begun(decision, event)


def _end_if_not_begun(decision: Decision, event: events.Tick) -> None:
    """End a generation if a connected machine reports that it has no workers of it."""
    if decision.state.phase not in ("running", "saving"):
        return
    if decision.now - decision.state.since <= decision.settings.begin_seconds:
        return
    for name, (agent, generation, _) in event.heartbeats.items():
        is_working = decision.member_of_agent(name, agent) and decision.is_working(name)
        if is_working and name not in decision.state.lost and generation != decision.generation.number:
            decision.end_generation(f"{name} does not run its workers")
            return


def keep_facts(decision: Decision, progress: Sequence[WorkerProgress]) -> None:
    """Keep the facts that stay valid after the workers have ended."""
    state = decision.state
    saved = max(progress, key=lambda worker: worker.saved_step)
    note = next((worker.note for worker in progress if worker.note), state.note)
    if note != state.note:
        decision.log("broken checkpoint", note)
    iteration = max((worker.iteration for worker in progress if worker.steps), default=state.iteration)
    first = min((worker.iteration - worker.steps for worker in progress if worker.steps), default=0)
    if iteration != state.iteration:
        ages = [worker.step_age for worker in progress if worker.steps and worker.iteration == iteration]
        decision.set(stepped_at=decision.now - max(ages))
    decision.set(
        step_seconds=state.step_seconds or max(worker.step_seconds for worker in progress),
        first_iteration=max(state.first_iteration, first),
        iteration=iteration,
        best_iteration=max(state.best_iteration, iteration),
        missing_samples=max(progress, key=lambda worker: worker.steps).missing_samples,
        note=note,
        store=next((worker.store for worker in progress if worker.store), state.store),
        saved_step=max(state.saved_step, saved.saved_step),
        save_seconds=saved.save_seconds or state.save_seconds,
        write_seconds=saved.write_seconds or state.write_seconds,
        save_every_seconds=max(w.save_every_seconds for w in progress) or state.save_every_seconds,
        script_saves=any(worker.script_saves for worker in progress),
    )


def is_hung(decision: Decision) -> bool:
    settings, step = decision.settings, decision.state.step_seconds
    if not step and not decision.state.activity:
        return False  # no model is wrapped yet: importing and loading have no limit
    is_own_time = decision.state.script_saves and not decision.state.in_step  # it may do anything in its loop
    if is_own_time and decision.state.phase != "saving":
        return False
    if not step or is_own_time:
        limit = max(settings.first_step_seconds, 10 * settings.hang_seconds)
    elif decision.state.in_step:
        limit = max(settings.hang_seconds, settings.hang_steps * step)
    else:
        limit = max(settings.idle_seconds, 10 * settings.hang_steps * step)
    return decision.now - decision.state.progressed_at > limit


def end_hang(decision: Decision) -> None:
    """Request stack traces, wait until they are written, then kill the workers."""
    state, generation = decision.state, decision.generation
    if state.stacks_at < state.progressed_at:
        decision.set(stacks_at=decision.now)
        decision.do(commands.DumpStacks(generation.number, generation.machines))
    elif decision.now - state.stacks_at >= decision.settings.stacks_seconds:
        silence = f"no progress for {state.stacks_at - state.progressed_at:.0f} s"
        if state.step_seconds:
            decision.end_generation(f"{silence} (a step takes {state.step_seconds:.2g} s)")
        else:
            reason = f"{silence} before the first step"
            count_crash(decision, reason)
            decision.end_generation(reason)


def crash_when_cause_is_known(decision: Decision) -> None:
    """Kill the workers once the first failure is known.

    One failure makes other workers fail, and their failures may be reported first.
    """
    state = decision.state
    outcomes = {outcome.failure: outcome for outcome in state.failures if outcome.failure is not None}
    waited = decision.now - state.failed_at >= decision.settings.second_hand_seconds
    if not waited and not decision.all_ended() and all(failure.second_hand for failure in outcomes):
        return
    cause = find_cause(list(outcomes))
    reason = describe_failure(cause, decision.generation.layout, last_lines=outcomes[cause].last_lines)
    if cause.broken_checkpoint and _takes_older(decision):
        decision.end_generation(reason)
        return
    count_crash(decision, reason)
    if cause.script_mistake:
        decision.set(verdict=JobVerdict("failed", 1, f"a restart would fail in the same way: {reason}"))
    elif cause.in_script and not state.best_iteration:
        decision.set(verdict=JobVerdict("failed", 1, f"before its first step, {reason}"))
    elif cause.store_taken:  # a retry would take nothing back
        decision.set(verdict=JobVerdict("failed", 1, reason))
    decision.end_generation(reason)


def count_crash(decision: Decision, reason: str) -> None:
    """Wait ever longer before the next start, and end the job after too many crashes without progress."""
    state = decision.state
    progressed = state.best_iteration > state.iteration_at_crash
    crashes = 1 if progressed else state.crashes + 1
    setbacks = 1 if progressed else state.setbacks + 1
    decision.set(
        crashes=crashes,
        setbacks=setbacks,
        losses=state.losses + 1,
        iteration_at_crash=state.best_iteration,
        wait_until=decision.now + (0.0 if crashes == 1 else min(60.0, 2.0 ** (crashes - 2))),
    )
    if crashes > decision.settings.crash_limit or setbacks > decision.settings.setback_limit:
        why = f"{max(crashes, setbacks)} times without progress in between; last, {reason}"
        decision.set(verdict=JobVerdict("failed", 1, why))


def _takes_older(decision: Decision) -> bool:
    """Return whether the next generation can load an older checkpoint than the broken one.

    The worker has set the broken one aside. If it is found again, the store cannot be written. A step that
    the user chose is not replaced.
    """
    step = decision.generation.resume_step
    if step is None or step in (decision.state.broken_step, decision.state.resume_step):
        return False
    decision.set(broken_step=step, losses=decision.state.losses + 1)
    return True
