"""In which order a model's operations run, where its branches leave a choice.

Every way to cut a graph into convex blocks, none of which uses what a later one makes, is a way to write its
operations down in a row and to cut the row. So blocks over branches are a matter of the row alone. A
program writes one; it is a good one where it finishes a branch before it begins the next, and a bad one where
it takes turns, or makes early what is used late. Two others come from the graph:

    late    each operation right before the first that needs it     what is made for later is made later
    early   each operation right after the last that it needs       what can be finished is finished at once

Of the three, the one that lets least travel; the program's own, unless another is clearly better.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from varuna.types import OperationGraph

CLEARLY = 0.8
"""So much of what crosses in the program's order another order may let cross, to be taken instead."""


def crossings(graph: OperationGraph, order: Sequence[int]) -> list[int]:
    """In bytes, what would travel over a cut before each place of a row, and after the last."""
    place = {operation: number for number, operation in enumerate(order)}
    changes = [0] * (len(order) + 1)
    for value in graph.values:
        changes[place[value.made_by] + 1] += value.num_bytes
        changes[max(place[user] for user in value.used_by) + 1] -= value.num_bytes
    return list(accumulate(changes))


def best_order(graph: OperationGraph, durations: Sequence[int], *, windows: int) -> Sequence[int]:
    """Judged by the cheapest cut in each of so many equal parts of the model's time: there stages end."""
    program = range(len(graph.operations))

    def travels(order: Sequence[int]) -> int:
        moments = accumulate((durations[operation] for operation in order), initial=0)
        length = max(sum(durations) // windows, 1)
        cheapest: dict[int, int] = {}
        for moment, crossing in zip(moments, crossings(graph, order), strict=True):
            window = moment // length
            cheapest[window] = min(crossing, cheapest.get(window, crossing))
        return sum(cheapest.values())

    best = min((late(graph), early(graph)), key=travels)
    return best if travels(best) < CLEARLY * travels(program) else program


def late(graph: OperationGraph) -> list[int]:
    return _depth_first(_operands(graph), range(len(graph.operations)))


def early(graph: OperationGraph) -> list[int]:
    """The same from the other end: last things first, each after all that use it."""
    users: list[list[int]] = [[] for _ in graph.operations]
    for operation, operands in enumerate(_operands(graph)):
        for operand in operands:
            users[operand].append(operation)
    return _depth_first(users, range(len(users))[::-1])[::-1]


def _operands(graph: OperationGraph) -> list[list[int]]:
    """What each needs, in the program's order. Its last operation stays the last: it takes all results."""
    found: list[set[int]] = [set() for _ in graph.operations]
    for value in graph.values:
        for user in value.used_by:
            found[user].add(value.made_by)
    last = len(found) - 1
    used = set(chain.from_iterable(found))
    found[last].update(operation for operation in range(last) if operation not in used)
    return [sorted(operands) for operands in found]


def _depth_first(needs: Sequence[Sequence[int]], possible: Sequence[int]) -> list[int]:
    """Each after all that it needs, these right before it: the one with most before it first, asides last.

    `possible` is an order in which all could be done.
    """
    depths = [0] * len(needs)
    for operation in possible:
        depths[operation] = 1 + max((depths[need] for need in needs[operation]), default=0)
    order: list[int] = []
    begun = [False] * len(needs)
    for start in sorted(set(range(len(needs))).difference(*needs), reverse=True):  # those that nobody needs
        path = [(start, _deepest_first(needs[start], depths))]
        while path:
            operation, left = path[-1]
            following = next((need for need in left if not begun[need]), None)
            if following is None:
                path.pop()
                order.append(operation)
            else:
                begun[following] = True
                path.append((following, _deepest_first(needs[following], depths)))
    return order


def _deepest_first(needs: Sequence[int], depths: Sequence[int]) -> Iterator[int]:
    return iter(sorted(needs, key=lambda need: -depths[need]))
