"""Verifies one subject: plain runs, then every layout, each in forked processes of its own.

capture ──► reference run ──► the same again, with other last bits ──► tolerance
                  └─────────► every layout: its ranks compare ────────► differences ──► verdict
"""

import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import nn

import pyrannc.partitioning
from varuna.capture import Captured, Source
from varuna.capture.model.batch import find_batch
from varuna.capture.model.call_convention import StructuredCall
from varuna.capture.model.lengths import check_dynamic_dims
from varuna.environment import PREFIX, VarunaEnvironment
from varuna.plan.cut.blocks import partition
from varuna.train import build
from varuna.types import PrecisionName
from varuna.verification.children import Answer, Channel, Child, run_together
from varuna.verification.compare import Judgement, Tolerance, judge
from varuna.verification.layouts import VerifyLayout, chosen_layouts
from varuna.verification.plain import Spans
from varuna.verification.plain_runs import PlainFailed, PlainRuns
from varuna.verification.reference import Difference, ReferenceRun
from varuna.verification.report import FirstDifference, LayoutResult, Status, Verification, overall
from varuna.verification.subject import VerifySubject, in_fp64
from varuna.verification.wrapped import Face, WrappedRun

log = logging.getLogger("varuna")

LINE = re.compile(r":\d+: ")
"""A reason that names a line of the script."""
NOT_REPEATABLE = "the plain process computes something else when it runs again:"
NO_LAYOUT = (
    "no layout can be verified: a batch has a single sample, which BatchNorm refuses in a micro-batch (give "
    "larger batches, or --layouts)"
)

INFINITE_LOSS = (
    "the loss of the plain process is {loss} at step {step}, so there is nothing to compare (look at the "
    "inputs and the learning rate)"
)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class VerifyRequest:
    """The options of a verification."""

    layouts: tuple[VerifyLayout, ...] | None
    face: Face
    precision: PrecisionName
    wide: bool  # in fp64
    timeout_seconds: float


class SharedSources:
    """Makes sources of captures; a forked process gets those that were made before the fork."""

    def __init__(self) -> None:
        self._known: dict[Any, Source] = {}

    def __call__(self, model: nn.Module, **options: Any) -> Source:
        key = tuple(sorted((name, repr(value)) for name, value in options.items() if name != "watch"))
        if key not in self._known:
            self._known[key] = Source(model, **options)
        return self._known[key]


