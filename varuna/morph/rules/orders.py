"""Orders of the morph that runs: sent again to agents that may lack them, or replaced because they fail."""

from collections.abc import Collection

from varuna.morph import commands, events
from varuna.morph.failures import shorten_reason
from varuna.morph.rules.decision import Decision


def may_lack_order(decision: Decision, event: events.AgentJoined) -> bool:
    """Return True if a manager that was killed may not have sent this agent its order."""
    state = decision.state
    if state.phase != "morphing" or event.machine in state.ended:
        return False
    found = (one for one in (state.morphed_from, state.generation) if one is not None)
    known = next((one for one in found if one.number == event.generation), None)
    if known is None or event.machine not in known.machines:
        return False
    return known.agents[known.machines.index(event.machine)] == event.agent


def repeat_order(decision: Decision, machine: str) -> None:
    """Send the order of a machine again. An agent that has it ignores it."""
    state, last = decision.state, decision.state.morphed_from
    assert last is not None
    morph = commands.Morph(decision.generation, last, state.morph_lost, shorten_reason(state.reason))
    decision.do(commands.RepeatOrders(morph, (machine,)))


def break_morph(decision: Decision, why: str) -> None:
    """Note that the morph that runs cannot be completed. All its workers can enter another generation."""
    decision.set(failed_at=_failed_at(decision), morph_broken=decision.state.morph_broken or why)


def give_up_workers(decision: Decision, machines: Collection[str], why: str) -> None:
    """Go on without the workers of these machines, which are connected. Those that still run are killed."""
    found = tuple(machines)
    lost = {**decision.state.lost, **dict.fromkeys(found, why)}
    decision.set(failed_at=_failed_at(decision), lost=lost)
    decision.add_leaving(found)
    decision.do(commands.KillWorkers(decision.generation.number, found, why))


def _failed_at(decision: Decision) -> float:
    """Return the time of the first problem of this generation: now, if there was none before."""
    first = not (decision.state.failures or decision.state.lost or decision.state.morph_broken)
    return decision.now if first else decision.state.failed_at
