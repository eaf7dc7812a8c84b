"""Blocks by multilevel coarsening, to compare with: after Tanaka et al. (IPDPS 2021), section on blocks.

Groups of operations, each at first one, are merged in pairs, level by level: the shortest with the neighbour
with which it stays shortest, as long as the pair is convex and not much longer than others. Then level
by level back, what lies at a border goes over it where less travels then.
"""

from collections.abc import Iterable, Sequence
from statistics import mean, pstdev

from varuna.plan.cut.blocks import FLOPS_PER_MOVED_BYTE
from varuna.types import OperationGraph

BLOCKS = 32


def coarsen(graph: OperationGraph, most: int = BLOCKS) -> tuple[int, ...]:
    levels = [[(operation,) for operation in range(len(graph.operations))]]
    while len(levels[-1]) > most:
        merged = _Level(graph, levels[-1]).merged(most)
        if len(merged) == len(levels[-1]):
            break
        levels.append(merged)
    level = _Level(graph, levels[-1])
    blocks = _numbered(level, most)
    for groups in reversed(levels[:-1]):
        _refine(level, groups, blocks)
    known = {block: number for number, block in enumerate(sorted(set(blocks)))}
    return tuple(known[block] for block in blocks)


class _Level:
    """The groups as a graph of their own."""

    def __init__(self, graph: OperationGraph, groups: Sequence[tuple[int, ...]]) -> None:
        self.graph = graph
        self.groups: dict[int, tuple[int, ...]] = dict(enumerate(groups))
        self.durations = {
            number: sum(self.duration(operation) for operation in group)
            for number, group in self.groups.items()
        }
        of = {operation: number for number, group in self.groups.items() for operation in group}
        self.after: dict[int, set[int]] = {number: set() for number in self.groups}
        self.before: dict[int, set[int]] = {number: set() for number in self.groups}
        for value in graph.values:
            for user in value.used_by:
                if of[user] != of[value.made_by]:
                    self.after[of[value.made_by]].add(of[user])
                    self.before[of[user]].add(of[value.made_by])

    def duration(self, operation: int) -> int:
        own = self.graph.operations[operation]
        return own.flops + FLOPS_PER_MOVED_BYTE * own.moved_bytes

    def merged(self, fewest: int) -> list[tuple[int, ...]]:
        limit = mean(self.durations.values()) + 2 * pstdev(self.durations.values())
        left = set(self.groups)
        for number in sorted(self.groups, key=lambda number: (self.durations[number], number)):
            if number not in left or len(self.groups) <= fewest:
                continue
            left.discard(number)
            near = sorted(
                (self.durations[other], other)
                for other in (self.after[number] | self.before[number]) & left
                if self.durations[number] + self.durations[other] <= limit
            )
            for _, other in near:
                first, second = (number, other) if other in self.after[number] else (other, number)
                if not self._reaches(self.after[first] - {second}, second):
                    left.discard(other)
                    self._merge(first, second)
                    break
        return list(self.groups.values())

    def _reaches(self, starts: Iterable[int], goal: int) -> bool:
        pending, seen = list(starts), set(starts)
        while pending:
            for following in self.after[pending.pop()]:
                if following == goal:
                    return True
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        return False

    def _merge(self, first: int, second: int) -> None:
        self.groups[first] += self.groups.pop(second)
        self.durations[first] += self.durations.pop(second)
        for there, here in ((self.after, self.before), (self.before, self.after)):
            for other in there.pop(second):
                here[other].discard(second)
                if other != first:
                    here[other].add(first)
                    there[first].add(other)
            there[first].discard(second)

    def in_order(self) -> list[int]:
        waits = {number: len(before) for number, before in self.before.items()}
        ready = sorted(number for number, count in waits.items() if not count)
        order = []
        while ready:
            order.append(ready.pop(0))
            for following in self.after[order[-1]]:
                waits[following] -= 1
                if not waits[following]:
                    ready.append(following)
            ready.sort(key=lambda number: min(self.groups[number]))
        return order


def _numbered(level: _Level, most: int) -> list[int]:
    """The block of each operation; while there are too many, the shortest joins its shorter neighbour."""
    blocks = [(level.durations[number], level.groups[number]) for number in level.in_order()]
    while len(blocks) > most:
        place = min(range(len(blocks)), key=lambda i: blocks[i][0])
        beside = min((i for i in (place - 1, place + 1) if 0 <= i < len(blocks)), key=lambda i: blocks[i][0])
        first = min(place, beside)
        blocks[first : first + 2] = [
            (blocks[first][0] + blocks[first + 1][0], blocks[first][1] + blocks[first + 1][1])
        ]
    of = {operation: number for number, (_, group) in enumerate(blocks) for operation in group}
    return [of[operation] for operation in range(len(of))]


def _refine(level: _Level, groups: Sequence[tuple[int, ...]], blocks: list[int]) -> None:
    """Moves groups of a finer level over the borders of blocks, where that lets less travel."""
    values = level.graph.values
    durations = [0] * (max(blocks) + 1)
    for operation, block in enumerate(blocks):
        durations[block] += level.duration(operation)
    limit = mean(durations) + 2 * pstdev(durations)
    made: dict[int, list[int]] = {}
    used: dict[int, list[int]] = {}
    for number, value in enumerate(values):
        made.setdefault(value.made_by, []).append(number)
        for user in value.used_by:
            used.setdefault(user, []).append(number)
    for group in groups:
        block, inside = blocks[group[0]], set(group)
        if any(blocks[operation] != block for operation in group):
            continue
        touched = {
            number for operation in group for number in made.get(operation, []) + used.get(operation, [])
        }
        users = [
            blocks[u] for o in group for n in made.get(o, []) for u in values[n].used_by if u not in inside
        ]
        makers = [
            blocks[values[n].made_by]
            for o in group
            for n in used.get(o, [])
            if values[n].made_by not in inside
        ]
        for target, free in (
            (block + 1, all(user > block for user in users)),
            (block - 1, all(maker < block for maker in makers)),
        ):
            if not free or not 0 <= target < len(durations):
                continue
            own = sum(level.duration(operation) for operation in group)
            if durations[target] + own > limit or durations[block] == own:
                continue
            before = _travels(level.graph, touched, blocks)
            for operation in group:
                blocks[operation] = target
            if _travels(level.graph, touched, blocks) < before:
                durations[block] -= own
                durations[target] += own
                break
            for operation in group:
                blocks[operation] = block


def _travels(graph: OperationGraph, values: Iterable[int], blocks: Sequence[int]) -> int:
    """Over all borders together."""
    found = 0
    for number in values:
        value = graph.values[number]
        found += value.num_bytes * (max(blocks[user] for user in value.used_by) - blocks[value.made_by])
    return found