@dataclass
class Coordinator:
    """Runs in a process of its own: it converts the model and sets environment variables."""

    subject: VerifySubject
    request: VerifyRequest
    progress: Progress
    notes: list[str] = field(default_factory=list)

    def run(self) -> Verification:
        began = time.monotonic()
        torch.set_num_threads(1)
        sources = SharedSources()
        with tempfile.TemporaryDirectory() as folder, default_dtype(self._wide_dtype):
            own_environment(folder)
            if self.request.wide:
                self.subject = in_fp64(self.subject)
            with (
                patch.object(build, "Source", sources),
                patch.object(pyrannc.partitioning, "Source", sources),
            ):
                found = self._verify(sources)
        return msgspec.structs.replace(found, seconds=round(time.monotonic() - began, 3))

    @property
    def _wide_dtype(self) -> torch.dtype | None:
        return torch.float64 if self.request.wide else None

    def _verify(self, sources: SharedSources) -> Verification:
        request = self.request
        self.progress(0, 1, "capturing the model")
        try:
            captured = self._capture(sources)
        except Exception as error:
            self._plain_runs(None).reference()  # raises if the plain model does not run either
            return self._report("refused", f"refused: {error}", torch.float64, ())
        runs = self._plain_runs(captured)
        layouts = request.layouts or self._chosen(captured, runs)
        if not layouts:
            return self._report("failed", f"failed: {NO_LAYOUT}", runs.dtype, ())
        total = len(layouts) + 3
        self.progress(1, total, "training in one plain process")
        unsteady = judge(runs.repeat(), Tolerance(runs.dtype), self._order).first
        if unsteady is not None:
            unsteady = msgspec.structs.replace(unsteady, operation=_changing_operation(runs))
            return self._report("differs", f"differs: {NOT_REPEATABLE} {unsteady}", runs.dtype, ())
        results: list[LayoutResult] = []
        for number, layout in enumerate(layouts):
            self.progress(number + 3, total, f"training at {layout}")
            results.append(self._verify_layout(layout, runs))
        return self._conclude(tuple(results), runs)

    def _plain_runs(self, captured: Captured | None) -> PlainRuns:
        request = self.request
        return PlainRuns(
            self.subject,
            captured,
            precision=request.precision,
            face=request.face,
            timeout_seconds=request.timeout_seconds,
        )

    # ------------------------------------------------------------ before the layouts

    def _capture(self, sources: SharedSources) -> Captured:
        """Capture the model as the chosen interface does, so that all forked ranks have the capture."""
        subject, options = self.subject, self.subject.options
        common: dict[str, Any] = {
            "precision": self.request.precision,
            "dynamic_dims": check_dynamic_dims(options.get("dynamic_dims") or {}),
            "device_type": "cpu",
            "partition": partition,
        }
        if self.request.face == "pyrannc":
            source = sources(subject.model, **common)
            few = subject.rows(subject.sample, 0, min(2, subject.num_samples(subject.sample)))
            call, leaves = StructuredCall.of(subject.model, (), few, grad_enabled=True)
            batch = find_batch(leaves, subject.batch_dims)
            return source.capture(
                leaves, training=True, batch=batch, convention=call, precision=self.request.precision
            )
        source = sources(
            subject.model,
            batch_dims=dict(subject.batch_dims),
            shared_weights=options.get("shared_weights"),
            loss=options.get("loss"),
            **common,
        )
        return source.capture(subject.sample, training=True)

    def _chosen(self, captured: Captured, runs: PlainRuns) -> tuple[VerifyLayout, ...]:
        layouts = chosen_layouts(
            num_segments=captured.num_segments,
            batch_size=self.subject.batch_size,
            by_microbatch=runs.by_microbatch,
            face=self.request.face,
        )
        if runs.by_microbatch:  # BatchNorm refuses a single sample
            sizes = {self.subject.num_samples(batch) for batch in self.subject.batches}
            layouts = tuple(one for one in layouts if divides_well(runs.pieces(one), sizes))
            self.notes.append(
                "BatchNorm computes statistics of a micro-batch, so the plain process runs the same "
                "micro-batches one after the other"
            )
        possible = [layout for layout in layouts if not layout.is_uneven or can_be_uneven(captured, layout)]
        if len(possible) < len(layouts):
            self.notes.append(
                "no layout with unequal numbers of replicas: the values between stages cannot be divided by "
                "sample"
            )
        return tuple(possible)

    # ------------------------------------------------------------ one layout

    def _verify_layout(self, layout: VerifyLayout, runs: PlainRuns) -> LayoutResult:
        began = time.monotonic()
        common: dict[str, Any] = {"layout": str(layout), "processes": layout.world}
        try:
            recording = runs.reference(layout)
        except PlainFailed as failure:
            reason = f"{failure}: the plain process cannot run micro-batches of this layout (set chunk=N)"
            return LayoutResult(**common, status="failed", reason=reason)
        answers = self._run_ranks(layout, recording)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            error = next((error for error in errors if not error.is_echo), errors[0])
            return LayoutResult(
                **common,
                status="refused" if error.is_refusal else "failed",
                reason=_with_line(error.text, runs) if error.is_refusal else f"{error.kind}: {error.text}",
                seconds=round(time.monotonic() - began, 3),
            )
        found = [one for answer in answers for one in decode_differences(answer.value)]
        found += recording.missing_gradients(found)
        judgement = self._judge(layout, found, runs)
        first = judgement.first
        if first is not None:
            first = msgspec.structs.replace(first, operation=self._locate(layout, runs, first))
        return LayoutResult(
            **common,
            status="equal" if first is None else "differs",
            largest=judgement.largest,
            tensors=judgement.tensors,
            first=first,
            seconds=round(time.monotonic() - began, 3),
        )

    def _judge(self, layout: VerifyLayout, found: Sequence[Difference], runs: PlainRuns) -> Judgement:
        """Compare with the floor alone; measure the model's sensitivity only where that does not explain."""
        judgement = judge(found, Tolerance(runs.dtype), self._order)
        if judgement.first is None:
            return judgement
        judgement = judge(found, runs.tolerance(layout), self._order)
        if judgement.first is None:
            return judgement
        return judge(found, runs.tolerance(layout, with_casts=True), self._order)

    def _run_ranks(self, layout: VerifyLayout, recording: ReferenceRun) -> list[Answer]:
        request, subject = self.request, self.subject

        def rank_task(rank: int) -> Callable[[Channel], bytes]:
            def task(channel: Channel) -> bytes:
                join_layout(layout, rank, channel)
                run = WrappedRun(
                    subject,
                    layout,
                    recording,
                    precision=request.precision,
                    timeout_seconds=request.timeout_seconds,
                )
                found = run.train(request.face)
                if dist.is_initialized():
                    dist.barrier()
                    dist.destroy_process_group()
                return msgspec.msgpack.encode(found)

            return task

        return run_together(
            [rank_task(rank) for rank in range(layout.world)],
            timeout_seconds=2 * request.timeout_seconds,
            relay=send_port if layout.world > 1 else None,
        )

    def _locate(self, layout: VerifyLayout, runs: PlainRuns, first: FirstDifference) -> str | None:
        """Return the operation where the values part; None if none of the first step does it alone."""
        if first.step or first.kind not in ("loss", "gradient"):
            return None
        try:
            return runs.locate(layout, backward=first.name if first.kind == "gradient" else None)
        except PlainFailed as error:
            log.debug("the first operation that differs was not found: %s", error)
            return None

    # ------------------------------------------------------------ results

    @property
    def _order(self) -> dict[str, int]:
        return {name: number for number, (name, _) in enumerate(self.subject.model.named_parameters())}

    def _conclude(self, results: tuple[LayoutResult, ...], runs: PlainRuns) -> Verification:
        status = overall(results)
        losses = [runs.reference().loss(step) for step in range(len(self.subject.batches))]
        if status == "equal" and not all(map(math.isfinite, losses)):
            step = next(step for step, loss in enumerate(losses) if not math.isfinite(loss))
            verdict = f"failed: {INFINITE_LOSS.format(loss=losses[step], step=step)}"
            return self._report("failed", verdict, runs.dtype, results)
        wrong = [result for result in results if result.status == status]
        if status == "equal":
            verdict = f"equal: all {len(results)} layouts train as one plain process does"
        elif status == "differs":
            verdict = (
                f"differs: {len(wrong)} of {len(results)} layouts do not train as one plain process does"
            )
        else:
            verdict = f"{status}: {', '.join(result.layout for result in wrong)}: {wrong[0].reason}"
        return self._report(status, verdict, runs.dtype, results)

    def _report(
        self, status: Status, verdict: str, dtype: torch.dtype, results: tuple[LayoutResult, ...]
    ) -> Verification:
        subject, request = self.subject, self.request
        return Verification(
            model=type(subject.model).__name__,
            face=request.face,
            precision="fp64" if request.wide else request.precision,
            steps=len(subject.batches),
            batch_size=subject.batch_size,
            status=status,
            verdict=verdict,
            tolerance=str(Tolerance(dtype)),
            layouts=results,
            notes=tuple(self.notes),
        )


