"""Measurement of a model's segments on the ranks that will train it, before its layout is chosen.

Each kind of segment runs a few times with real samples, on copies of its weights: the model, its buffers and
gradients, and the random generators of the script stay as they are. Kinds for which memory or time is
missing are estimated with the speed of the measured ones, and the profile says so.
"""

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from varuna.capture import Captured, Source
from varuna.execute.comm.session import Session
from varuna.execute.comm.values import PlainValue
from varuna.execute.device.facts import available_bytes
from varuna.measure.draft import ProfileDraft, ProfileSubject, new_draft
from varuna.measure.reductions import measure_reductions
from varuna.measure.stopwatch import Effort, stopwatch_for
from varuna.plan.cost.calibrate import resized, speed_of
from varuna.plan.cost.estimate import estimate
from varuna.plan.tables import spans
from varuna.profile.draft_file import DraftFile
from varuna.profile.driver import MeasurementDriver, SizeResult, SweepPolicy
from varuna.profile.estimate import ADAM, OVERHEADS, Speed, assumed_link, assumed_reductions
from varuna.profile.profiler import same_optimizer
from varuna.profile.ranks import find_places, on_all
from varuna.profile.report import ProfileReport
from varuna.profile.runnable import SegmentFactory
from varuna.profile.timing import SegmentBench, SizeBatch, held_at_once
from varuna.types import OptimizerCost, Profile, ReduceCost, Segment, SizeCost
from varuna.units import count, duration

log = logging.getLogger("pyrannc.measure")

RUNS = 14
"""Approximate number of forwards and backwards until the cost of a segment is known."""
SAMPLE_BYTES = 64 << 20
"""Most bytes of samples that one rank broadcasts; larger batches repeat them."""
LINK_EFFORT = Effort(seconds=0.02, fewest=3, most=20, warmups=1)
LINK_BYTES = (1 << 12, 1 << 18, 1 << 22)
OPTIMIZER_EFFORT = Effort(seconds=0.1, fewest=3, most=10, warmups=1)
OPTIMIZER_ELEMENTS = 1 << 22


class MeasureRequest(NamedTuple):
    """Request of rank 0 to all ranks."""

    microbatch_sizes: tuple[int, ...]  # ascending
    seconds: float  # no measurement starts later
    iterations: int  # least runs of each segment
    speed: Speed  # assumed, to predict how long a measurement takes
    within: tuple[float, float]  # latency and bytes per second, assumed if no link is measured
    between: tuple[float, float]


class MeasureSamples(NamedTuple):
    """Samples of one rank's batch, which all ranks measure with."""

    inputs: PlainValue  # dict by flat name: tensors and constants
    dims: dict[str, int]

    def of(self, size: int) -> dict[str, Any]:
        """Return `size` samples; if there are fewer, they repeat."""
        inputs: dict[str, Any] = dict(self.inputs.value)
        for name, dim in self.dims.items():
            tensor: Tensor = inputs[name]
            inputs[name] = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
        return inputs


