"""Facts about workers that survive a loss: who can morph in place, and who still holds each stage."""

from collections.abc import Collection, Iterable

from varuna.morph.reports import distinct_reports, machines_that_fail
from varuna.morph.rules.decision import Decision
from varuna.morph.state import Generation, match_ranks

COLD = "cold restart"
ANYWAY = "a loss ends this generation"
YOUNG_SECONDS = 3.0
YOUNG_STEPS = 10
"""Until then, heartbeats may be older than what survivors know: that they can morph, and have copies."""
FRESH_SECONDS = 0.1
"""A heartbeat that comes this long after the news of a loss was sent after the loss."""


def why_not_hot(decision: Decision, machines: Iterable[str], *, lost: Collection[int] = ()) -> str:
    """Say why the workers of these machines, but the lost ranks, cannot morph in place; "" if they can."""
    if not decision.settings.hot:
        return "hot morphs are off"
    generation, progress = decision.generation, decision.state.progress
    others = frozenset(
        machines_that_fail(progress, generation, lambda one: one.hot and one.generation == generation.number)
    )
    for machine in filter(others.__contains__, machines if others else ()):
        reports = {worker.rank: worker for worker in progress.get(machine, ())}
        for rank in generation.ranks_of[machine]:
            if rank in lost:
                continue
            worker = reports.get(rank)
            if worker is None or worker.generation != generation.number:
                return f"{machine} has not reported rank {rank}"
            if not worker.hot:
                return f"rank {rank}: {worker.why_not or 'it has not said that it can morph in place'}"
    return ""


def lost_ranks(decision: Decision) -> frozenset[int]:
    """Return the ranks of failed workers and of lost machines."""
    generation, state = decision.generation, decision.state
    failed = {outcome.failure.rank for outcome in state.failures if outcome.failure is not None}
    gone = {name for name, outcomes in state.ended.items() if any(one.failure for one in outcomes)}
    gone.update(state.lost)
    return frozenset(failed | {rank for machine in gone for rank in generation.ranks_of.get(machine, ())})


def joining_ranks(decision: Decision) -> frozenset[int]:
    """Return the ranks that join in the morph that runs: the others can do without them."""
    last = decision.state.morphed_from
    if decision.state.phase != "morphing" or last is None:
        return frozenset()
    previous, _ = match_ranks(last, decision.generation, decision.state.morph_lost)
    return frozenset(rank for rank, old in enumerate(previous) if old is None)


