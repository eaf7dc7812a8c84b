"""Timing of segments in the order in which a stage runs them: forwards in sequence, then backwards.

A segment that runs alone, again and again, finds its data in the caches; inside a stage it does not. So the
kinds of segments of a model run as a chain. Each gets what the one before it has just made:

    F F F ... B B B        whole backwards
    F F F ... I I I W W W  backwards in two parts
    f f f ...              forwards that keep nothing

As in a pipeline, several micro-batches are held between their forward and their backward: when a new one
has run forward, the oldest runs backward. If a chain of all kinds does not fit the device, each kind is a
chain of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from varuna.measure.memory import Meter, RunnableSegment, SegmentBytes, count_bytes
from varuna.measure.stopwatch import Effort, Stopwatch, typical, typical_duration
from varuna.types import Duration, SizeCost

PARTS = ("forward", "backward", "backward_inputs", "backward_weights", "forward_only")
HEAD_START = 2.5
"""Head start of the host, as a multiple of the time to queue one round: two rounds are queued in advance."""


class TimedSegment(RunnableSegment, Protocol):
    """A segment that can be measured."""

    @property
    def relayed(self) -> Sequence[bool]: ...  # for each input: the segment only passes it on
    @property
    def wanted(self) -> Sequence[bool]: ...  # for each output: it gets a gradient
    def forget(self) -> None: ...  # drops forwards that will have no backward
    @property
    def enter(self) -> Callable[[], object] | None: ...  # recomputes what a stage that begins here needs


@dataclass(frozen=True)
class LinkedSegment:
    """A segment in a chain, and its inputs: the outputs of the link at `before`, or the tensors `given`."""

    segment: TimedSegment
    before: int | None = None
    given: Sequence[Tensor] = ()


@dataclass
class SegmentSamples:
    """Seconds of single runs, by part."""

    is_async: bool = False  # the device works behind its host
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    host: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def cost(self, part: str, empty: "SegmentSamples", entry_seconds: float, quantile: float) -> Duration:
        """Return the time of a part without the call overhead, which counts as overhead of the engine.

        The overhead is the time of an empty segment. `entry_seconds` is left out as well: only stages
        that begin with this segment pay it. An asynchronous device takes the time of its work, or the
        shortest time in which the host can queue the work if that is longer.
        """
        less = entry_seconds if part.startswith("forward") else 0.0
        if not self.is_async:
            less += typical(empty.seconds[part], quantile)
            return typical_duration(self.seconds[part], less=less, quantile=quantile)
        queueing = min(self.host[part]) - min(empty.host[part])
        slower = [max(own, queueing) for own in self.seconds[part]]
        return typical_duration(slower, less=less, quantile=quantile)

    def call_seconds(self, quantile: float) -> float:
        """Return the time to call an empty segment: the mean of a forward and a backward."""
        taken = self.host if self.is_async else self.seconds
        return sum(typical(taken[part], quantile) for part in ("forward", "backward")) / 2

    def halve_backwards(self) -> None:
        """Take half of each backward as the time of each of its two parts."""
        for taken in (self.seconds, self.host):
            for part in ("backward_inputs", "backward_weights"):
                taken[part] = [seconds / 2 for seconds in taken["backward"]]


class ChainCosts(NamedTuple):
    """Costs of a chain's segments, in the order of the chain."""

    costs: list[SizeCost]
    call_seconds: float  # to call an empty segment between them: the mean of a forward and a backward