def first_samples(leaves: Mapping[str, Any], dims: Mapping[str, int], most: int) -> MeasureSamples:
    """Return the first samples of a batch, at most SAMPLE_BYTES, in host memory."""
    inputs = {}
    for name, value in leaves.items():
        if isinstance(value, Tensor):
            value = value.detach()
            if name in dims:
                num_rows = value.shape[dims[name]]
                row_bytes = max(1, value.nbytes // max(1, num_rows))
                rows = max(1, min(most, num_rows, SAMPLE_BYTES // row_bytes))
                value = value.narrow(dims[name], 0, rows)
            value = value.to("cpu", copy=True)  # a copy: a view would drag its whole storage along
        inputs[name] = value
    return MeasureSamples(PlainValue(inputs), dict(dims))


@contextmanager
def isolated_randomness(device: torch.device) -> Iterator[None]:
    """Restore the script's random generators at the end, and enable gradients meanwhile."""
    state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(state)


class LogReport(ProfileReport):
    """Logs one line for each result."""

    def say(self, text: str) -> None:
        log.info("%s", text)


@dataclass
class TimedSweep(SweepPolicy):
    """Policy of a sweep that must end soon: kinds without memory or time are left out, and noted."""

    request: MeasureRequest
    subject: ProfileSubject
    segments: tuple[Segment, ...]  # one for each kind
    device: torch.device
    ranks_on_machine: int
    warns: bool  # on this rank
    started: float  # by time.monotonic

    def allows_chain(self, size: int) -> bool:
        """Allow a chain on CPU cores if it fits the memory and the time."""
        if self.device.type != "cpu":
            return False
        held = held_at_once(len(self.subject.segments), len(self.segments))
        needed = sum(self._bytes(kind, size, held) for kind in range(len(self.segments)))
        speed = self.request.speed
        expected = sum(
            speed.seconds(segment, size) + speed.backward_seconds(segment, size) for segment in self.segments
        )
        return needed <= self._available and RUNS * expected <= self.request.seconds

    def refuse_kind(self, kind: int, size: int, draft: ProfileDraft) -> str | None:
        """Refuse what needs too much memory, or more time than is left.

        On a system that overcommits memory, allocating too much kills the process. The time is predicted
        from a smaller size; at the first size it is unknown.
        """
        needed = self._bytes(kind, size, 1)
        if needed > self._available:
            return f"it needs about {needed >> 20} MiB, {int(self._available) >> 20} MiB are available"
        expected = sum(
            _measuring_seconds(cost) * size / cost.microbatch_size for cost in draft.sizes[kind][-1:]
        )
        if time.monotonic() - self.started + expected > self.request.seconds:
            return f"it would have taken longer than {self.request.seconds:g} s"
        return None

    def record(self, draft: ProfileDraft, size: int, result: SizeResult) -> tuple[ProfileDraft, str | None]:
        draft = draft.with_sizes(result.costs)
        if left_out := result.left_out:
            places = spans(place for place, kind in enumerate(self.subject.segments) if kind in left_out)
            about = f"segments {places} with micro-batches of {size}"
            why = left_out[min(left_out)]
            measured = all(draft.sizes[kind] for kind in left_out)  # at another size
            level = logging.WARNING if self.warns and not measured else logging.INFO
            log.log(level, "%s are not measured but estimated: %s", about, why)
            draft = draft.with_note(about, f"estimated: {why}")
        expected = sum(map(_measuring_seconds, result.costs.values()))
        if not result.costs or result.elapsed + expected > self.request.seconds:
            return draft, f"no time is left after micro-batch size {size}"
        return draft, None

    def _bytes(self, kind: int, size: int, held: int) -> int:
        facts = self.subject.kinds[kind]
        activations = (held + 2) * self.segments[kind].kept_bytes.size(size)
        return facts.parameter_bytes + 2 * facts.gradient_bytes + activations

    @cached_property
    def _available(self) -> float:
        free = available_bytes(self.device)
        return float("inf") if free is None else free / self.ranks_on_machine


def _measuring_seconds(cost: SizeCost) -> float:
    """Return the time to measure a segment with this cost."""
    return RUNS * (cost.forward.seconds + cost.backward.seconds)


@dataclass
class ModelMeasurement:
    """Measurement of one model by all ranks of a session."""

    session: Session
    source: Source
    captured: Captured
    subject: ProfileSubject
    samples: MeasureSamples
    device: torch.device
    request: MeasureRequest

    def run(self, optimizer: torch.optim.Optimizer | None, host: str) -> Profile | None:
        """Return the profile, the same on all ranks; None if nothing could be measured."""
        session, subject, started = self.session, self.subject, time.monotonic()
        places = find_places(session, self.device)
        file = DraftFile(new_draft(subject), None)
        driver = MeasurementDriver(session, places, self.source, self.device, file, LogReport())
        kinds, segments = count(len(subject.kinds), "kind"), count(len(subject.segments), "segment")
        log.info("measuring %s of %s", kinds, segments)
        by_kind = tuple(
            self.captured.graph.segments[subject.segments.index(kind)] for kind in range(len(subject.kinds))
        )
        fewest = self.request.iterations
        with isolated_randomness(self.device):
            driver.sweep(
                self.request.microbatch_sizes,
                lambda size: SizeBatch(size, self.captured, self.samples.of(size)),
                SegmentBench(
                    SegmentFactory(self.source, subject.segments, device=self.device),
                    self.device,
                    Effort(seconds=0.1, fewest=fewest, most=max(fewest, 10), warmups=1),
                    in_two_parts=False,
                ),
                TimedSweep(
                    self.request,
                    subject,
                    by_kind,
                    self.device,
                    places.num_on_machine(session.rank),
                    warns=session.rank == 0,
                    started=started,
                ),
            )
            if not any(file.draft.sizes):
                return None
            file.add(estimate_missing(file.draft, by_kind), overheads=file.draft.overheads or OVERHEADS)
            self._measure_processes(driver, host)
            file.add(fixed_bytes=0, optimizer=self._measure_optimizer(driver, optimizer))
        log.info("measured in %s", duration(time.monotonic() - started))
        return file.draft.profile()

    def _measure_processes(self, driver: MeasurementDriver, host: str) -> None:
        """Measure links and reductions; assume those that cannot be measured."""
        within, between = assumed_link(*self.request.within), assumed_link(*self.request.between)
        reductions = [*assumed_reductions(within, False), *assumed_reductions(between, True)]
        draft, places = driver.file.draft, driver.places
        if self.session.replicas is not None:
            if self.device.type != "cpu":
                draft = draft.with_note("links", "assumed")
            if self.device.type == "cpu" and places.near_pair is not None:
                within = driver.measure_link(places.near_pair, LINK_BYTES, host=host, effort=LINK_EFFORT)
            if self.device.type == "cpu" and places.far_pair is not None:
                between = driver.measure_link(places.far_pair, LINK_BYTES, host=host, effort=LINK_EFFORT)
            if self.device.type == "cpu" or self.session.backend != "gloo":
                far = places.far_pair is not None
                measured = on_all(self.session, lambda: self._reduce(far), list[ReduceCost])[0]
                reductions = [cost for cost in reductions if cost.between_machines != far] + measured
            else:
                draft = draft.with_note("reductions", "assumed, because ranks share a device")
        driver.file.add(draft, within=within, between=between, reductions=tuple(reductions))

    def _reduce(self, far: bool) -> list[ReduceCost]:
        group, waiter = self.session.replicas, self.session.waiter
        assert group is not None and waiter is not None

        def all_reduce(tensor: Tensor) -> None:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            waiter.for_work(work, lambda: "an all-reduce of all ranks, to measure it")

        return measure_reductions(
            all_reduce,
            None,
            group_size=self.session.width,
            between_machines=far,
            device=self.device,
            stopwatch=stopwatch_for(self.device),
            sizes=LINK_BYTES,
            effort=LINK_EFFORT,
        )

    def _measure_optimizer(
        self, driver: MeasurementDriver, optimizer: torch.optim.Optimizer | None
    ) -> OptimizerCost:
        if optimizer is None or not any(kind.num_trained for kind in self.subject.kinds):
            return ADAM
        return driver.measure_optimizer(
            same_optimizer(optimizer),
            self.captured,
            workers=[0],
            elements=OPTIMIZER_ELEMENTS,
            effort=OPTIMIZER_EFFORT,
            fallback=ADAM,  # an optimizer that cannot be made a second time must not stop the job
        )


def estimate_missing(draft: ProfileDraft, segments: tuple[Segment, ...]) -> ProfileDraft:
    """Estimate kinds that were not measured at a size, with the speed of those that were."""
    sizes = sorted({cost.microbatch_size for costs in draft.sizes for cost in costs})
    speed = speed_of(
        ((segments[kind], cost) for kind, costs in enumerate(draft.sizes) for cost in costs),
        memory_bytes=draft.subject.device_memory_bytes,
        device=draft.subject.device,
    )
    for kind, costs in enumerate(draft.sizes):
        for size in set(sizes) - {cost.microbatch_size for cost in costs}:
            nearest = min(costs, key=lambda cost: abs(cost.microbatch_size - size), default=None)
            if nearest is None:
                (cost,) = estimate(segments[kind], speed, [size])
            else:
                cost = resized(nearest, segments[kind], speed, size)
            draft = draft.with_sizes({kind: cost})
    return draft
