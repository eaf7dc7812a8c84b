"""Plays a schedule against given times, without any device: what will happen, and when.

A stage is one computing thread: it takes a message, computes, hands the result over. What is handed
over travels while it computes on, in one queue for each link and direction. The gradients of a stage
are reduced over its replicas in buckets, from its last backward on; then come the tied weights, the
sum of the losses over all ranks, and the optimizer. So the engine does it (`varuna.execute`).

A step is over for a stage when its optimizer is done; it then begins the next one without asking the
others. What a step takes is therefore the longest time that any one stage spends on it, from its first
instruction on, and not the time from the first start to the last end: who ends late may begin late.
"""

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from varuna.errors import ScheduleError
from varuna.plan.cost import kernel
from varuna.schedule import limit, opportunistic, ops
from varuna.types import Interval, Schedule, Timeline

WORTH_COMPILING = 40_000
"""Instructions played in plain Python, about 0.2 s, after which the loading of numba pays for itself."""


class Orders(NamedTuple):
    """In which order each stage works, in letters, and how freely."""

    letters: tuple[str, ...]
    limits: tuple[int, ...]
    opportunistic: bool
    microbatches: int


class StageTimes(NamedTuple):
    """What one stage's work takes, in seconds; of instructions in the order F, R, B, I, W."""

    seconds: tuple[float, float, float, float, float]
    last_seconds: tuple[float, float, float, float, float]  # of the last micro-batch, which may be smaller
    spreads: tuple[float, float, float, float, float] = (0.0,) * 5
    buckets: tuple[tuple[float, float], ...] = ()  # after which share of the last backward, how long
    ending_seconds: float = 0.0  # the optimizer, and what else is done once a step


class Way(NamedTuple):
    """One direction of a link, in seconds for each message."""

    sending: float  # for which it keeps the way busy
    last_sending: float  # of the last micro-batch's
    latency: float = 0.0  # until it arrives, after that
    spread: float = 0.0
    leaving: float = 0.0  # in which the sender cannot compute; part of its instruction's seconds


class Tie(NamedTuple):
    stages: tuple[int, ...]
    seconds: float


class Pipeline(NamedTuple):
    """All times of one replica."""

    stages: tuple[StageTimes, ...]
    forward: tuple[Way, ...]  # from each stage but the last to the next
    backward: tuple[Way, ...]  # from each stage but the first to the one before
    sharing: tuple[float, ...] = ()  # per link: the part of the time that a message loses to one it meets
    lanes: tuple[int, ...] = ()  # per stage: reductions of one number wait for each other; else each alone
    ties: tuple[Tie, ...] = ()
    totals_seconds: float = 0.0  # the sum of the losses over all ranks
    ends_together: bool = False  # all wait for all before the optimizer: the norm, the overflow


@lru_cache(maxsize=512)
def name_orders(
    name: str, *, stages: int, microbatches: int, recompute: tuple[bool, ...] | None = None
) -> Orders:
    """The orders of a schedule by name; `recompute` has one claim per stage."""
    flags = recompute or (False,) * stages
    sizes = [{"stage": stage, "stages": stages, "microbatches": microbatches} for stage in range(stages)]
    return Orders(
        tuple(ops(name, **size, recompute=flag) for size, flag in zip(sizes, flags, strict=True)),
        tuple(limit(name, **size) for size in sizes),
        opportunistic(name),
        microbatches,
    )


def read_orders(schedule: Schedule) -> Orders:
    """The orders of any schedule that passes `varuna.schedule.check`."""
    letters = tuple("".join(instruction.op for instruction in row) for row in schedule.rows)
    return Orders(letters, schedule.limits, schedule.opportunistic, letters[0].count("F"))


def simulate(orders: Orders, replicas: Sequence[Pipeline], *, seed: int = 0) -> "Simulation":
    """One step of the whole job. Replicas that are alike are given once; `seed` 0: nothing varies."""
    for pipeline in replicas:
        _refuse_nonsense(orders, pipeline)
    played = [_play(orders, pipeline, seed, index) for index, pipeline in enumerate(replicas)]
    return Simulation(orders, tuple(replicas), played)


class Played(NamedTuple):
    """One replica's instructions, by their place in the letters of all stages one after the other."""

    firsts: Sequence[int]
    starts: Any
    stops: Any
    numbers: Any


