"""Times segments as a stage runs them: one after the other forward, and back again.

A segment that runs again and again by itself finds its weights and its activations in the caches, and
memory where it left it; within a stage it finds neither. So the kinds of segments of a model run
as a chain, each given what the one before it has just made:

    F F F … B B B        whole backwards
    F F F … I I I W W W  backwards in two parts
    f f f …              forwards that keep nothing

Between their forward and their backward several micro-batches are held, as a stage of a pipeline does: the
oldest goes back when a new one has come. Where a chain of all kinds would not fit the device, each is
a chain by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from varuna.measure.memory import Bytes, Meter, count_bytes
from varuna.measure.stopwatch import Effort, Stopwatch, duration, typical
from varuna.types import Duration, SizeCost

PARTS = ("forward", "backward", "backward_inputs", "backward_weights", "forward_only")

HEAD_START = 2.5
"""Times what the host needs to queue a round: it has queued two before the device begins."""


class Piece(Protocol):
    """One segment at one micro-batch size, run by the very hands that train. First come, first back."""

    @property
    def relayed(self) -> Sequence[bool]: ...  # of what it is given: whether it is only handed through
    @property
    def wanted(self) -> Sequence[bool]: ...  # of what it makes: whether a gradient comes back
    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]: ...
    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_weights(self) -> None: ...
    def forget(self) -> None: ...  # lets go of forwards that will have no backward
    @property
    def enter(self) -> Callable[[], object] | None: ...  # makes again what a stage that begins here must


@dataclass(frozen=True)
class Link:
    """A piece in a chain, and where its tensors come from: a place in the chain, or once and for all."""

    piece: Piece
    before: int | None = None
    given: Sequence[Tensor] = ()


@dataclass
class Samples:
    """Seconds of single runs, by part."""

    runs_behind: bool = False  # the device behind its host
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    host: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})

    def cost(self, part: str, nothing: Samples, entry_seconds: float, quantile: float) -> Duration:
        """Without what the call of a segment takes that does nothing, for that is the engine's, once for each
        instruction; nor with what only some stages do.

        A device that runs behind its host takes what its work takes, and none of it is the call's; or what
        the host needs at its best to queue it, where that is longer.
        """
        less = entry_seconds if part.startswith("forward") else 0.0
        if not self.runs_behind:
            less += typical(nothing.seconds[part], quantile)
            return duration(self.seconds[part], less=less, quantile=quantile)
        queueing = min(self.host[part]) - min(nothing.host[part])
        return duration([max(own, queueing) for own in self.seconds[part]], less=less, quantile=quantile)

    def call_seconds(self, quantile: float) -> float:
        """Of segments that do nothing: the mean of a forward and a backward."""
        taken = self.host if self.runs_behind else self.seconds
        return sum(typical(taken[part], quantile) for part in ("forward", "backward")) / 2

    def halve_backwards(self) -> None:
        """Where they were not run in two parts: each is taken to be half."""
        for taken in (self.seconds, self.host):
            for part in ("backward_inputs", "backward_weights"):
                taken[part] = [seconds / 2 for seconds in taken["backward"]]


class Measured(NamedTuple):
    costs: list[SizeCost]
    call_seconds: float  # of a segment that does nothing: the mean of a forward and a backward


def measure_chain(
    chain: Sequence[Link],
    *,
    nothing: Callable[[], Link],
    held: int,
    microbatch_size: int,
    stopwatch: Stopwatch,
    meter: Callable[[], Meter],
    effort: Effort,
    in_two_parts: bool = True,
) -> Measured:
    """The cost of each link's segment, in the order of the chain.

    `nothing` makes a segment that does nothing. After each of the others there is one: calling it takes
    longer than it would by itself, because caches hold other things by then, as they do in training.
    `held` micro-batches are under way at once. `in_two_parts`: whether backwards are measured so too.
    """
    rounds: tuple[Round, ...] = (_whole_round, _light_round)
    if in_two_parts:
        rounds = (_whole_round, _split_round, _light_round)
    for run in rounds:  # the first run of all finds nothing ready, and leaves gradients behind
        run(chain, stopwatch)
    num_bytes = _count(chain, meter)
    mixed = _mixed(chain, nothing)
    samples = [Samples(stopwatch.runs_behind) for _ in chain]
    calls = Samples(stopwatch.runs_behind)
    found = [sample for own in samples for sample in (own, calls)]
    for run in rounds:
        _repeat(run, mixed, found, stopwatch, effort, held=1 if run is _light_round else held)
    if not in_two_parts:
        for sample in (*samples, calls):
            sample.halve_backwards()
    costs = []
    for link, sample, counted in zip(chain, samples, num_bytes, strict=True):
        entry = _entry_seconds(link.piece, stopwatch, effort)
        costs.append(
            SizeCost(
                microbatch_size=microbatch_size,
                activation_bytes=counted.activation,
                working_bytes=counted.working,
                split_bytes=counted.split,
                entry_seconds=entry,
                **{part: sample.cost(part, calls, entry, effort.quantile) for part in PARTS},
            )
        )
    return Measured(costs, calls.call_seconds(effort.quantile))


def measure_calls(nothing: Link, *, stopwatch: Stopwatch, effort: Effort) -> float:
    """The same as `Measured.call_seconds`, where nothing else runs in between."""
    calls = Samples(stopwatch.runs_behind)
    _repeat(_whole_round, [nothing], [calls], stopwatch, effort, held=1)
    return calls.call_seconds(effort.quantile)


def run_once(chain: Sequence[Link], stopwatch: Stopwatch) -> None:
    """Forwards and backwards."""
    _whole_round(chain, stopwatch)


def _mixed(chain: Sequence[Link], nothing: Callable[[], Link]) -> list[Link]:
    found: list[Link] = []
    for link in chain:
        before = None if link.before is None else 2 * link.before
        found += [Link(link.piece, before, link.given), nothing()]
    return found


def _count(chain: Sequence[Link], meter: Callable[[], Meter]) -> list[Bytes]:
    """The bytes of each piece, alone with what it is given."""
    made: list[list[Tensor]] = []
    found = []
    for link in chain:
        given = _given(link, made)
        made.append(link.piece.forward(given, keep_graph=False))
        link.piece.forget()
        gradients = _some_gradients(link.piece, made[-1])
        found.append(count_bytes(link.piece, given, gradients, link.piece.relayed, meter()))
    return found


def merge(costs: Sequence[SizeCost]) -> SizeCost:
    """One segment as several ranks have found it, each on a device of its own."""

    def middle(part: str) -> Duration:
        found: list[Duration] = [getattr(cost, part) for cost in costs]
        return Duration(median(d.seconds for d in found), median(d.spread for d in found))

    return SizeCost(
        microbatch_size=costs[0].microbatch_size,
        activation_bytes=max(cost.activation_bytes for cost in costs),
        working_bytes=max(cost.working_bytes for cost in costs),
        split_bytes=max(cost.split_bytes for cost in costs),
        entry_seconds=median(cost.entry_seconds for cost in costs),
        **{part: middle(part) for part in PARTS},
    )


Marks = list[tuple[int, str, Any, Any]]  # place in the chain, part, start, stop
Round = Callable[[Sequence[Link], Stopwatch], Marks]


def _repeat(
    run: Round,
    chain: Sequence[Link],
    samples: Sequence[Samples],
    stopwatch: Stopwatch,
    effort: Effort,
    *,
    held: int,
) -> None:
    for _ in range(held - 1):
        _forwards(chain, stopwatch, keep_graph=True)
    started = stopwatch.mark()
    for _ in range(effort.warmups):
        run(chain, stopwatch)
    stopped = stopwatch.mark()
    stopwatch.settle()
    warmups = max(effort.warmups, 1)
    head_start = HEAD_START * stopwatch.host_seconds(started, stopped) / warmups
    for _ in range(effort.runs(stopwatch.seconds(started, stopped) / warmups)):
        if stopwatch.head_start(head_start):
            run(chain, stopwatch)  # the host too is slow at first, when it has waited
        marks = run(chain, stopwatch)
        stopwatch.settle()
        for place, part, start, stop in marks:
            samples[place].seconds[part].append(stopwatch.seconds(start, stop))
            samples[place].host[part].append(stopwatch.host_seconds(start, stop))
    for link in chain:
        link.piece.forget()


def _whole_round(chain: Sequence[Link], stopwatch: Stopwatch) -> Marks:
    marks, made = _forwards(chain, stopwatch, keep_graph=True)
    return marks + _backwards(chain, made, stopwatch, "backward", lambda piece: piece.backward)


def _split_round(chain: Sequence[Link], stopwatch: Stopwatch) -> Marks:
    _, made = _forwards(chain, stopwatch, keep_graph=True)
    marks = _backwards(chain, made, stopwatch, "backward_inputs", lambda piece: piece.backward_inputs)
    for place, link in reversed(list(enumerate(chain))):
        start = stopwatch.mark()
        link.piece.backward_weights()
        marks.append((place, "backward_weights", start, stopwatch.mark()))
    return marks


def _light_round(chain: Sequence[Link], stopwatch: Stopwatch) -> Marks:
    marks, _ = _forwards(chain, stopwatch, keep_graph=False)
    for link in chain:
        link.piece.forget()
    return marks


def _forwards(
    chain: Sequence[Link], stopwatch: Stopwatch, *, keep_graph: bool
) -> tuple[Marks, list[list[Tensor]]]:
    marks: Marks = []
    made: list[list[Tensor]] = []
    for place, link in enumerate(chain):
        given = _given(link, made)
        start = stopwatch.mark()
        outputs = link.piece.forward(given, keep_graph=keep_graph)
        marks.append((place, "forward" if keep_graph else "forward_only", start, stopwatch.mark()))
        made.append(outputs)
    return marks, made


def _backwards(
    chain: Sequence[Link],
    made: list[list[Tensor]],
    stopwatch: Stopwatch,
    part: str,
    choose: Callable[[Piece], Callable[[Sequence[Tensor]], list[Tensor]]],
) -> Marks:
    marks: Marks = []
    returned: dict[int, list[Tensor]] = {}  # by the place for which they are
    for place, link in reversed(list(enumerate(chain))):
        gradients = returned.pop(place, None)
        if gradients is None:
            gradients = _some_gradients(link.piece, made[place])
        run = choose(link.piece)
        start = stopwatch.mark()
        found = run(gradients)
        marks.append((place, part, start, stopwatch.mark()))
        if link.before is not None:
            returned[link.before] = found
    return marks


def _given(link: Link, made: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Tensors of its own: several may be given the same, and each gets a gradient for it."""
    source = link.given if link.before is None else made[link.before]
    return [tensor.detach() for tensor in source]


def _some_gradients(piece: Piece, outputs: Sequence[Tensor]) -> list[Tensor]:
    """As small as gradients are, and nowhere zero: some processors are slow, some fast on odd numbers."""
    return [
        torch.full_like(output, 1e-3) for output, wanted in zip(outputs, piece.wanted, strict=True) if wanted
    ]


def _entry_seconds(piece: Piece, stopwatch: Stopwatch, effort: Effort) -> float:
    enter = piece.enter
    if enter is None:
        return 0.0
    samples = []
    for run in range(effort.warmups + effort.fewest):
        start = stopwatch.mark()
        enter()
        stop = stopwatch.mark()
        stopwatch.settle()
        if run >= effort.warmups:
            samples.append(stopwatch.seconds(start, stop))
    return duration(samples, quantile=effort.quantile).seconds
