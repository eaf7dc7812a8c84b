"""Joiners of a running job: they build their model while it goes on. Other code is refused alone."""

from itertools import filterfalse

from varuna.morph import commands
from varuna.morph.reports import distinct_reports
from varuna.morph.rules.decision import Decision
from varuna.morph.rules.membership import clause, ready_machines
from varuna.morph.state import CodeIdentity, Generation, MachinePlan, Preparation

REFUSED = "joiner refused"


def prepare(
    decision: Decision, proposal: MachinePlan, joiners: tuple[str, ...], why: str, *, deadline: float
) -> None:
    """Start the joiners; the current generation trains on, or holds its state after a loss."""
    generation = decision.next_generation(proposal, None)
    preparation = Preparation(
        generation,
        joiners,
        deadline=deadline,
        leave_by=decision.leave_by(due=True),
        why=why,
        reasons=proposal.reasons,
    )
    decision.set(preparation=preparation, joiners={}, leaving=(), next_number=generation.number + 1)
    for name in joiners:
        decision.set_member(name, workers=generation.number)
    decision.log(
        "preparing", f"{clause(joiners, 'build')} the model for generation {generation.number} ({why})"
    )
    decision.do(commands.Prepare(generation, joiners, why))


def count_join_failure(decision: Decision) -> float:
    """Count one more joiner that failed; return the seconds until the next one may start."""
    failures = decision.state.join_failures + 1
    wait = min(60.0, 2.0**failures)
    decision.set(join_failures=failures, retry_join_at=decision.now + wait)
    return wait


def note_first_steps(decision: Decision) -> None:
    """Forget failed joiners once all ranks that have joined report a step."""
    state = decision.state
    if not state.joined or state.phase != "running":
        return

    def has_trained(rank: int) -> bool:
        reports = state.progress.get(decision.generation.machine_of(rank) or "", ())
        return any(worker.rank == rank and worker.steps for worker in reports)

    late = tuple(filterfalse(has_trained, state.joined))
    decision.set(joined=late, join_failures=state.join_failures if late else 0)


def unusable_machines(decision: Decision, generation: Generation) -> list[str]:
    """Return the machines of the next generation that are gone, have another agent, or must leave."""
    ready, members = frozenset(ready_machines(decision, with_kept=True)), decision.state.members
    return [
        name
        for name, agent in zip(generation.machines, generation.agents, strict=True)
        if name not in ready or members[name].agent != agent
    ]


def all_wait(decision: Decision, preparation: Preparation) -> bool:
    """Return True once all joiners are prepared."""
    joiners = frozenset(preparation.joiners)
    for machine, ranks in zip(preparation.generation.machines, preparation.generation.ranks, strict=True):
        if machine in joiners:
            waiting = {worker.rank for worker in decision.state.joiners.get(machine, ()) if worker.waits}
            if not set(ranks) <= waiting:
                return False
    return True


def refuse_other_code(decision: Decision, preparation: Preparation) -> bool:
    """Drop a preparation whose joiners have other code than the job, and do without their machines.

    Such a machine is not used until it is removed from the list and added again.
    """
    running = (worker.code for worker in distinct_reports(decision.state.progress))
    expected = next((code for code in running if code.model), None)
    refused = {}
    for machine, workers in decision.state.joiners.items():
        for worker in workers:
            if expected is not None and worker.code.model and worker.code != expected:
                refused[machine] = _describe(worker.code, expected)
    for machine, why in refused.items():
        decision.set_member(machine, drained=True, released=False)
        remedy = "give it the code of the job, remove it from the list and add it again"
        decision.log(REFUSED, f"{machine} {why}; the job goes on without it ({remedy})")
    if refused:
        decision.drop_preparation(f"{', '.join(refused)} has other code than the job")
    return bool(refused)


def _describe(found: CodeIdentity, expected: CodeIdentity) -> str:
    if found.varuna != expected.varuna:
        return f"has varuna {found.varuna}, and the job runs {expected.varuna}"
    if found.torch != expected.torch:
        return f"has torch {found.torch}, and the job runs {expected.torch}"
    if found.model != expected.model:
        return "has wrapped another model than the job"
    return "runs another version of the script than the job"