def measure_chain(
    chain: Sequence[LinkedSegment],
    *,
    make_empty: Callable[[], LinkedSegment],
    held: int,
    microbatch_size: int,
    stopwatch: Stopwatch,
    make_meter: Callable[[], Meter],
    effort: Effort,
    in_two_parts: bool = True,
) -> ChainCosts:
    """Measure the segments of a chain while `held` micro-batches are in flight.

    An empty segment, from `make_empty`, follows each segment. To call it takes longer there than alone,
    because the caches hold other data, as in training. With `in_two_parts=False` the two parts of a
    backward are not measured but taken as half of it.
    """
    rounds = (_whole_round, *([_split_round] if in_two_parts else []), _forward_only_round)
    for run in rounds:  # the very first run is slow, and creates the gradients
        run(chain, stopwatch)
    counted_bytes = _count_chain(chain, make_meter)
    mixed: list[LinkedSegment] = []
    for link in chain:
        before = None if link.before is None else 2 * link.before
        mixed += [LinkedSegment(link.segment, before, link.given), make_empty()]
    samples = [SegmentSamples(stopwatch.is_async) for _ in chain]
    empty = SegmentSamples(stopwatch.is_async)
    by_place = [sample for own in samples for sample in (own, empty)]
    for run in rounds:
        _repeat(run, mixed, by_place, stopwatch, effort, held=1 if run is _forward_only_round else held)
    if not in_two_parts:
        for sample in (*samples, empty):
            sample.halve_backwards()
    costs = []
    for link, sample, counted in zip(chain, samples, counted_bytes, strict=True):
        entry = _entry_seconds(link.segment, stopwatch, effort)
        costs.append(
            SizeCost(
                microbatch_size=microbatch_size,
                activation_bytes=counted.activation,
                working_bytes=counted.working,
                split_bytes=counted.split,
                entry_seconds=entry,
                **{part: sample.cost(part, empty, entry, effort.quantile) for part in PARTS},
            )
        )
    return ChainCosts(costs, empty.call_seconds(effort.quantile))


def measure_calls(empty: LinkedSegment, *, stopwatch: Stopwatch, effort: Effort) -> float:
    """Return the time to call an empty segment when nothing else runs in between."""
    samples = SegmentSamples(stopwatch.is_async)
    _repeat(_whole_round, [empty], [samples], stopwatch, effort, held=1)
    return samples.call_seconds(effort.quantile)


def run_once(chain: Sequence[LinkedSegment], stopwatch: Stopwatch) -> None:
    """Run all forwards and all backwards of a chain."""
    _whole_round(chain, stopwatch)


def merge_size_costs(costs: Sequence[SizeCost]) -> SizeCost:
    """Merge what several ranks measured of one segment: median times, largest bytes."""

    def middle(part: str) -> Duration:
        durations: list[Duration] = [getattr(cost, part) for cost in costs]
        return Duration(median(d.seconds for d in durations), median(d.spread for d in durations))

    return SizeCost(
        microbatch_size=costs[0].microbatch_size,
        activation_bytes=max(cost.activation_bytes for cost in costs),
        working_bytes=max(cost.working_bytes for cost in costs),
        split_bytes=max(cost.split_bytes for cost in costs),
        entry_seconds=median(cost.entry_seconds for cost in costs),
        **{part: middle(part) for part in PARTS},
    )


def _count_chain(chain: Sequence[LinkedSegment], make_meter: Callable[[], Meter]) -> list[SegmentBytes]:
    """Count the bytes of each segment, run alone with its inputs."""
    made: list[list[Tensor]] = []
    counted = []
    for link in chain:
        given = _inputs(link, made)
        made.append(link.segment.forward(given, keep_graph=False))
        link.segment.forget()
        gradients = _some_gradients(link.segment, made[-1])
        counted.append(count_bytes(link.segment, given, gradients, link.segment.relayed, make_meter()))
    return counted


Marks = list[tuple[int, str, Any, Any]]  # place in the chain, part, start, stop
Round = Callable[[Sequence[LinkedSegment], Stopwatch], Marks]