class Simulation:
    """What a step looks like. Details are worked out when asked for."""

    def __init__(self, orders: Orders, replicas: tuple[Pipeline, ...], played: list[Played]) -> None:
        self.orders = orders
        self.replicas = replicas
        self.played = played
        self.ends = _end(orders, replicas, played)

    @cached_property
    def seconds(self) -> float:
        """From the end of one step to the end of the next."""
        return max(
            done - float(played.starts[first])
            for played, end in zip(self.played, self.ends, strict=True)
            for first, done in zip(played.firsts, end.done, strict=False)
        )

    @property
    def bare_seconds(self) -> float:
        """The same, if there were nothing to reduce."""
        played = self.played[0]
        spans = pairwise(played.firsts)
        return max(
            float(max(played.stops[first:stop])) - float(played.starts[first]) + stage.ending_seconds
            for (first, stop), stage in zip(spans, self.replicas[0].stages, strict=True)
        )

    def compute_seconds(self, stage: int, replica: int = 0) -> float:
        played = self.played[replica]
        row = slice(played.firsts[stage], played.firsts[stage + 1])
        stops, starts = _as_list(played.stops[row]), _as_list(played.starts[row])
        return math.fsum(stops) - math.fsum(starts)

    def finishing_seconds(self, stage: int, replica: int = 0) -> float:
        """From the end of its last backward until its gradients are final and all losses known."""
        played = self.played[replica]
        row = slice(played.firsts[stage], played.firsts[stage + 1])
        return self.ends[replica].finished[stage] - float(max(played.stops[row]))

    def timeline(self, ranks: Sequence[Sequence[int]] | None = None) -> Timeline:
        """The step from zero on; `ranks` by stage and replica, else a replica's stages are neighbours."""
        stages = len(self.orders.letters)
        intervals: list[Interval] = []
        for replica, (played, end) in enumerate(zip(self.played, self.ends, strict=True)):
            for stage, letters in enumerate(self.orders.letters):
                rank = replica * stages + stage if ranks is None else ranks[stage][replica]
                row = slice(played.firsts[stage], played.firsts[stage + 1])
                ran = sorted(
                    zip(
                        _as_list(played.starts[row]),
                        _as_list(played.stops[row]),
                        letters,
                        _as_list(played.numbers[row]),
                        strict=True,
                    )
                )
                free = 0.0
                for start, stop, what, number in ran:
                    if start > free:
                        intervals.append(Interval(rank, stage, "wait", -1, free, start))
                    intervals.append(Interval(rank, stage, what, number, start, stop))
                    free = stop
                for start, stop in end.reductions[stage]:
                    intervals.append(Interval(rank, stage, "reduce", -1, start, stop))
                if end.finished[stage] > free:
                    intervals.append(Interval(rank, stage, "wait", -1, free, end.finished[stage]))
                if end.done[stage] > end.finished[stage]:
                    intervals.append(
                        Interval(rank, stage, "optimizer", -1, end.finished[stage], end.done[stage])
                    )
        return Timeline(tuple(intervals))


class End(NamedTuple):
    """How a step ends on one replica, by stage."""

    finished: list[float]  # its gradients are final
    done: list[float]  # its optimizer is too
    reductions: list[list[tuple[float, float]]]


def _play(orders: Orders, pipeline: Pipeline, seed: int, replica: int) -> Played:
    """Hands the numbers to the kernel: lists to the plain one, arrays to the compiled one."""
    stages, microbatches = len(orders.letters), orders.microbatches
    firsts = [0]
    for letters in orders.letters:
        firsts.append(firsts[-1] + len(letters))
    total = firsts[-1]
    still = Way(0.0, 0.0)
    ways = [*pipeline.forward, still, still, *pipeline.backward]
    numbers: list[Any] = [
        "".join(orders.letters).encode(),
        firsts,
        microbatches,
        list(orders.limits),
        orders.opportunistic,
        [s for stage in pipeline.stages for s in stage.seconds]
        + [s for stage in pipeline.stages for s in stage.last_seconds],
        [s for stage in pipeline.stages for s in stage.spreads],
        [way.leaving for way in ways],
        [way.sending for way in ways] + [way.last_sending for way in ways],
        [way.latency for way in ways],
        [way.spread for way in ways],
        [*(pipeline.sharing or (0.0,) * (stages - 1)), 0.0],
        [0.0] * stages,
        (seed + replica * 7919) & 0x7FFFFFFF if seed else 0,
    ]
    play = kernel.compiled_play() if _pace.quickens(total) else None
    if play is None:
        starts, stops, of = [0.0] * total, [0.0] * total, [0] * total
        arrivals = [kernel.NEVER] * (stages * microbatches)
        rest: list[Any] = [
            starts,
            stops,
            of,
            arrivals,
            arrivals.copy(),
            [0] * (8 * stages),
            [0.0] * (6 * stages),
        ]
        num_run = kernel.play(*numbers, *rest)
        found = Played(firsts, starts, stops, of)
    else:
        import numpy

        arrays = [numpy.frombuffer(numbers[0], dtype=numpy.uint8)]
        arrays += [numpy.array(n) if isinstance(n, list) else n for n in numbers[1:]]
        never = numpy.full(stages * microbatches, kernel.NEVER)
        found = Played(firsts, numpy.zeros(total), numpy.zeros(total), numpy.zeros(total, dtype=numpy.int64))
        heads = numpy.zeros(8 * stages, dtype=numpy.int64)
        num_run = play(*arrays, *found[1:], never, never.copy(), heads, numpy.zeros(6 * stages))
    if num_run < total:
        raise ScheduleError(
            f"the schedule deadlocks after {num_run} of {total} instructions "
            "(varuna.schedule.check names who waits for whom)"
        )
    return found


