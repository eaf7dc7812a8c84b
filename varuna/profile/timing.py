"""Runs the kinds of a model's segments at one micro-batch size, and tells what each of them costs.

As a chain of all of them, where there is room for it: a segment then finds the caches as it will in
training. Or one at a time, where a chain could need more memory than any stage.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from varuna.capture import Captured
from varuna.execute.device.facts import ran_out_of_memory
from varuna.measure.memory import meter_for
from varuna.measure.overheads import MANY, measure_overheads
from varuna.measure.segments import Link, measure_calls, measure_chain, merge, run_once
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.profile.ranks import Places
from varuna.profile.runnable import Parts, part_that_does_nothing, step_that_does_nothing
from varuna.types import Overheads, SizeCost, TensorSpec, spread_by_size

CALL_EFFORT = Effort(seconds=0.05, fewest=50, most=500)
MOST_HELD = 4
SEED = 0

Refuse = Callable[[int], str | None]
"""Why a kind of segment is not run: there is no room for it, or no time."""


class AtSize(NamedTuple):
    """What a rank has found at one micro-batch size."""

    costs: dict[int, SizeCost]  # by kind
    overheads: Overheads | None
    left_out: dict[int, str]  # kinds, and why


@dataclass
class Bench:
    """Measures on one device, always with the same care."""

    parts: Parts
    device: torch.device
    effort: Effort
    in_two_parts: bool = True  # whether backwards are measured so too

    def as_chain(
        self,
        size: int,
        captured: Captured,
        inputs: Mapping[str, object],
        *,
        num_kinds: int,
        with_overheads: bool,
    ) -> AtSize:
        """All kinds, each given what the one before it has made."""
        held = held_at_once(captured.num_segments, num_kinds)
        chain = [
            Link(self.parts.make(kind, captured, inputs), self.parts.before(kind))
            for kind in range(num_kinds)
        ]
        costs, overheads = self._measure(chain, size, held=held, with_overheads=with_overheads)
        return AtSize(dict(enumerate(costs)), overheads, {})

    def one_by_one(
        self,
        size: int,
        captured: Captured,
        inputs: Mapping[str, object],
        *,
        kinds: Sequence[int],
        with_overheads: bool,
        refuse: Refuse | None = None,
    ) -> AtSize:
        """These kinds, each by itself. What fails raises, or is left out where there is a `refuse`."""
        by_kind: dict[int, SizeCost] = {}
        left_out: dict[int, str] = {}
        made: dict[int, list[Tensor]] = {}
        overheads = None
        for kind in range(max(kinds) + 1):
            why = None if refuse is None else refuse(kind)
            if why is None:
                try:
                    part = self.parts.make(kind, captured, inputs)
                    before = self.parts.before(kind)
                    given = [] if before is None else made[before]
                    if kind in kinds:
                        chain, more = [Link(part, given=given)], with_overheads and overheads is None
                        (by_kind[kind],), found = self._measure(chain, size, held=1, with_overheads=more)
                        overheads = overheads or found
                    made[kind] = part.forward([tensor.detach() for tensor in given], keep_graph=False)
                    part.forget()
                except Exception as error:
                    if refuse is None:
                        raise
                    why = in_short(error)
            # From here on an error is gone, and with it the frames that held what it failed on.
            if why is not None:
                if kind in kinds:
                    left_out[kind] = why
                made[kind] = stand_ins(captured.carve(*self.parts.span(kind)).sent, size, self.device)
            self.let_go()
        return AtSize(by_kind, overheads, left_out)

    def let_go(self) -> None:
        """Of weights and gradients, and of what was found too large for the device."""
        self.parts.drop_all()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(
        self, chain: Sequence[Link], size: int, *, held: int, with_overheads: bool
    ) -> tuple[list[SizeCost], Overheads | None]:
        stopwatch = stopwatch_for(self.device)
        found = measure_chain(
            chain,
            nothing=lambda: part_that_does_nothing(self.device),
            held=held,
            microbatch_size=size,
            stopwatch=stopwatch,
            meter=lambda: meter_for(self.device),
            effort=self.effort,
            in_two_parts=self.in_two_parts,
        )
        if not with_overheads:
            return found.costs, None
        return found.costs, measure_overheads(
            step_that_does_nothing(self.device, MANY),
            compute=lambda: run_once(chain, stopwatch),
            slow_call_seconds=found.call_seconds,
            fast_call_seconds=measure_calls(
                part_that_does_nothing(self.device),
                stopwatch=stopwatch,
                effort=msgspec.structs.replace(CALL_EFFORT, quantile=self.effort.quantile),
            ),
            stopwatch=stopwatch,
            quantile=self.effort.quantile,
        )


def own_kinds(rank: int, places: Places, weights: Sequence[int], device: torch.device) -> list[int]:
    """On devices of their own, ranks share the kinds out; on the cores of a processor each takes all.

    For there a segment's time depends on what the other cores do to the caches and the memory that all
    of them use, as they will when they train.
    """
    workers = places.workers()
    if rank not in workers:
        return []
    kinds = range(len(weights))
    if device.type == "cpu":
        return list(kinds)
    owners = spread_by_size(weights, parts=len(workers))
    return [kind for kind in kinds if workers[owners[kind]] == rank]


def held_at_once(segments: int, kinds: int) -> int:
    """So many micro-batches that as much is held as in training: there, whatever the depth, about one
    for each segment of the model by the first stage."""
    return max(1, min(MOST_HELD, round(segments / kinds)))


def merged(found: Sequence[AtSize]) -> dict[int, SizeCost]:
    """What several ranks have found, by kind."""
    kinds = sorted({kind for one in found for kind in one.costs})
    return {kind: merge([one.costs[kind] for one in found if kind in one.costs]) for kind in kinds}


def in_short(error: BaseException) -> str:
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"out of memory ({first})" if ran_out_of_memory(error) else first


def stand_ins(specs: Sequence[TensorSpec], size: int, device: torch.device) -> list[Tensor]:
    """Tensors in place of those that a segment would have made, had it run."""
    generator = torch.Generator(device).manual_seed(SEED)
    found = []
    for spec in specs:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        shape = [1 if dim is None else dim.size(size) for dim in spec.dims]
        if dtype.is_floating_point:
            found.append(torch.randn(shape, dtype=dtype, device=device, generator=generator))
        else:
            found.append(torch.zeros(shape, dtype=dtype, device=device))
    return found