def _with_line(reason: str, runs: PlainRuns) -> str:
    """Add the operation that computes something else when it runs again, if the reason names no line."""
    if LINE.search(reason):
        return reason
    found = _changing_operation(runs)
    return f"{reason} First operation: {found}" if found else reason


def _changing_operation(runs: PlainRuns) -> str | None:
    """Return the first operation that computes something else when it runs again, if any."""
    try:
        return runs.locate_change()
    except PlainFailed as error:
        log.debug("the operation that changes was not found: %s", error)
        return None


def decode_differences(message: bytes) -> list[Difference]:
    return msgspec.msgpack.decode(message, type=list[Difference])


def divides_well(pieces: Callable[[int], Spans], sizes: Iterable[int]) -> bool:
    """Return whether no micro-batch has a single sample, but for batches that the plain process runs so."""
    return all(
        stop - first > 1 or (first, stop) == (0, size) for size in sizes for first, stop in pieces(size)
    )


def can_be_uneven(captured: Captured, layout: VerifyLayout) -> bool:
    return len(layout.widths) <= captured.num_segments and not any(
        captured.inseparable(cut) for cut in range(1, captured.num_segments)
    )


def send_port(children: Sequence[Child]) -> None:
    """Pass the port of rank 0's store on to all other ranks."""
    port = children[0].channel.receive()
    for child in children[1:]:
        child.channel.send(port)


def join_layout(layout: VerifyLayout, rank: int, channel: Channel) -> None:
    """Make this process a rank of the layout's job. Rank 0 has the store, at a port that is free."""
    world = layout.world
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    if world == 1:
        return
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        channel.send(str(store.port).encode())
    else:
        store = dist.TCPStore("127.0.0.1", int(channel.receive()), world, is_master=False)  # type: ignore[attr-defined]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(store.port))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def own_environment(folder: str) -> None:
    """Leave out settings of a job that this process may belong to, and use a cache of its own."""
    for name in list(os.environ):
        if name.startswith((PREFIX, "RANNC_", "OMPI_", "PMI_", "SLURM_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ.update(VarunaEnvironment(cache=folder).write())
    os.environ["RANNC_CONF_DIR"] = folder


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
