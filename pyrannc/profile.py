"""Times a model's segments on the ranks that will train it, before its layout is chosen.

Each kind of segment runs a few times, with real samples, on copies of its weights: the model, its buffers
and gradients, and the random generators of the script stay as they are. What finds no room or no time is
estimated by the speed that the others were found to have, and the profile says so.
"""

import logging
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from varuna.capture import Captured, Source
from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.session import Session
from varuna.execute.device.facts import available_bytes
from varuna.measure.draft import Draft, Subject, new_draft
from varuna.measure.optimizer import measure_optimizer
from varuna.measure.reductions import measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.plan.cost.calibrate import resized, speed_of
from varuna.plan.cost.estimate import estimate
from varuna.plan.tables import spans
from varuna.profile.estimate import ADAM, OVERHEADS, Speed, assumed_link, assumed_reductions
from varuna.profile.link_probe import measure_link_between
from varuna.profile.profiler import first_of
from varuna.profile.ranks import Place, Places
from varuna.profile.runnable import Parts, finish_in, trained_forms
from varuna.profile.timing import AtSize, Bench, held_at_once, in_short, merged, own_kinds
from varuna.types import LinkCost, OptimizerCost, Profile, ReduceCost, Segment, SizeCost
from varuna.units import count, duration

log = logging.getLogger("pyrannc.measure")

RUNS = 14
"""Of a segment, about, forward and backward, until its cost is known."""
SAMPLE_BYTES = 64 << 20
"""Of the samples that one rank gives to all; more are made by taking these again."""
LINK_EFFORT = Effort(seconds=0.02, fewest=3, most=20, warmups=1)
LINK_BYTES = (1 << 12, 1 << 18, 1 << 22)
OPTIMIZER_EFFORT = Effort(seconds=0.1, fewest=3, most=10, warmups=1)
OPTIMIZER_ELEMENTS = 1 << 22


class Wish(NamedTuple):
    """What rank 0 asks all ranks to measure."""

    microbatch_sizes: tuple[int, ...]  # ascending
    seconds: float  # when they are over, nothing is begun any more
    iterations: int  # of each segment at least
    speed: Speed  # as it is thought to be
    within: tuple[float, float]  # latency and bytes per second, where no link is measured
    between: tuple[float, float]

    @property
    def effort(self) -> Effort:
        most = max(self.iterations, 10)
        return Effort(seconds=0.1, fewest=self.iterations, most=most, warmups=1)


class Samples(NamedTuple):
    """Some rank's own, for all."""

    inputs: Mapping[str, Any]
    dims: Mapping[str, int]

    def of(self, size: int) -> dict[str, Any]:
        """So many, over again where there are fewer."""
        found = dict(self.inputs)
        for name, dim in self.dims.items():
            tensor: Tensor = found[name]
            found[name] = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
        return found