def _repeat(
    run: Round,
    chain: Sequence[LinkedSegment],
    samples: Sequence[SegmentSamples],
    stopwatch: Stopwatch,
    effort: Effort,
    *,
    held: int,
) -> None:
    for _ in range(held - 1):
        _run_forwards(chain, stopwatch, keep_graph=True)
    started = stopwatch.mark()
    for _ in range(effort.warmups):
        run(chain, stopwatch)
    stopped = stopwatch.mark()
    stopwatch.synchronize()
    warmups = max(effort.warmups, 1)
    head_start = HEAD_START * stopwatch.host_seconds(started, stopped) / warmups
    for _ in range(effort.runs(stopwatch.seconds(started, stopped) / warmups)):
        if stopwatch.head_start(head_start):
            run(chain, stopwatch)  # the host is slow at first, too, after it has waited
        marks = run(chain, stopwatch)
        stopwatch.synchronize()
        for place, part, start, stop in marks:
            samples[place].seconds[part].append(stopwatch.seconds(start, stop))
            samples[place].host[part].append(stopwatch.host_seconds(start, stop))
    for link in chain:
        link.segment.forget()


def _whole_round(chain: Sequence[LinkedSegment], stopwatch: Stopwatch) -> Marks:
    marks, made = _run_forwards(chain, stopwatch, keep_graph=True)
    return marks + _run_backwards(chain, made, stopwatch, "backward")


def _split_round(chain: Sequence[LinkedSegment], stopwatch: Stopwatch) -> Marks:
    _, made = _run_forwards(chain, stopwatch, keep_graph=True)
    marks = _run_backwards(chain, made, stopwatch, "backward_inputs")
    for place, link in reversed(list(enumerate(chain))):
        start = stopwatch.mark()
        link.segment.backward_weights()
        marks.append((place, "backward_weights", start, stopwatch.mark()))
    return marks


def _forward_only_round(chain: Sequence[LinkedSegment], stopwatch: Stopwatch) -> Marks:
    marks, _ = _run_forwards(chain, stopwatch, keep_graph=False)
    for link in chain:
        link.segment.forget()
    return marks


def _run_forwards(
    chain: Sequence[LinkedSegment], stopwatch: Stopwatch, *, keep_graph: bool
) -> tuple[Marks, list[list[Tensor]]]:
    marks: Marks = []
    made: list[list[Tensor]] = []
    for place, link in enumerate(chain):
        given = _inputs(link, made)
        start = stopwatch.mark()
        outputs = link.segment.forward(given, keep_graph=keep_graph)
        marks.append((place, "forward" if keep_graph else "forward_only", start, stopwatch.mark()))
        made.append(outputs)
    return marks, made


def _run_backwards(
    chain: Sequence[LinkedSegment], made: list[list[Tensor]], stopwatch: Stopwatch, part: str
) -> Marks:
    """Run `part`, which is "backward" or "backward_inputs", of each segment in reverse order."""
    marks: Marks = []
    returned: dict[int, list[Tensor]] = {}  # gradients, by the place that they are for
    for place, link in reversed(list(enumerate(chain))):
        gradients = returned.pop(place, None)
        if gradients is None:
            gradients = _some_gradients(link.segment, made[place])
        run = link.segment.backward if part == "backward" else link.segment.backward_inputs
        start = stopwatch.mark()
        input_gradients = run(gradients)
        marks.append((place, part, start, stopwatch.mark()))
        if link.before is not None:
            returned[link.before] = input_gradients
    return marks


def _inputs(link: LinkedSegment, made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return new tensors: several links may get the same data, and each makes its own gradient."""
    return [tensor.detach() for tensor in (link.given if link.before is None else made[link.before])]


def _some_gradients(segment: TimedSegment, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients of a usual size without zeros: some processors treat zeros specially."""
    pairs = zip(outputs, segment.wanted, strict=True)
    return [torch.full_like(output, 1e-3) for output, wanted in pairs if wanted]


def _entry_seconds(segment: TimedSegment, stopwatch: Stopwatch, effort: Effort) -> float:
    if segment.enter is None:
        return 0.0
    samples = []
    for run in range(effort.warmups + effort.fewest):
        start = stopwatch.mark()
        segment.enter()
        stop = stopwatch.mark()
        stopwatch.synchronize()
        if run >= effort.warmups:
            samples.append(stopwatch.seconds(start, stop))
    return typical_duration(samples, quantile=effort.quantile).seconds