class _Pace:
    """Counts what was played in this process. Both ways give the same bits, so this is only about time."""

    def __init__(self) -> None:
        self.num_played = 0

    def quickens(self, instructions: int) -> bool:
        self.num_played += instructions
        return self.num_played >= WORTH_COMPILING


_pace = _Pace()


def _end(orders: Orders, replicas: Sequence[Pipeline], played: Sequence[Played]) -> list[End]:
    """From the last backward on: reductions over replicas, ties, losses, norm, optimizer."""
    stages = len(orders.letters)
    last_starts: list[list[float]] = []
    last_stops: list[list[float]] = []
    told = 0.0  # when the last stage of all knows its losses and has sent all but its last gradient
    for one in played:
        places = [
            first + letters.rindex("W" if "W" in letters else "B")
            for first, letters in zip(one.firsts, orders.letters, strict=False)
        ]
        for first, letters in zip(one.firsts, orders.letters, strict=False):
            told = max(told, float(one.starts[first + max(letters.rfind("B"), letters.rfind("I"))]))
        last_starts.append([float(one.starts[place]) for place in places])
        last_stops.append([float(one.stops[place]) for place in places])

    full = []
    for stage in range(stages):
        for bucket, (_, seconds) in enumerate(replicas[0].stages[stage].buckets):
            when = max(
                start[stage] + pipeline.stages[stage].buckets[bucket][0] * (stop[stage] - start[stage])
                for pipeline, start, stop in zip(replicas, last_starts, last_stops, strict=True)
            )
            full.append((when, stage, bucket, seconds))
    reductions: list[list[tuple[float, float]]] = [[] for _ in range(stages)]
    lanes = replicas[0].lanes or range(stages)
    free = dict.fromkeys(lanes, 0.0)
    for when, stage, _, seconds in sorted(full):
        start = max(when, free[lanes[stage]])
        free[lanes[stage]] = start + seconds
        reductions[stage].append((start, start + seconds))

    totals = told + replicas[0].totals_seconds
    finished = []
    for pipeline, stops in zip(replicas, last_stops, strict=True):
        reduced = [
            max(stop, reductions[stage][-1][1] if reductions[stage] else 0.0)
            for stage, stop in enumerate(stops)
        ]
        tied = reduced.copy()
        for tie in pipeline.ties:
            together = max(tied[stage] for stage in tie.stages) + tie.seconds
            for stage in tie.stages:
                tied[stage] = together
        finished.append([max(end, totals) for end in tied])
    if replicas[0].ends_together:
        together = max(map(max, finished)) + replicas[0].totals_seconds
        finished = [[together] * stages for _ in finished]
    return [
        End(ends, [end + s.ending_seconds for end, s in zip(ends, pipeline.stages, strict=True)], reductions)
        for pipeline, ends in zip(replicas, finished, strict=True)
    ]


def _as_list(values: Any) -> list[Any]:
    found: list[Any] = values if isinstance(values, list) else values.tolist()
    return found


def _refuse_nonsense(orders: Orders, pipeline: Pipeline) -> None:
    stages = len(orders.letters)
    if len(pipeline.stages) != stages:
        raise ValueError(f"the schedule has {stages} stages, times are given for {len(pipeline.stages)}")
    if not len(pipeline.forward) == len(pipeline.backward) == stages - 1:
        raise ValueError(
            f"{stages} stages have {stages - 1} links between them, times are given for "
            f"{len(pipeline.forward)} forward and {len(pipeline.backward)} backward"
        )
    for place, stage in enumerate(pipeline.stages):
        for key, numbers in (
            ("seconds", stage.seconds),
            ("last_seconds", stage.last_seconds),
            ("spreads", stage.spreads),
            ("buckets", [number for bucket in stage.buckets for number in bucket]),
            ("ending_seconds", [stage.ending_seconds]),
        ):
            _refuse_numbers(f"stages[{place}].{key}", numbers)
    for direction, ways in (("forward", pipeline.forward), ("backward", pipeline.backward)):
        for place, way in enumerate(ways):
            _refuse_numbers(f"{direction}[{place}]", way)


def _refuse_numbers(key: str, numbers: Sequence[float]) -> None:
    for number in numbers:
        if not 0.0 <= number < math.inf:
            raise ValueError(f"{key} must hold numbers of zero or more, but holds {number}")