def surviving_ranks(decision: Decision, lost: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Return the ranks that are left on each machine of the generation that has any."""
    found = dict(decision.generation.ranks_of)
    for machine in hurt_machines(decision, lost):
        left = tuple([rank for rank in found[machine] if rank not in lost])
        if left and machine not in decision.state.ended:
            found[machine] = left
        else:
            del found[machine]
    return found


def hurt_machines(decision: Decision, lost: Collection[int]) -> frozenset[str]:
    """Return the machines of the generation that have lost a rank."""
    found = (decision.generation.machine_of(rank) for rank in lost)
    return frozenset(machine for machine in found if machine is not None)


def _restarts_anyway(decision: Decision) -> bool:
    """Return True if a loss ends this generation whatever its survivors hold.

    A worker that raises would raise again after a restart in place; but the others can do without a joiner.
    """
    settings, state = decision.settings, decision.state
    joining = joining_ranks(decision)
    failures = [one.failure for one in state.failures if one.failure and one.failure.rank not in joining]
    failures = [one for one in failures if not (one.of_joiner_alone and one.rank in state.joined)]
    by_itself = any(failure.error or (failure.exit_code or 0) >= 0 for failure in failures)
    return not (settings.hot and settings.morphs) or state.verdict is not None or by_itself


def log_cold_restart(decision: Decision, why: str) -> None:
    """Log why a generation that survives losses does not survive this one."""
    if why and why != ANYWAY and decision.state.phase == "ending":
        decision.log(COLD, why)


def why_not_recover(decision: Decision, lost_machine: str = "") -> str:
    """Say why the survivors of a loss cannot go on in place; "" if they can: they hold every stage.

    `lost_machine` is lost, too. Only workers that died of a signal are replaced: an exception in the script
    would be raised again. Ranks commit their steps, and so can survive a loss, if every stage has replicas.
    If not, they go back to copies of the lost ranks' state, which survivors have.
    In the middle of a morph, they must hold all state of the last generation that was entered.
    """
    state, generation = decision.state, decision.generation
    if _restarts_anyway(decision):
        return ANYWAY
    lost = set(lost_ranks(decision))
    lost |= set(generation.ranks_of.get(lost_machine, ()))
    survivors = surviving_ranks(decision, lost)
    if not survivors:
        return "no worker is left"
    if ended := [name for name in survivors if name in state.ended] if state.ended else []:
        return f"the workers of {', '.join(ended)} have ended"
    if state.phase == "morphing":
        held = _hold_last_state(decision, lost)
        return "" if held else "the workers that stay do not hold every stage in the middle of this change"
    stage_map, progress = generation.layout.stage_map, state.progress
    holders_left = all(len(stage) > 1 and not lost.issuperset(stage) for stage in stage_map)
    if waits_for_reports(decision, survivors):
        return "" if holders_left else "the manager has not heard yet who has copies of the lost state"
    if holders_left and all(worker.replicated for worker in distinct_reports(progress)):
        return why_not_hot(decision, survivors, lost=lost)
    reports = [worker for name in survivors for worker in progress.get(name, ())]
    reports = [worker for worker in reports if worker.rank not in lost]
    whole = holders_left and all(worker.replicated for worker in reports)
    copied = {worker.copy_of for worker in reports if worker.copy_of is not None}
    if not whole and not lost <= copied:
        missing = ", ".join(str(rank) for rank in sorted(lost - copied))
        return why_not_hot(decision, survivors, lost=lost) or (
            f"only the lost workers had the state of rank {missing}, and no other worker has a copy of it "
            "yet (copies need a loop over model.batches)"
        )
    return why_not_hot(decision, survivors, lost=lost)


def awaits_reports(decision: Decision) -> bool:
    """Return True while the next heartbeats of survivors may say that they can go on in place after all.

    The first step of a generation or a copy may be newer than the last heartbeat. The survivors wait.
    """
    state = decision.state
    since = decision.now - state.failed_at
    if state.phase != "running" or _restarts_anyway(decision) or since >= decision.settings.report_seconds:
        return False
    lost = lost_ranks(decision)
    survivors = surviving_ranks(decision, lost)
    if not survivors or any(name in state.ended for name in survivors):
        return False
    reports = [worker for name in survivors for worker in state.progress.get(name, ())]
    reports = [worker for worker in reports if worker.rank not in lost]
    if any(worker.why_not for worker in reports):
        return False
    is_young = state.failed_at - state.since < YOUNG_SECONDS or any(
        one.steps < YOUNG_STEPS for one in reports
    )
    heard = all(state.members[name].seen >= state.failed_at + FRESH_SECONDS for name in survivors)
    return is_young and not heard


def state_holders(
    decision: Decision, following: Generation, lost: Collection[int]
) -> tuple[Generation, tuple[tuple[int, ...], ...]]:
    """Return the last generation that was entered, and the ranks of it whose state each next rank has.

    No ranks: each rank that stays has its own state. A rank has a copy of another one's state only if all go
    back to their copies, because some state is `lost`.
    """
    state, last = decision.state, decision.generation
    if state.phase == "morphing" and state.morph_base is not None:
        base, held = state.morph_base, dict(enumerate(_present_holders(decision)))
    else:
        whole = all(worker.replicated for worker in distinct_reports(state.progress))
        gone = set(lost)
        if not gone or (whole and not any(map(gone.issuperset, last.layout.stage_map))):
            return last, ()
        copies = {worker.rank: worker.copy_of for found in state.progress.values() for worker in found}
        base, held = last, {}
        for rank in range(last.layout.num_ranks):
            copied = copies.get(rank)
            held[rank] = (rank,) if copied is None else (rank, copied)
    previous, _ = match_ranks(last, following, lost)
    return base, tuple(() if old is None else held.get(old, ()) for old in previous)


def _present_holders(decision: Decision) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of the last entered generation whose state each rank has in the morph that runs."""
    state = decision.state
    if state.morph_holds or state.morphed_from is None:
        return state.morph_holds
    previous, _ = match_ranks(state.morphed_from, decision.generation, state.morph_lost)
    return tuple(() if old is None else (old,) for old in previous)


def _hold_last_state(decision: Decision, lost: Collection[int]) -> bool:
    """Return whether survivors of an interrupted morph hold all state of the last entered generation.

    Ranks that leave in this morph do not take part in the next one: the others must do without them.
    """
    state, base = decision.state, decision.state.morph_base
    if base is None:
        return False
    holds = (held for rank, held in enumerate(_present_holders(decision)) if rank not in lost)
    alive = {old for held in holds for old in held}
    if state.morph_whole:
        return all(alive & set(stage) for stage in base.layout.stage_map)
    return alive >= set(range(base.layout.num_ranks))  # each rank had state of its own


def handing_over(decision: Decision) -> tuple[str, ...]:
    """Return the machines that leave in the morph that runs, and still have workers."""
    last = decision.state.morphed_from
    if decision.state.phase != "morphing" or last is None:
        return ()
    return tuple(name for name in decision.leavers() if name in last.machines)


def waits_for_reports(decision: Decision, machines: Iterable[str]) -> bool:
    """Return True while a restarted manager has not heard of the workers of all these machines."""
    state = decision.state
    return decision.now < state.attach_until and any(name not in state.progress for name in machines)
