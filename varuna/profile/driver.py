"""Driver of all measurements, shared by `Profiler` and pyrannc: the same results on all ranks.

The driver decides which rank measures which kinds of segments, carries errors of one rank to all of them,
and ends a sweep over micro-batch sizes when memory or time runs out. A `SweepPolicy` holds the differences.
"""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from varuna.capture import Captured, Source
from varuna.execute.comm.address import job_key
from varuna.execute.comm.collective import Collective
from varuna.execute.device.facts import available_bytes, ran_out_of_memory
from varuna.measure.draft import ProfileDraft
from varuna.measure.links import LINK_EFFORT
from varuna.measure.optimizer import MakeOptimizer, first_weights, measure_optimizer, merge_optimizer_costs
from varuna.measure.segments import merge_size_costs
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.profile.description import trained_shapes
from varuna.profile.draft_file import DraftFile
from varuna.profile.link_probe import measure_link_between
from varuna.profile.ranks import RankPlaces, on_all
from varuna.profile.report import ProfileReport
from varuna.profile.runnable import finish_in
from varuna.profile.timing import RankResult, SegmentBench, SizeBatch, held_at_once, shortened
from varuna.types import LinkCost, OptimizerCost, Overheads, SizeCost, spread_by_size

log = logging.getLogger("varuna.profile")


class SizeResult(NamedTuple):
    """Results of all ranks at one micro-batch size; the same on all ranks."""

    costs: dict[int, SizeCost]  # by kind
    overheads: Overheads | None
    left_out: dict[int, str]  # kinds that were not measured, and the reason
    elapsed: float  # seconds since the sweep began, on the slowest rank


class SweepPolicy(ABC):
    """Limits of a sweep over micro-batch sizes, and the use of its results."""

    all_or_nothing = False  # one kind that does not fit the memory rules out the micro-batch size

    def refuse_size(self, size: int, draft: ProfileDraft) -> str | None:
        """Return the reason not to try a size, or None."""
        return None

    def refuse_kind(self, kind: int, size: int, draft: ProfileDraft) -> str | None:
        """Return the reason not to run a kind alone, or None."""
        return None

    @abstractmethod
    def allows_chain(self, size: int) -> bool:
        """Return whether all kinds may run as one chain."""

    @abstractmethod
    def record(self, draft: ProfileDraft, size: int, result: SizeResult) -> tuple[ProfileDraft, str | None]:
        """Add a result to the draft; return the new draft, and the reason to end the sweep or None."""


