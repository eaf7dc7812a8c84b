"""Survivors that are too few for any plan hold their state until a machine replaces the lost one.

With one replica of each stage, survivors have copies of the lost state, but no layout without the lost rank.
A restart would need another machine, too. So they keep their processes and wait for it, with a deadline.
"""

from varuna.morph.rules.decision import Decision, request_plan
from varuna.morph.rules.joiners import prepare
from varuna.morph.rules.membership import ready_machines
from varuna.morph.rules.survivors import COLD

NOT_REPLACED = "no machine has replaced the lost one in time"


def hold_state(decision: Decision, survivors: tuple[str, ...], problem: str) -> bool:
    """Begin to hold the state; return False if no machine can replace the lost one in place."""
    if not _may_come(decision, survivors):
        return False
    decision.drop_preparation("a worker was lost")
    decision.set(holding=True)
    limit = decision.settings.hold_seconds
    names = ", ".join(survivors)
    why = f"{names} has copies of all state, and waits up to {limit:.0f} s for another machine ({problem})"
    decision.log("holding", why)
    return True


def prepare_replacement(decision: Decision, survivors: tuple[str, ...], why: str) -> bool:
    """Plan with the machines that are ready, and start their workers; return False if none can come."""
    state, settings = decision.state, decision.settings
    deadline = state.failed_at + settings.hold_seconds
    if decision.now >= deadline or not _may_come(decision, survivors):
        decision.log(COLD, NOT_REPLACED)
        return False
    if decision.now < state.retry_join_at or state.join_failures >= settings.join_limit:
        return state.join_failures < settings.join_limit
    staying = frozenset(survivors)
    ready = ready_machines(decision, with_kept=True)
    machines = tuple(name for name in ready if name in staying or _is_free(decision, name))
    proposal = state.proposal
    if machines == survivors:
        return True
    if proposal is None or not proposal.is_for(machines):
        request_plan(decision, machines)
        return True
    joiners = tuple(name for name in proposal.used if name not in staying)
    if proposal.layout is not None and len(joiners) < len(proposal.used):
        prepare(decision, proposal, joiners, why, deadline=deadline)
    return True


def _may_come(decision: Decision, survivors: tuple[str, ...]) -> bool:
    """Return True if a machine is ready or may soon be, and none must end its other workers first.

    A machine with live workers besides the lost one cannot join before they end: a restart is sooner.
    """
    others = [member for name, member in decision.state.members.items() if name not in survivors]
    ours = decision.generation.machines
    if any(member.agent and member.workers is not None and member.name in ours for member in others):
        return False
    return any(member.listed and not member.leaves for member in others)


def _is_free(decision: Decision, name: str) -> bool:
    return decision.state.members[name].workers is None
