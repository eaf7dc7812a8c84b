"""Puts the operations of a model into a row, where branches leave a choice.

To divide a graph into convex blocks, each of which uses only results of earlier ones, is to put its
operations into a row and cut the row. The program itself is one row. It is good if it finishes a branch
before it starts the next. It is bad if it alternates between branches, or computes early what it uses
late. Two other rows come from the graph:

    late    each operation right before the first that needs it
    early   each operation right after the last that it needs

The best of the three sends the fewest bytes. The program's own row is used unless another is clearly
better.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

from varuna.types import OperationGraph

CLEARLY = 0.8
"""Another order is used if it sends less than this share of the bytes of the program's order."""


def crossings(graph: OperationGraph, order: Sequence[int]) -> list[int]:
    """Return the bytes that cross a cut before each position of a row, and after the last."""
    place = {operation: number for number, operation in enumerate(order)}
    changes = [0] * (len(order) + 1)
    for value in graph.values:
        changes[place[value.made_by] + 1] += value.num_bytes
        changes[max(place[user] for user in value.used_by) + 1] -= value.num_bytes
    return list(accumulate(changes))


def best_order(graph: OperationGraph, durations: Sequence[int], *, windows: int) -> Sequence[int]:
    """Return the order with the cheapest cuts.

    The time of the model is divided into `windows` equal parts; the cheapest cut of each part counts.
    """
    program = range(len(graph.operations))

    def bytes_sent(order: Sequence[int]) -> int:
        moments = accumulate((durations[operation] for operation in order), initial=0)
        length = max(sum(durations) // windows, 1)
        cheapest: dict[int, int] = {}
        for moment, crossing in zip(moments, crossings(graph, order), strict=True):
            window = moment // length
            cheapest[window] = min(crossing, cheapest.get(window, crossing))
        return sum(cheapest.values())

    best = min((late(graph), early(graph)), key=bytes_sent)
    return best if bytes_sent(best) < CLEARLY * bytes_sent(program) else program


def late(graph: OperationGraph) -> list[int]:
    return _depth_first(_operands(graph), range(len(graph.operations)))


def early(graph: OperationGraph) -> list[int]:
    """Order from the end of the model: each operation after all that use it, then reversed."""
    users: list[list[int]] = [[] for _ in graph.operations]
    for operation, operands in enumerate(_operands(graph)):
        for operand in operands:
            users[operand].append(operation)
    return _depth_first(users, range(len(users))[::-1])[::-1]


def _operands(graph: OperationGraph) -> list[list[int]]:
    """Return what each operation needs. The last operation needs all unused results, so it stays last."""
    found: list[set[int]] = [set() for _ in graph.operations]
    for value in graph.values:
        for user in value.used_by:
            found[user].add(value.made_by)
    last = len(found) - 1
    used = set(chain.from_iterable(found))
    found[last].update(operation for operation in range(last) if operation not in used)
    return [sorted(operands) for operands in found]


def _depth_first(needs: Sequence[Sequence[int]], possible: Sequence[int]) -> list[int]:
    """Order each operation right after what it needs, the longest chain of needs first.

    `possible` is any valid order.
    """
    depths = [0] * len(needs)
    for operation in possible:
        depths[operation] = 1 + max((depths[need] for need in needs[operation]), default=0)

    def deepest_first(operation: int) -> Iterator[int]:
        return iter(sorted(needs[operation], key=lambda need: -depths[need]))

    order: list[int] = []
    begun = [False] * len(needs)
    for start in sorted(set(range(len(needs))).difference(*needs), reverse=True):  # needed by no other
        path = [(start, deepest_first(start))]
        while path:
            operation, left = path[-1]
            following = next((need for need in left if not begun[need]), None)
            if following is None:
                path.pop()
                order.append(operation)
            else:
                begun[following] = True
                path.append((following, deepest_first(following)))
    return order
