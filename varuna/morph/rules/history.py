"""Measures changes of machines for `varuna.morph.policy`: pauses, joins, losses, how long machines stay."""

from statistics import median
from typing import Any

import msgspec

from varuna.morph.policy import (
    EVENTS,
    MEASUREMENTS,
    REPORT_SECONDS,
    SAME_SECONDS,
    ChangeHistory,
    MachineStay,
    append,
)
from varuna.morph.reports import distinct_reports
from varuna.morph.rules.decision import Decision
from varuna.morph.state import JobState, Member


def _update(decision: Decision, **fields: Any) -> None:
    decision.set(history=msgspec.structs.replace(decision.state.history, **fields))


def _measure(decision: Decision, field: str, seconds: float) -> None:
    known: tuple[float, ...] = getattr(decision.state.history, field)
    _update(decision, **{field: append(known, max(0.0, seconds), most=MEASUREMENTS)})


# ---------------------------------------------------------------- machines


def machine_ready(decision: Decision, name: str, *, began_at: float) -> None:
    """Note that a machine can run workers. `began_at`: the start of its agent; 0: not known."""
    decision.set_member(name, ready_at=decision.now)
    if began_at:
        _measure(decision, "join_seconds", decision.now - began_at)
    joins = decision.state.history.joins
    if decision.state.history.since is None:
        return  # the first machines of a job say nothing about later ones
    if joins and decision.now - joins[-1][0] <= SAME_SECONDS:
        _update(decision, joins=(*joins[:-1], (joins[-1][0], joins[-1][1] + 1)))
    else:
        _update(decision, joins=append(joins, (decision.now, 1), most=EVENTS))


def forced_change(decision: Decision) -> None:
    """Note a change that happens without regard to joiners. Those of one moment are one."""
    times = decision.state.history.forced
    if not times or decision.now - times[-1] > SAME_SECONDS:
        _update(decision, forced=append(times, decision.now, most=EVENTS))


def machine_lost(decision: Decision, member: Member, *, was_working: bool) -> None:
    """Note how long a machine stayed."""
    if member.warm:
        known = decision.state.stays.get(member.name, ())
        stay = MachineStay(decision.now, decision.now - member.ready_at, was_working)
        decision.put("stays", member.name, append(known, stay, most=MEASUREMENTS))
    if was_working:
        _update(decision, num_lost=decision.state.history.num_lost + 1)
        forced_change(decision)
        if member.leave_by is not None and decision.now < member.leave_at:
            _update(decision, early=decision.state.history.early + 1)


def forget_absences(decision: Decision, before: JobState) -> None:
    """Forget machines that were lost long ago."""
    state, settings = decision.state, decision.settings
    if state.absences is not before.absences:
        since = decision.now - settings.flap_seconds
        recent = {
            name: kept
            for name, times in state.absences.items()
            if (kept := tuple(at for at in times if at > since))
        }
        decision.set(absences=recent)
    if state.stays is not before.stays:
        since = decision.now - max(settings.flap_seconds, 8.0 * change_cost(decision))
        stays = {name: late for name, known in state.stays.items() if (late := _after(known, since))}
        decision.set(stays=stays)


def _after(stays: tuple[MachineStay, ...], since: float) -> tuple[MachineStay, ...]:
    return stays if stays[0].ended_at > since else tuple(stay for stay in stays if stay.ended_at > since)


def change_cost(decision: Decision, *, share_lost: float = 1.0) -> float:
    """Return the machine-seconds that a join and the end of a stay take from the others; 0: not measured.

    `share_lost`: how often a stay ends with a loss. Otherwise the machine leaves by a planned change.
    """
    history, generation = decision.state.history, decision.state.generation
    if generation is None or not history.change_seconds or not (history.loss_seconds or not share_lost):
        return 0.0
    change = median(history.change_seconds)
    loss = median(history.loss_seconds) if share_lost else 0.0
    return (change + share_lost * loss + (1 - share_lost) * change) * len(generation.machines)


# ---------------------------------------------------------------- pauses


