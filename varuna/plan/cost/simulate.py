"""Simulates one training step from given times, without a device.

A stage is one computing thread: it receives a message, computes, and sends the result. Messages travel
while the stage computes on, in one queue for each link and direction. From its last backward on, a
stage reduces its gradients over the replicas in buckets. Then follow the tied weights, the sum of the
losses over all ranks, and the optimizer. `varuna.execute` runs a step in this order.

A stage ends its step when its optimizer is done, and starts the next step without waiting for others.
The time of a step is therefore the longest time that one stage spends on it, from its first
instruction on. It is not the time from the first start to the last end: a stage that ends late may
also start late.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from varuna.errors import ScheduleError
from varuna.plan.cost import kernel
from varuna.schedule import limit, opportunistic, ops
from varuna.types import Interval, Timeline

WORTH_COMPILING = 40_000
"""Number of simulated instructions, about 0.2 s in plain Python, after which loading numba pays off.

Plain and compiled code give the same bits, so this changes only the speed.
"""
_num_played = 0  # instructions simulated by this process


Seconds = tuple[float, float, float, float, float]
"""Seconds of the instructions F, R, B, I, W."""


class Orders(NamedTuple):
    """Order of the instructions of each stage, one letter each."""

    letters: tuple[str, ...]
    limits: tuple[int, ...]
    opportunistic: bool
    microbatches: int


class StageTimes(NamedTuple):
    """Times of one stage, in seconds."""

    seconds: Seconds
    last_seconds: Seconds  # of the last micro-batch, which may be smaller
    spreads: Seconds = (0.0,) * 5
    buckets: tuple[tuple[float, float], ...] = ()  # (share of the last backward when full, seconds)
    ending_seconds: float = 0.0  # the optimizer, and other work once per step


class LinkTimes(NamedTuple):
    """One direction of a link, in seconds per message."""

    sending: float  # the message occupies the link
    last_sending: float  # the same for the last micro-batch
    latency: float = 0.0  # from the end of sending to the arrival
    spread: float = 0.0
    sender_seconds: float = 0.0  # part of the sender's instruction that comes after the message has left


class TiedStages(NamedTuple):
    stages: tuple[int, ...]
    seconds: float


class PipelineTimes(NamedTuple):
    """All times of one replica."""

    stages: tuple[StageTimes, ...]
    forward: tuple[LinkTimes, ...]  # from each stage but the last to the next
    backward: tuple[LinkTimes, ...]  # from each stage but the first to the one before
    sharing: tuple[float, ...] = ()  # per link: share of the overlap that two opposite messages lose
    lanes: tuple[int, ...] = ()  # per stage: reductions in the same lane queue; empty: a lane for each
    ties: tuple[TiedStages, ...] = ()
    totals_seconds: float = 0.0  # the sum of the losses over all ranks
    ends_together: bool = False  # all ranks wait for each other before the optimizer


@lru_cache(maxsize=512)
def name_orders(
    name: str, *, stages: int, microbatches: int, recompute: tuple[bool, ...] | None = None
) -> Orders:
    """Return the orders of a named schedule; `recompute` has one flag per stage."""
    flags = recompute or (False,) * stages
    sizes = [{"stage": stage, "stages": stages, "microbatches": microbatches} for stage in range(stages)]
    return Orders(
        tuple(ops(name, **size, recompute=flag) for size, flag in zip(sizes, flags, strict=True)),
        tuple(limit(name, **size) for size in sizes),
        opportunistic(name),
        microbatches,
    )


def simulate(orders: Orders, replicas: Sequence[PipelineTimes], *, seed: int = 0) -> "Simulation":
    """Simulate one step of the whole job. Give equal replicas once. `seed` 0: times do not vary."""
    stages = len(orders.letters)
    for pipeline in replicas:
        if len(pipeline.stages) != stages:
            raise ValueError(
                f"the schedule has {stages} stages, but times are given for {len(pipeline.stages)}"
            )
        if not len(pipeline.forward) == len(pipeline.backward) == stages - 1:
            raise ValueError(
                f"{stages} stages have {stages - 1} links between them, but times are given for "
                f"{len(pipeline.forward)} forward and {len(pipeline.backward)} backward"
            )
    played = [_play(orders, pipeline, seed, index) for index, pipeline in enumerate(replicas)]
    return Simulation(orders, tuple(replicas), played)


class InstructionTimes(NamedTuple):
    """Instructions of one replica, by position in the letters of all stages, one after the other."""

    firsts: Sequence[int]  # position of the first instruction of each stage; and the end of all
    starts: Any
    stops: Any
    numbers: Any  # micro-batches

    def row(self, stage: int) -> slice:
        return slice(self.firsts[stage], self.firsts[stage + 1])


class StepEnd(NamedTuple):
    """End of a step on one replica, by stage."""

    finished: list[float]  # all gradients are final
    done: list[float]  # the optimizer is done
    reductions: list[list[tuple[float, float]]]


class Simulation:
    """Result of a simulated step. Details are computed on first use."""

    def __init__(
        self, orders: Orders, replicas: tuple[PipelineTimes, ...], played: list[InstructionTimes]
    ) -> None:
        self.orders = orders
        self.replicas = replicas
        self.played = played
        self.ends = _end_step(orders, replicas, played)

    @cached_property
    def seconds(self) -> float:
        """Time from the end of one step to the end of the next."""
        return max(
            done - float(played.starts[first])
            for played, end in zip(self.played, self.ends, strict=True)
            for first, done in zip(played.firsts, end.done, strict=False)
        )

    @property
    def bare_seconds(self) -> float:
        """Time of a step without reductions."""
        played = self.played[0]
        return max(
            float(max(played.stops[first:stop])) - float(played.starts[first]) + stage.ending_seconds
            for (first, stop), stage in zip(pairwise(played.firsts), self.replicas[0].stages, strict=True)
        )

    def compute_seconds(self, stage: int) -> float:
        played = self.played[0]
        row = played.row(stage)
        return math.fsum(_as_list(played.stops[row])) - math.fsum(_as_list(played.starts[row]))

    def finishing_seconds(self, stage: int) -> float:
        """Time from the end of the last backward until all gradients are final and all losses known."""
        played = self.played[0]
        return self.ends[0].finished[stage] - float(max(played.stops[played.row(stage)]))

    def timeline(self, ranks: Sequence[Sequence[int]] | None = None) -> Timeline:
        """Return the step from time zero on.

        `ranks` are given by stage and replica; by default the stages of a replica have consecutive ranks.
        """
        stages = len(self.orders.letters)
        intervals: list[Interval] = []
        for replica in range(len(self.replicas)):
            for stage in range(stages):
                rank = replica * stages + stage if ranks is None else ranks[stage][replica]
                intervals += self._intervals(replica, stage, rank)
        return Timeline(tuple(intervals))

    def _intervals(self, replica: int, stage: int, rank: int) -> list[Interval]:
        played, end = self.played[replica], self.ends[replica]
        row = played.row(stage)
        starts, stops, numbers = (
            _as_list(column[row]) for column in (played.starts, played.stops, played.numbers)
        )
        found: list[Interval] = []

        def add(what: str, start: float, stop: float, number: int = -1) -> None:
            found.append(Interval(rank, stage, what, number, start, stop))

        free = 0.0
        for start, stop, what, number in sorted(
            zip(starts, stops, self.orders.letters[stage], numbers, strict=True)
        ):
            if start > free:
                add("wait", free, start)
            add(what, start, stop, number)
            free = stop
        for start, stop in end.reductions[stage]:
            add("reduce", start, stop)
        finished, done = end.finished[stage], end.done[stage]
        if finished > free:
            add("wait", free, finished)
        if done > finished:
            add("optimizer", finished, done)
        return found


def _play(orders: Orders, pipeline: PipelineTimes, seed: int, replica: int) -> InstructionTimes:
    """Run the kernel: over lists in plain Python, over arrays when compiled."""
    stages, microbatches = len(orders.letters), orders.microbatches
    firsts = [0, *accumulate(map(len, orders.letters))]
    total = firsts[-1]
    seconds = [s for stage in pipeline.stages for s in stage.seconds]
    seconds += [s for stage in pipeline.stages for s in stage.last_seconds]
    spreads = [s for stage in pipeline.stages for s in stage.spreads]
    none = LinkTimes(0.0, 0.0)
    ways = (*pipeline.forward, none, none, *pipeline.backward)
    links = [s for field in zip(*ways, strict=True) for s in field]
    _validate_times(pipeline, seconds, spreads, links)
    sharing = pipeline.sharing or (0.0,) * (stages - 1)
    links += (*sharing, 0.0, 0.0, *sharing)
    seed = (seed + replica * 7919) & 0x7FFFFFFF if seed else 0
    global _num_played
    _num_played += total
    compiled = kernel.compiled_play() if _num_played >= WORTH_COMPILING else None
    letters: Any = "".join(orders.letters).encode()
    array: Any = list
    floats: Any = [0.0].__mul__
    integers: Any = [0].__mul__
    nevers: Any = [kernel.NEVER].__mul__
    if compiled is not None:
        import numpy

        letters, array, floats = numpy.frombuffer(letters, numpy.uint8), numpy.array, numpy.zeros
        integers = partial(numpy.zeros, dtype=numpy.int64)
        nevers = partial(numpy.full, fill_value=kernel.NEVER)
    rows = kernel.KernelRows(letters, array(firsts), array(orders.limits), microbatches, orders.opportunistic)
    times = kernel.KernelTimes(array(seconds), array(spreads), array(links), seed)
    state = kernel.KernelState(
        floats(total),
        floats(total),
        integers(total),
        floats(stages),
        nevers(2 * stages * microbatches),
        integers(3 * stages),
        integers(4 * stages),
        floats(6 * stages),
    )
    # Plain tuples: numba's cache on disk must not refer to our classes.
    num_run = compiled(*map(tuple, (rows, times, state))) if compiled else kernel.play(rows, times, state)
    if num_run < total:
        raise ScheduleError(
            f"the schedule deadlocks after {num_run} of {total} instructions "
            "(varuna.schedule.check names the stages that wait)"
        )
    return InstructionTimes(firsts, state.starts, state.stops, state.numbers)


def _end_step(
    orders: Orders, replicas: Sequence[PipelineTimes], played: Sequence[InstructionTimes]
) -> list[StepEnd]:
    """Return what follows the last backward: reductions, ties, sum of the losses, optimizer."""
    last_starts: list[list[float]] = []
    last_stops: list[list[float]] = []
    losses_known = 0.0  # the last stage knows its losses and has sent all gradients but the last
    for one in played:
        rows = list(zip(one.firsts, orders.letters, strict=False))
        places = [first + letters.rindex("W" if "W" in letters else "B") for first, letters in rows]
        for first, letters in rows:
            last_backward = first + max(letters.rfind("B"), letters.rfind("I"))
            losses_known = max(losses_known, float(one.starts[last_backward]))
        last_starts.append([float(one.starts[place]) for place in places])
        last_stops.append([float(one.stops[place]) for place in places])

    reductions = _reduce(replicas, last_starts, last_stops)
    totals = losses_known + replicas[0].totals_seconds
    finished = []
    for pipeline, stops in zip(replicas, last_stops, strict=True):
        ends = [
            max(stop, reductions[stage][-1][1] if reductions[stage] else 0.0)
            for stage, stop in enumerate(stops)
        ]
        for tie in pipeline.ties:
            together = max(ends[stage] for stage in tie.stages) + tie.seconds
            for stage in tie.stages:
                ends[stage] = together
        finished.append([max(end, totals) for end in ends])
    if replicas[0].ends_together:
        together = max(map(max, finished)) + replicas[0].totals_seconds
        finished = [[together] * len(ends) for ends in finished]
    return [
        StepEnd(
            ends, [end + s.ending_seconds for end, s in zip(ends, pipeline.stages, strict=True)], reductions
        )
        for pipeline, ends in zip(replicas, finished, strict=True)
    ]


def _reduce(
    replicas: Sequence[PipelineTimes], starts: Sequence[Sequence[float]], stops: Sequence[Sequence[float]]
) -> list[list[tuple[float, float]]]:
    """Return start and end of each reduction, by stage. A bucket is full when all replicas have filled it.

    `starts` and `stops` are of the last backward, by replica and stage.
    """
    stages = replicas[0].stages
    full = []
    for stage, times in enumerate(stages):
        for bucket, (_, seconds) in enumerate(times.buckets):
            when = max(
                start[stage] + pipeline.stages[stage].buckets[bucket][0] * (stop[stage] - start[stage])
                for pipeline, start, stop in zip(replicas, starts, stops, strict=True)
            )
            full.append((when, stage, bucket, seconds))
    reductions: list[list[tuple[float, float]]] = [[] for _ in stages]
    lanes = replicas[0].lanes or range(len(stages))
    free = dict.fromkeys(lanes, 0.0)
    for when, stage, _, seconds in sorted(full):
        begin = max(when, free[lanes[stage]])
        free[lanes[stage]] = begin + seconds
        reductions[stage].append((begin, begin + seconds))
    return reductions


def _as_list(values: Any) -> list[Any]:
    found: list[Any] = values if isinstance(values, list) else values.tolist()
    return found


def _validate_times(
    pipeline: PipelineTimes, seconds: list[float], spreads: list[float], links: list[float]
) -> None:
    """Raise a ValueError that names the first time that is negative, infinite or NaN."""
    ends = [number for stage in pipeline.stages for number in chain.from_iterable(stage.buckets)]
    ends += [stage.ending_seconds for stage in pipeline.stages]
    every = seconds + spreads + links + ends
    if min(every) >= 0.0 and math.isfinite(sum(every)):
        return
    named: dict[str, Iterable[float]] = {}
    for place, stage in enumerate(pipeline.stages):
        fields = stage._asdict() | {
            "buckets": chain.from_iterable(stage.buckets),
            "ending_seconds": [stage.ending_seconds],
        }
        named |= {f"stages[{place}].{field}": numbers for field, numbers in fields.items()}
    named |= {f"forward[{place}]": link for place, link in enumerate(pipeline.forward)}
    named |= {f"backward[{place}]": link for place, link in enumerate(pipeline.backward)}
    for key, numbers in named.items():
        for number in numbers:
            if not 0.0 <= number < math.inf:
                raise ValueError(f"{key} must hold finite numbers of zero or more, but holds {number}")
