"""Measurement of all kinds of segments at one micro-batch size, on one device.

All kinds run as one chain if they fit: a segment then finds the caches as in training. Otherwise each kind
runs separately.
"""

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
from varuna.measure.segments import LinkedSegment, measure_calls, measure_chain, run_once
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.profile.runnable import SegmentFactory, empty_link, empty_step
from varuna.types import Overheads, SizeCost, TensorSpec

CALL_EFFORT = Effort(seconds=0.05, fewest=50, most=500)
MOST_HELD = 4


class RankResult(NamedTuple):
    """Results of one rank at one micro-batch size."""

    costs: dict[int, SizeCost]  # by kind
    overheads: Overheads | None
    left_out: dict[int, str]  # kinds that were not measured, and the reason


class SizeBatch(NamedTuple):
    """A batch of one micro-batch size, and the model captured for it."""

    size: int
    captured: Captured
    inputs: Mapping[str, object]


@dataclass
class SegmentBench:
    """Measures segments on one device, always with the same effort."""

    factory: SegmentFactory
    device: torch.device
    effort: Effort
    in_two_parts: bool = True  # backwards are measured in two parts, too

    def measure_chain(self, batch: SizeBatch, num_kinds: int, *, with_overheads: bool) -> RankResult:
        """Measure all kinds as a chain: each gets the outputs of the one before it."""
        held = held_at_once(batch.captured.num_segments, num_kinds)
        chain = [
            LinkedSegment(self.factory.make(kind, batch.captured, batch.inputs), self.factory.before(kind))
            for kind in range(num_kinds)
        ]
        costs, overheads = self._measure(chain, batch.size, held=held, with_overheads=with_overheads)
        return RankResult(dict(enumerate(costs)), overheads, {})

    def measure_separately(
        self,
        batch: SizeBatch,
        kinds: Sequence[int],
        *,
        with_overheads: bool,
        refuse: Callable[[int], str | None],
        all_or_nothing: bool,
    ) -> RankResult:
        """Measure each of these kinds alone, unless `refuse` returns a reason not to.

        A kind that fails is left out. With `all_or_nothing` the first kind that does not fit the memory
        ends the measurement, and other errors are raised.
        """
        by_kind: dict[int, SizeCost] = {}
        left_out: dict[int, str] = {}
        made: dict[int, list[Tensor]] = {}
        overheads = None
        for kind in range(max(kinds) + 1):
            why = refuse(kind)
            if why is None:
                try:
                    segment = self.factory.make(kind, batch.captured, batch.inputs)
                    before = self.factory.before(kind)
                    given = [] if before is None else made[before]
                    if kind in kinds:
                        link = LinkedSegment(segment, given=given)
                        wants = with_overheads and overheads is None
                        (by_kind[kind],), found = self._measure(
                            [link], batch.size, held=1, with_overheads=wants
                        )
                        overheads = overheads or found
                    made[kind] = segment.forward([tensor.detach() for tensor in given], keep_graph=False)
                    segment.forget()
                except Exception as error:
                    if all_or_nothing and not ran_out_of_memory(error):
                        raise
                    why = shortened(error)
            # The error is released here, and with it the frames that hold the memory.
            if why is not None:
                left_out[kind] = why
                made[kind] = random_tensors(self.factory.sent(kind, batch.captured), batch.size, self.device)
            self.free()
            if why is not None and all_or_nothing:
                return RankResult({}, None, dict.fromkeys(kinds, why))
        return RankResult(by_kind, overheads, left_out)

    def free(self) -> None:
        """Free weights, gradients and cached device memory."""
        self.factory.drop_all()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _measure(
        self, chain: Sequence[LinkedSegment], size: int, *, held: int, with_overheads: bool
    ) -> tuple[list[SizeCost], Overheads | None]:
        stopwatch = stopwatch_for(self.device)
        measured = measure_chain(
            chain,
            make_empty=lambda: empty_link(self.device),
            held=held,
            microbatch_size=size,
            stopwatch=stopwatch,
            make_meter=lambda: meter_for(self.device),
            effort=self.effort,
            in_two_parts=self.in_two_parts,
        )
        if not with_overheads:
            return measured.costs, None
        return measured.costs, measure_overheads(
            empty_step(self.device, MANY),
            compute=lambda: run_once(chain, stopwatch),
            slow_call_seconds=measured.call_seconds,
            fast_call_seconds=measure_calls(
                empty_link(self.device),
                stopwatch=stopwatch,
                effort=msgspec.structs.replace(CALL_EFFORT, quantile=self.effort.quantile),
            ),
            stopwatch=stopwatch,
            quantile=self.effort.quantile,
        )


def held_at_once(segments: int, kinds: int) -> int:
    # In training, a first stage holds about one micro-batch for each segment of the model.
    return max(1, min(MOST_HELD, round(segments / kinds)))


def shortened(error: BaseException) -> str:
    """Return the first line of an error."""
    first = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return f"out of memory ({first})" if ran_out_of_memory(error) else first


def random_tensors(specs: Sequence[TensorSpec], size: int, device: torch.device) -> list[Tensor]:
    """Return tensors like the outputs of a segment that did not run."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = []
    for spec in specs:
        dtype: torch.dtype = getattr(torch, spec.dtype)
        shape = [1 if dim is None else dim.size(size) for dim in spec.dims]
        if dtype.is_floating_point:
            tensors.append(torch.randn(shape, dtype=dtype, device=device, generator=generator))
        else:
            tensors.append(torch.zeros(shape, dtype=dtype, device=device))
    return tensors
