"""Facts about workers that survive a loss: who can morph in place, and who still holds each stage."""

from collections.abc import Iterable

from varuna.morph.rules.decision import Decision
from varuna.morph.state import Generation


def why_not_hot(decision: Decision, machines: Iterable[str]) -> str:
    """Say why the workers of these machines cannot morph in place; "" if they can."""
    if not decision.settings.hot:
        return "hot morphs are off"
    generation = decision.generation
    ranks_of = dict(zip(generation.machines, generation.ranks, strict=True))
    for machine in machines:
        reports = {worker.rank: worker for worker in decision.state.progress.get(machine, ())}
        for rank in ranks_of[machine]:
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
    places = zip(generation.machines, generation.ranks, strict=True)
    return frozenset(failed | {rank for machine, ranks in places if machine in state.lost for rank in ranks})


def surviving_machines(decision: Decision, lost: Iterable[int]) -> tuple[str, ...]:
    """Return the machines of the generation that have lost no rank."""
    generation = decision.generation
    places = zip(generation.machines, generation.ranks, strict=True)
    return tuple(machine for machine, ranks in places if not set(ranks) & set(lost))


def can_recover(decision: Decision, lost_machine: str = "") -> bool:
    """Return True if the survivors can morph in place, and hold every stage between them.

    `lost_machine` is lost, too. Only workers that died of a signal are replaced: an exception in the script
    would be raised again. Ranks commit their steps, and so can survive a loss, if every stage has replicas.
    """
    state, generation = decision.state, decision.generation
    settings = decision.settings
    if not (settings.hot and settings.hot_losses and settings.morphs) or state.verdict is not None:
        return False
    if any(
        o.failure is not None and (o.failure.error or (o.failure.exit_code or 0) >= 0) for o in state.failures
    ):
        return False
    lost = set(lost_ranks(decision))
    places = dict(zip(generation.machines, generation.ranks, strict=True))
    lost |= set(places.get(lost_machine, ()))
    survivors = surviving_machines(decision, lost)
    if not survivors or any(machine in state.ended for machine in survivors):
        return False
    holders_left = all(len(stage) > 1 and set(stage) - lost for stage in generation.layout.stage_map)
    return holders_left and not why_not_hot(decision, survivors)


def match_ranks(
    last: Generation, following: Generation, lost: Iterable[int]
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Return the old rank of each new rank (None: a joiner), and the old ranks that leave.

    A worker keeps its machine and its device: the i-th worker of a machine stays the i-th.
    """
    previous: list[int | None] = [None] * following.layout.num_ranks
    old_ranks = dict(zip(last.machines, last.ranks, strict=True))
    for machine, ranks in zip(following.machines, following.ranks, strict=True):
        for rank, old in zip(ranks, old_ranks.get(machine, ()), strict=False):
            previous[rank] = old
    gone = {*previous, *lost}
    return tuple(previous), tuple(rank for ranks in last.ranks for rank in ranks if rank not in gone)
