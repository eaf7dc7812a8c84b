"""Trains the unwrapped model in one process on the whole batch: the reference of all layouts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.capture.graph.randomness import DrawDims
from varuna.capture.model.call_convention import find_loss
from varuna.capture.run.plain_randomness import plain_randomness
from varuna.capture.run.verify import flip_last_bits
from varuna.capture.trace.trace import autocast, without_kv_cache
from varuna.types import PrecisionName, Work
from varuna.verification.reference import Difference, ReferenceRun, gradients, input_tensors
from varuna.verification.subject import Inputs, VerifySubject

SEED = 5
LOSS_SCALE = 1024.0
"""Loss scale of fp16, the same in the plain process and in every layout."""

MANTISSAS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits of the fraction of a number."""


class Flip(NamedTuple):
    """Last bits to flip: of the numbers themselves, or of their first digits in a lower precision."""

    bits: int
    precision: str | None = None


Draws = Mapping[int, DrawDims]
"""Sample dimensions of each random value, by its number in forward."""
Spans = tuple[tuple[int, int], ...]
"""Samples of each piece of the batch that forward sees at once."""


class PlainRun:
    """One training run of the plain model. It changes the model: run it in a process of its own."""

    def __init__(self, subject: VerifySubject, *, precision: PrecisionName, draws: Draws, sums: bool) -> None:
        self._subject, self._precision = subject, precision
        self._draws, self._sums = draws, sums

    def record(self, recording: ReferenceRun, pieces: Callable[[int], Spans]) -> None:
        for step, kind, values in self._train(pieces):
            recording.write(step, kind, values)

    def compare(
        self, recording: ReferenceRun, pieces: Callable[[int], Spans], *, flip: Flip | None = None
    ) -> list[Difference]:
        """Train again, with other last bits in weights and inputs, and return all differences."""
        if flip is not None:
            tensors: list[Any] = [*self._subject.model.parameters()]
            tensors += [value for batch in self._subject.batches for value in input_tensors(batch).values()]
            floats = {id(v): v for v in tensors if v.is_floating_point() or v.is_complex()}
            for tensor in floats.values():
                own = torch.finfo(tensor.dtype).dtype
                shift = max(0, MANTISSAS[own] - MANTISSAS.get(flip.precision or own, MANTISSAS[own]))
                flip_last_bits([tensor], flip.bits << shift)
        return [
            difference
            for step, kind, values in self._train(pieces)
            if kind != "input"
            for difference in recording.differences(step, kind, values)
        ]

    def _train(self, pieces: Callable[[int], Spans]) -> Iterator[tuple[int, str, dict[str, Tensor | None]]]:
        """Train; yield the numbers of each step as they are made."""
        subject, model = self._subject, self._subject.model
        tie(subject)
        optimizer = subject.make_optimizer(model.parameters())
        for step, batch in enumerate(subject.batches):
            loss = self.forward_backward(step, batch, pieces(subject.num_samples(batch)))
            yield step, "loss", {"": loss}
            yield step, "gradient", gradients(model)
            yield step, "buffer", dict(model.named_buffers())
            optimizer.step()
            model.zero_grad()  # the optimizer may have only some of the parameters
            yield step, "parameter", dict(model.named_parameters())
            yield step, "input", input_tensors(batch)

    def forward_backward(self, step: int, batch: Inputs, spans: Spans) -> Tensor:
        """Run forward and backward of all pieces; return the loss of the whole batch."""
        subject = self._subject
        whole = (0, subject.num_samples(batch))
        weigh = subject.options.get("loss_weight")
        rows = [batch if span == whole else subject.rows(batch, *span) for span in spans]
        counts = [stop - first for first, stop in spans]
        weights = [float(weigh(part)) if weigh else n for part, n in zip(rows, counts, strict=True)]
        total = torch.zeros((), dtype=torch.float64)
        for part, (first, stop), weight in zip(rows, spans, weights, strict=True):
            with self.mode(step, first, stop - first):
                loss = find_loss(subject.model(**part), subject.options.get("loss"))
                loss = loss if self._sums else loss * (weight / sum(weights))
            if loss.requires_grad:
                (loss * self._scale).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        if self._scale != 1:
            for parameter in subject.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= self._scale
        return total

    @property
    def _scale(self) -> float:
        return LOSS_SCALE if self._precision == "fp16" else 1.0

    @contextmanager
    def mode(self, step: int, first: int, count: int) -> Iterator[None]:
        """Run forward as a wrapped model does: its draws, its precision, without a cache for generation."""
        work = Work(seed=SEED, step=step, first_sample=first)
        with ExitStack() as stack:
            stack.enter_context(without_kv_cache(self._subject.model))
            stack.enter_context(plain_randomness.of(work, batch_size=count, draws=self._draws))
            stack.enter_context(autocast(self._precision, torch.device("cpu")))
            yield


def tie(subject: VerifySubject) -> None:
    """Make the weights that `shared_weights` declares as one parameter, as layouts train them."""
    for one, *others in subject.options.get("shared_weights") or ():
        shared = subject.model.get_parameter(one)
        for other in others:
            owner, _, name = other.rpartition(".")
            setattr(subject.model.get_submodule(owner), name, shared)