@dataclass
class MeasurementDriver:
    """Measures one model on all ranks together. All ranks make the same calls in the same order."""

    ranks: Collective
    places: RankPlaces
    source: Source
    device: torch.device
    file: DraftFile
    report: ProfileReport

    def sweep(
        self,
        sizes: Sequence[int],
        batch: Callable[[int], SizeBatch],
        bench: SegmentBench,
        policy: SweepPolicy,
    ) -> None:
        """Measure all kinds of segments at these micro-batch sizes, until the policy ends the sweep."""
        started = time.monotonic()
        for size in sizes:
            with self.report.item(f"micro-batch size {size}"):
                gathered = on_all(
                    self.ranks,
                    lambda: (
                        self._measure_size(size, batch, bench, policy),  # noqa: B023 - called here
                        time.monotonic() - started,
                    ),
                    tuple[RankResult | None, float],
                )
                result = merge_results(gathered, all_or_nothing=policy.all_or_nothing)
                draft, end = policy.record(self.file.draft, size, result)
                self.file.add(draft, overheads=draft.overheads or result.overheads)
            if end is not None:
                self.report.say(end)
                break

    def _measure_size(
        self, size: int, batch: Callable[[int], SizeBatch], bench: SegmentBench, policy: SweepPolicy
    ) -> RankResult | None:
        """Measure the kinds of this rank."""
        draft = self.file.draft
        kinds = self.own_kinds([kind.parameter_bytes for kind in draft.subject.kinds])
        if not kinds:
            return None
        why = policy.refuse_size(size, draft)
        if why is not None:
            return RankResult({}, None, dict.fromkeys(kinds, why))
        with_overheads = draft.overheads is None
        inputs = batch(size)
        if policy.allows_chain(size):
            try:
                return bench.measure_chain(inputs, len(kinds), with_overheads=with_overheads)
            except Exception as error:
                if policy.all_or_nothing and not ran_out_of_memory(error):
                    raise
                why = shortened(error)
            # The error is released here, and with it the frames that hold the memory.
            bench.free()
            if policy.all_or_nothing:
                return RankResult({}, None, dict.fromkeys(kinds, why))
            log.info("micro-batch size %d: %s; each segment runs alone", size, why)
        return bench.measure_separately(
            inputs,
            kinds,
            with_overheads=with_overheads,
            refuse=lambda kind: policy.refuse_kind(kind, size, draft),
            all_or_nothing=policy.all_or_nothing,
        )

    def own_kinds(self, weights: Sequence[int]) -> list[int]:
        """Return the kinds that this rank measures, given the bytes of each kind.

        Ranks with devices of their own share the kinds. On CPU cores each rank measures all kinds: the
        time of a segment depends on what the other cores do to the shared caches and memory.
        """
        workers = self.places.workers()
        if self.ranks.rank not in workers:
            return []
        kinds = range(len(weights))
        if self.device.type == "cpu":
            return list(kinds)
        owners = spread_by_size(weights, parts=len(workers))
        return [kind for kind in kinds if workers[owners[kind]] == self.ranks.rank]

    def measure_link(
        self, pair: tuple[int, int], sizes: Sequence[int], *, host: str, effort: Effort = LINK_EFFORT
    ) -> LinkCost:
        """Measure messages of these bytes between two ranks."""
        found = on_all(
            self.ranks,
            lambda: measure_link_between(
                pair,
                self.ranks.rank,
                lambda own: self.ranks.gather(own, str),
                device=self.device,
                sizes=sizes,
                host=host,
                key=job_key("links"),
                effort=effort,
            ),
            LinkCost,
        )[pair[0]]
        assert found is not None, "the first rank of a pair returns the costs"
        return found

    def measure_optimizer(
        self,
        make: MakeOptimizer,
        captured: Captured,
        *,
        workers: Sequence[int],
        elements: int,
        effort: Effort,
        fallback: OptimizerCost | None = None,
    ) -> OptimizerCost:
        """Measure an optimizer on at most `elements` weights with the model's shapes.

        All `workers` measure at once, since they share memory when they train. With a `fallback`, an
        error is logged and the fallback returned.
        """
        many = first_weights(trained_shapes(self.source, captured), elements)
        few = first_weights(many, sum(shape.numel for shape in many) // 4)

        def measure() -> OptimizerCost | None:
            if self.ranks.rank not in workers:
                return None
            try:
                return measure_optimizer(
                    make,
                    few,
                    many,
                    device=self.device,
                    finish=finish_in(self.source.precision),
                    stopwatch=stopwatch_for(self.device),
                    effort=effort,
                )
            except Exception as error:
                if fallback is None:
                    raise
                log.info(
                    "the optimizer is assumed to cost as much as %s: %s", fallback.name, shortened(error)
                )
                return fallback

        costs = on_all(self.ranks, measure, OptimizerCost)
        return merge_optimizer_costs([cost for cost in costs if cost is not None])


def merge_results(gathered: Sequence[tuple[RankResult | None, float]], *, all_or_nothing: bool) -> SizeResult:
    """Merge the results of all ranks; `all_or_nothing`: a kind that one rank left out is left out."""
    results = [result for result, _ in gathered if result is not None]
    costs = {
        kind: merge_size_costs([result.costs[kind] for result in results if kind in result.costs])
        for kind in sorted({kind for result in results for kind in result.costs})
    }
    left_out = {kind: why for result in results for kind, why in result.left_out.items()}
    return SizeResult(
        costs,
        next((result.overheads for result in results if result.overheads), None),
        {kind: why for kind, why in sorted(left_out.items()) if all_or_nothing or kind not in costs},
        max(elapsed for _, elapsed in gathered),
    )


@dataclass(frozen=True)
class CompleteSizes(SweepPolicy):
    """Policy of `Profiler`: all kinds at each size; the first size that does not fit ends the sweep."""

    sizes: Sequence[int]
    device: torch.device
    ranks_on_machine: int
    all_or_nothing = True

    def refuse_size(self, size: int, draft: ProfileDraft) -> str | None:
        """Predict the memory from the largest measured size: with overcommit, too much kills the process."""
        known, available = draft.measured_sizes(), available_bytes(self.device)
        if available is None or not known:
            return None
        costs = [cost for kind in draft.sizes for cost in kind if cost.microbatch_size == known[-1]]
        working = max(cost.working_bytes + cost.split_bytes for cost in costs)
        held = held_at_once(len(draft.subject.segments), len(draft.sizes))
        activations = sum(cost.activation_bytes for cost in costs) * held
        needed = round((activations + working) * size / known[-1] * self.ranks_on_machine)
        if needed <= available:
            return None
        return f"out of memory (it needs about {needed >> 20} MiB, {available >> 20} MiB are available)"

    def allows_chain(self, size: int) -> bool:
        return self.device.type == "cpu"  # on other devices a chain may need more memory than any stage

    def record(self, draft: ProfileDraft, size: int, result: SizeResult) -> tuple[ProfileDraft, str | None]:
        about = f"micro-batch size {size}"
        if not result.left_out:
            return draft.without_note(about).with_sizes(result.costs), None
        why = next(iter(result.left_out.values()))
        draft = draft.with_note(about, why)
        larger = [other for other in self.sizes if other > size]
        for other in larger:
            draft = draft.with_note(f"micro-batch size {other}", f"not tried, because {size} was too large")
        more = f"; {', '.join(map(str, larger))} not tried" if larger else ""
        return draft, f"{about} is left out: {why}{more}"
