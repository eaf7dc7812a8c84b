"""The runs of the plain process: one reference for each division into pieces, and its sensitivity."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from varuna.capture import Captured
from varuna.capture.run.one_precision import one_precision
from varuna.capture.run.verify import FLOORS
from varuna.capture.trace.trace import LOW_PRECISION
from varuna.types import PrecisionName, spread_evenly
from varuna.verification.children import ChildError, run_alone
from varuna.verification.compare import Tolerance
from varuna.verification.layouts import VerifyLayout
from varuna.verification.locate import changing_operation, first_operation
from varuna.verification.plain import Flip, PlainRun, Spans
from varuna.verification.reference import Difference, ReferenceRun
from varuna.verification.subject import VerifySubject

aten = torch.ops.aten
FLIPS = (Flip(1), Flip(3))
"""Last bits of weights and inputs that are flipped, one run each."""
LOWER = ("float32", "float16", "bfloat16")
OVER_SAMPLES = {aten.batch_norm.default: 5, aten.native_batch_norm.default: 5}
"""Operations that compute statistics over the samples they see, with the argument that says so."""


class PlainFailed(Exception):
    """The unwrapped model raised an error in the plain process."""

    def __init__(self, error: ChildError) -> None:
        super().__init__(f"{error.kind}: {error.text}")
        self.error = error


class PlainRuns:
    """Runs the plain model in forked processes; results that several layouts need are kept."""

    def __init__(
        self,
        subject: VerifySubject,
        captured: Captured | None,
        *,
        precision: PrecisionName,
        face: str,
        timeout_seconds: float,
    ) -> None:
        self._subject, self._captured, self._face = subject, captured, face
        self._timeout_seconds = timeout_seconds
        sums = captured is not None and face == "varuna" and bool(captured.loss.sums[0])
        draws = {} if captured is None else captured.draws
        self._run = PlainRun(subject, precision=precision, draws=draws, sums=sums)
        self.by_microbatch = captured is not None and mixes_samples(captured)
        self._autocast = [LOW_PRECISION[precision]] if precision in LOW_PRECISION else []
        dtypes = {*(p.dtype for p in subject.model.parameters()), *self._autocast}
        self.dtype = max((dtype for dtype in dtypes if dtype in FLOORS), key=FLOORS.__getitem__)
        self._references: dict[Any, ReferenceRun] = {}
        self._tolerances: dict[Any, Tolerance] = {}
        self._casts: frozenset[str] | None = None

    def reference(self, layout: VerifyLayout | None = None) -> ReferenceRun:
        """Return the numbers of the plain process, for the pieces in which the layout computes."""
        key = self._key(layout)
        if key not in self._references:
            recording = ReferenceRun(self._subject)
            self._child(lambda: self._run.record(recording, self.pieces(layout)))
            self._references[key] = recording
        return self._references[key]

    def repeat(self, layout: VerifyLayout | None = None, flip: Flip | None = None) -> list[Difference]:
        """Run again, with other last bits, and return the differences."""
        recording = self.reference(layout)
        answer = self._child(lambda: self._run.compare(recording, self.pieces(layout), flip=flip))
        return msgspec.msgpack.decode(answer, type=list[Difference])

    def tolerance(self, layout: VerifyLayout, *, with_casts: bool = False) -> Tolerance:
        """Measure how far the last bits of weights and inputs move the plain process's numbers.

        `with_casts`: the last bits of each lower precision in which the model computes parts of itself.
        """
        key = (self._key(layout), with_casts)
        if key not in self._tolerances:
            tolerance = Tolerance(self.dtype)
            flips = [*FLIPS, *(Flip(1, str(dtype).removeprefix("torch.")) for dtype in self._autocast)]
            if with_casts:
                tolerance.noise.update(self.tolerance(layout).noise)
                own = FLOORS[self.dtype]
                lower = [
                    name for name in LOWER if name in self.casts() and FLOORS[getattr(torch, name)] > own
                ]
                tolerance.loss_dtype = getattr(torch, lower[-1]) if lower else None
                flips = [Flip(1, precision) for precision in lower]
            for flip in flips:
                tolerance.widen(self.repeat(layout, flip))
            self._tolerances[key] = tolerance
        return self._tolerances[key]

    def casts(self) -> frozenset[str]:
        """Return the precisions that the model's own code asks for, in one forward."""
        if self._casts is None:

            def look() -> list[str]:
                with one_precision(None, torch.device("cpu")) as mode:
                    batch = self._subject.batches[0]
                    self._run.forward_backward(0, batch, ((0, self._subject.num_samples(batch)),))
                return [str(dtype).removeprefix("torch.") for dtype in mode.requested]

            try:
                self._casts = frozenset(msgspec.msgpack.decode(self._child(look), type=list[str]))
            except PlainFailed:  # the model does not run under this mode
                self._casts = frozenset(LOWER)
        return self._casts

    def locate(self, layout: VerifyLayout, *, backward: str | None) -> str | None:
        """Return the first operation where the layout's values part from the plain ones, if one does."""
        captured = self._captured
        assert captured is not None
        size = layout.microbatch_size(self._subject.batch_size)
        answer = self._child(lambda: first_operation(self._subject, captured, self._run, size, backward))
        return msgspec.msgpack.decode(answer, type=str | None)

    def locate_change(self) -> str | None:
        """Return the first operation that computes something else when it runs again, if any."""
        answer = self._child(lambda: changing_operation(self._subject, self._run))
        return msgspec.msgpack.decode(answer, type=str | None)

    def pieces(self, layout: VerifyLayout | None) -> Callable[[int], Spans]:
        """Return the pieces of a batch that forward sees at once: the batch, or a layout's micro-batches."""
        if layout is None or not self.by_microbatch:
            return lambda size: ((0, size),)
        return lambda size: microbatches(layout, size, self._subject.batch_size, self._face)

    def _key(self, layout: VerifyLayout | None) -> Any:
        return self.pieces(layout)(self._subject.batch_size)

    def _child(self, task: Callable[[], object]) -> bytes:
        answer = run_alone(lambda: msgspec.msgpack.encode(task()), timeout_seconds=self._timeout_seconds)
        if answer.error is not None:
            raise PlainFailed(answer.error)
        return answer.value


def mixes_samples(captured: Captured) -> bool:
    """Return whether an operation such as BatchNorm computes statistics over all samples that it sees."""
    nodes = captured.carve(0, captured.num_segments).graph_module.graph.nodes
    return any(node.target in OVER_SAMPLES and node.args[OVER_SAMPLES[node.target]] for node in nodes)


def microbatches(layout: VerifyLayout, size: int, batch_size: int, face: str) -> Spans:
    """Return the micro-batches of all replicas, as the layout divides a batch of `size` samples."""
    chunk = layout.microbatch_size(batch_size)
    number = math.ceil(math.ceil(batch_size / max(layout.widths)) / chunk)  # of micro-batches, for pyrannc
    found, first = [], 0
    for share in spread_evenly(size, parts=layout.widths[0]):
        step = chunk if face == "varuna" else max(1, -(-share // number))
        found += [(first + i, first + min(i + step, share)) for i in range(0, share, step)]
        first += share
    return tuple(found)