def measure_changes(decision: Decision, before: JobState) -> None:
    """Compare the states before and after a decision; note what a change has taken once it is over."""
    forget_absences(decision, before)
    state = decision.state
    _count_survived(decision, before)
    if before.holding and state.phase == "morphing":
        _update(decision, hold_seconds=decision.now - before.failed_at)
    if state.phase != before.phase:
        _follow_phase(decision, before)
    elif state.phase == "saving" and state.saving_now and state.history.save_began_at is None:
        _update(decision, save_began_at=max(state.since, decision.now - REPORT_SECONDS))
    history = decision.state.history
    if history.since is None and state.best_iteration:
        _update(decision, since=decision.now)
    if history.stopped_at is None:
        return
    if state.phase == "gathering" and (not state.usable or state.unplannable == state.usable):
        _update(decision, stopped_at=None)  # the job waits for machines: that is not the cost of a change
    elif state.phase == "running" and state.step_seconds and state.generation is not None:
        _training_goes_on(decision, history)


def _count_survived(decision: Decision, before: JobState) -> None:
    """Count losses that the others survive in place. One whose morph fails needs the store after all."""
    state, survived = decision.state, decision.state.history.survived
    if state.phase == "morphing" and state.morph_lost:
        survived += state.losses - before.losses
    elif state.phase == "ending" and before.phase == "morphing" and before.morph_lost:
        survived -= 1
    if survived != state.history.survived:
        _update(decision, survived=max(0, survived))


def _follow_phase(decision: Decision, before: JobState) -> None:
    state, history = decision.state, decision.state.history
    if before.phase == "running" and state.phase in ("morphing", "saving"):
        _update(decision, order_seconds=_order_seconds(decision, before), save_began_at=None)
    elif before.phase == "morphing" and state.phase == "running":
        _morph_is_over(decision, before)
    elif before.phase == "saving" and state.phase == "gathering":
        began_at = before.since if history.save_began_at is None else history.save_began_at
        for field in ("leave_seconds", "save_seconds"):
            _measure(decision, field, history.order_seconds + decision.now - began_at)
    if state.phase not in ("saving", "ending") or before.phase not in ("running", "morphing", "saving"):
        return
    by_loss = state.phase == "ending"
    if history.stopped_at is not None:
        num_stops = history.num_stops + (before.phase != "saving")
        _update(decision, stopped_by_loss=by_loss or history.stopped_by_loss, num_stops=num_stops)
    elif state.step_seconds:
        _update(decision, stopped_at=decision.now, stopped_by_loss=by_loss, num_stops=1)


def _order_seconds(decision: Decision, before: JobState) -> float:
    """Return how long ago the first machine of the generation had to leave: the plan has taken so long."""
    assert before.generation is not None
    members = [before.members.get(name) for name in before.generation.machines]
    times = [m.leave_at for m in members if m is not None and m.leave_by is not None]
    return max(0.0, decision.now - max(min(times), before.since)) if times else 0.0


def _morph_is_over(decision: Decision, before: JobState) -> None:
    """Measure a change in place. Its pause does not include the wait for the end of a step."""
    state, history = decision.state, decision.state.history
    pause = max((one.morph_seconds for one in distinct_reports(state.progress)), default=0.0)
    if before.morph_lost:
        # Half a step, on average, is computed again, and the steps since the copies that ranks went back to.
        redone = max(0, state.best_iteration - state.iteration) + 0.5
        _measure_loss(decision, max(0.0, pause - history.hold_seconds) + redone * state.step_seconds)
    else:
        _measure(decision, "change_seconds", pause)
        _measure(decision, "leave_seconds", history.order_seconds + pause + REPORT_SECONDS)
    _update(decision, hold_seconds=0.0)


def _measure_loss(decision: Decision, seconds: float) -> None:
    _measure(decision, "loss_seconds", seconds / max(1, decision.state.history.num_lost))
    _update(decision, num_lost=0)


def _training_goes_on(decision: Decision, history: ChangeHistory) -> None:
    """The first step after a restart is reported."""
    state = decision.state
    assert state.generation is not None and history.stopped_at is not None
    resumed = max(state.generation.resume_step or 0, state.first_iteration)
    trained = max(0, state.iteration - resumed) * state.step_seconds
    seconds = decision.now - history.stopped_at - trained
    if history.stopped_by_loss:
        redone = max(0, state.best_iteration - resumed) * state.step_seconds
        _measure_loss(decision, seconds + redone)
    else:  # a save waits for the end of a step
        _measure(decision, "change_seconds", (seconds - state.step_seconds / 2) / history.num_stops)
    _update(decision, stopped_at=None)