def some_samples(leaves: Mapping[str, Any], dims: Mapping[str, int], most: int) -> Samples:
    """The first of a batch: not more than a message should hold."""
    found = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            value = value.detach()
            if name in dims:
                num_rows = value.shape[dims[name]]
                each = max(1, value.nbytes // max(1, num_rows))
                rows = max(1, min(most, num_rows, SAMPLE_BYTES // each))
                value = value.narrow(dims[name], 0, rows)
            value = value.to("cpu", copy=True)  # and not what it is a part of
        found[name] = value
    return Samples(found, dict(dims))


@contextmanager
def leaving_no_trace(device: torch.device) -> Iterator[None]:
    """Whatever a segment draws, it is not from the script's generators."""
    state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(state)


@dataclass
class Measuring:
    """One model on all ranks of a session, of which each measures its part; all get the whole."""

    session: Session
    source: Source
    captured: Captured
    described: Subject
    samples: Samples
    device: torch.device
    wish: Wish

    def run(self, optimizer: torch.optim.Optimizer | None, host: str) -> Profile | None:
        """What was found, the same on all ranks; None where nothing could be measured."""
        self._started = time.monotonic()
        cores = len(os.sched_getaffinity(0)) // torch.get_num_threads()
        self._places = Places(self.session.gather(Place(machine_identity(), str(self.device), cores)))
        num_kinds = len(self.described.kinds)
        log.info(
            "measuring %s of %s",
            count(num_kinds, "kind"),
            count(len(self.described.segments), "segment"),
        )
        with leaving_no_trace(self.device):
            draft = self._measure_sizes(new_draft(self.described))
            if not any(draft.sizes):
                return None
            draft = self._fill_in(draft)
            draft = self._measure_processes(draft, host)
            draft = msgspec.structs.replace(draft, fixed_bytes=0, optimizer=self._optimizer(optimizer))
        found = draft.profile()
        log.info("measured in %s", duration(self._elapsed))
        return found

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    # ------------------------------------------------------------ segments

    def _measure_sizes(self, draft: Draft) -> Draft:
        for size in self.wish.microbatch_sizes:
            began = self._elapsed
            own = self._at_size(size, draft)
            told = self.session.gather((own, self._elapsed))
            found = [theirs for theirs, _ in told if theirs is not None]
            costs = merged(found)
            draft = draft.with_sizes(costs)
            if draft.overheads is None:
                overheads = next((theirs.overheads for theirs in found if theirs.overheads), None)
                draft = msgspec.structs.replace(draft, overheads=overheads)
            left_out = {kind: why for theirs in found for kind, why in theirs.left_out.items()}
            draft = self._note(draft, size, {kind: left_out[kind] for kind in left_out.keys() - costs.keys()})
            log.info("micro-batches of %d: %s", size, duration(self._elapsed - began))
            # The same on all ranks, so that all of them go on or none does.
            so_far = max(elapsed for _, elapsed in told)
            if not costs or so_far + sum(map(_expected_seconds, costs.values())) > self.wish.seconds:
                break
        return draft

    def _note(self, draft: Draft, size: int, left_out: Mapping[int, str]) -> Draft:
        if not left_out:
            return draft
        which = spans(place for place, kind in enumerate(self.described.segments) if kind in left_out)
        about = f"segments {which} with micro-batches of {size}"
        why = left_out[min(left_out)]
        known = all(draft.sizes[kind] for kind in left_out)  # at another size
        speaks = logging.INFO if known or self.session.rank else logging.WARNING
        log.log(speaks, "%s are not measured but estimated: %s", about, why)
        return draft.with_note(about, f"estimated: {why}")

    def _at_size(self, size: int, draft: Draft) -> AtSize | None:
        weights = [kind.parameter_bytes for kind in self.described.kinds]
        kinds = own_kinds(self.session.rank, self._places, weights, self.device)
        if not kinds:
            return None
        bench = Bench(self._parts, self.device, self.wish.effort, in_two_parts=False)
        inputs = self.samples.of(size)
        with_overheads = draft.overheads is None
        if self._may_run_all(size):
            try:
                return bench.as_chain(
                    size, self.captured, inputs, num_kinds=len(kinds), with_overheads=with_overheads
                )
            except Exception as error:
                why = in_short(error)
            # Which of them it was shows when they run by themselves.
            log.info("micro-batches of %d: %s", size, why)
        bench.let_go()
        return bench.one_by_one(
            size,
            self.captured,
            inputs,
            kinds=kinds,
            with_overheads=with_overheads,
            refuse=lambda kind: self._no_room(kind, size) or self._no_time(kind, size, draft),
        )

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self.source, self.described.segments, device=self.device, initialize=None)

    def _may_run_all(self, size: int) -> bool:
        """As one chain, on the cores of a processor, where there is room and time for it."""
        if self.device.type != "cpu":
            return False
        kinds = range(len(self.described.kinds))
        held = held_at_once(len(self.described.segments), len(kinds))
        needed = sum(self._bytes(kind, size, held) for kind in kinds)
        thought = self.wish.speed
        expected = sum(
            thought.seconds(segment, size) + thought.backward_seconds(segment, size)
            for segment in map(self._segment, kinds)
        )
        return needed <= self._available and RUNS * expected <= self.wish.seconds

    def _no_room(self, kind: int, size: int) -> str | None:
        """Where memory is lent beyond what there is, asking for too much means death, not an error."""
        needed = self._bytes(kind, size, 1)
        if needed <= self._available:
            return None
        return f"it needs about {needed >> 20} MiB, {int(self._available) >> 20} MiB are available"

    def _no_time(self, kind: int, size: int, draft: Draft) -> str | None:
        """At a size larger than another, the time that it will take is known, about."""
        expected = sum(
            _expected_seconds(near) * size / near.microbatch_size for near in draft.sizes[kind][-1:]
        )
        if self._elapsed + expected <= self.wish.seconds:
            return None
        return f"it would have taken longer than {self.wish.seconds:g} s"

    def _bytes(self, kind: int, size: int, held: int) -> int:
        of = self.described.kinds[kind]
        return (
            of.parameter_bytes
            + 2 * of.gradient_bytes
            + (held + 2) * self._segment(kind).kept_bytes.size(size)
        )

    def _segment(self, kind: int) -> Segment:
        return self.captured.graph.segments[self.described.segments.index(kind)]

    @cached_property
    def _available(self) -> float:
        free = available_bytes(self.device)
        return float("inf") if free is None else free / self._places.beside(self.session.rank)

    def _fill_in(self, draft: Draft) -> Draft:
        """Kinds that were not measured are estimated by the speed of those that were."""
        sizes = sorted({cost.microbatch_size for costs in draft.sizes for cost in costs})
        speed = speed_of(
            ((self._segment(kind), cost) for kind, costs in enumerate(draft.sizes) for cost in costs),
            memory_bytes=self.described.device_memory_bytes,
            device=self.described.device,
        )
        for kind, costs in enumerate(draft.sizes):
            segment = self._segment(kind)
            for size in set(sizes) - {cost.microbatch_size for cost in costs}:
                (guess,) = estimate(segment, speed, [size])
                near = min(costs, key=lambda cost: abs(cost.microbatch_size - size), default=None)
                draft = draft.with_sizes({kind: resized(near, segment, speed, size) if near else guess})
        return draft

    # ------------------------------------------------------------ what goes between processes

    def _measure_processes(self, draft: Draft, host: str) -> Draft:
        within, between = assumed_link(*self.wish.within), assumed_link(*self.wish.between)
        reductions: tuple[ReduceCost, ...] = (
            *assumed_reductions(within, False),
            *assumed_reductions(between, True),
        )
        if self.session.replicas is None:
            return msgspec.structs.replace(
                draft,
                overheads=draft.overheads or OVERHEADS,
                within=within,
                between=between,
                reductions=reductions,
            )
        far = len(self._places.machines) > 1
        near_pair = next((tuple(ranks[:2]) for ranks in self._places.machines if len(ranks) > 1), None)
        if self.device.type == "cpu":
            within = self._link(near_pair, host) or within
            between = self._link(self._places.far_pair, host) or between
        else:
            draft = draft.with_note("links", "assumed")
        if self.device.type == "cpu" or self.session.backend != "gloo":
            measured = self._reduce(far)
            reductions = (*(cost for cost in reductions if cost.between_machines != far), *measured)
        else:
            draft = draft.with_note("reductions", "assumed, for ranks share a device")
        return msgspec.structs.replace(
            draft,
            overheads=draft.overheads or OVERHEADS,
            within=within,
            between=between,
            reductions=reductions,
        )

    def _link(self, pair: Sequence[int] | None, host: str) -> LinkCost | None:
        """The first of the pair finds it, all get it."""
        if pair is None:
            return None
        first, second = pair
        found = measure_link_between(
            (first, second),
            self.session.rank,
            self.session.gather,
            device=self.device,
            sizes=LINK_BYTES,
            host=host,
            effort=LINK_EFFORT,
        )
        return self.session.broadcast(found, first)

    def _reduce(self, far: bool) -> list[ReduceCost]:
        group, waiter = self.session.replicas, self.session.waiter
        assert group is not None and waiter is not None

        def all_reduce(tensor: Tensor) -> None:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            waiter.for_work(work, lambda: "an all-reduce of all ranks, to time it")

        return self.session.broadcast(
            measure_reductions(
                all_reduce,
                None,
                group_size=self.session.width,
                between_machines=far,
                device=self.device,
                stopwatch=stopwatch_for(self.device),
                sizes=LINK_BYTES,
                effort=LINK_EFFORT,
            ),
            0,
        )

    # ------------------------------------------------------------ the optimizer

    def _optimizer(self, optimizer: torch.optim.Optimizer | None) -> OptimizerCost:
        """On rank 0: its step on some of the model's weights."""
        found = ADAM
        forms = first_of(trained_forms(self.source, self.captured), OPTIMIZER_ELEMENTS)
        if optimizer is not None and forms and self.session.rank == 0:
            kind: Any = type(optimizer)
            defaults = dict(optimizer.defaults)
            try:
                found = measure_optimizer(
                    lambda parameters: kind(parameters, **defaults),
                    first_of(forms, sum(form.numel for form in forms) // 4),
                    forms,
                    device=self.device,
                    finish=finish_in(self.source.precision),
                    stopwatch=stopwatch_for(self.device),
                    effort=OPTIMIZER_EFFORT,
                )
            except Exception as error:  # one that cannot be made anew is no reason not to train
                log.info("%s is taken to cost what %s does: %s", kind.__name__, found.name, in_short(error))
        return self.session.broadcast(found, 0)


def _expected_seconds(cost: SizeCost) -> float:
    """To measure a segment that costs so much."""
    return RUNS * (cost.forward.seconds + cost.backward.seconds)
