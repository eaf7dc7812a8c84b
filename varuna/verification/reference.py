"""The numbers of one training run in memory that forked processes share, and comparisons with them."""

import math
import mmap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from varuna.capture.run.verify import distance, norm
from varuna.execute.device.facts import available_bytes
from varuna.units import format_bytes
from varuna.verification.subject import Inputs, VerifySubject, leaves_of

KINDS = ("loss", "gradient", "buffer", "parameter", "input")
"""Kinds of numbers, in the order in which a step makes them."""
ALIGNMENT = 64


class Difference(msgspec.Struct, frozen=True, array_like=True):
    """Distance of one tensor of one step from that of the reference run."""

    step: int
    kind: str  # one of KINDS
    name: str
    distance: float
    norm: float  # of the reference

    @property
    def key(self) -> tuple[int, str, str]:
        return self.step, self.kind, self.name

    def __str__(self) -> str:
        return describe(self.kind, self.name)


def describe(kind: str, name: str) -> str:
    if kind == "loss":
        return "the loss"
    if kind == "gradient":
        return f"the gradient of {name!r}"
    if kind == "input":
        return f"the input {name!r}, as forward leaves it,"
    return f"the {kind} {name!r}" + (" after the update" if kind == "parameter" else "")


class ReferenceRun:
    """Loss, gradients, buffers, parameters and inputs of every step, written by one process."""

    def __init__(self, subject: VerifySubject) -> None:
        model = subject.model
        self.parameters = [name for name, p in model.named_parameters() if _is_number(p)]
        shapes: dict[tuple[int, str, str], tuple[torch.dtype, torch.Size]] = {}
        for step, batch in enumerate(subject.batches):
            shapes[step, "loss", ""] = torch.float64, torch.Size(())
            for name, parameter in model.named_parameters():
                if _is_number(parameter):
                    shapes[step, "parameter", name] = parameter.dtype, parameter.shape
                    if parameter.requires_grad:
                        shapes[step, "gradient", name] = parameter.dtype, parameter.shape
            for name, buffer in model.named_buffers():
                if not buffer.is_sparse and not isinstance(buffer, nn.UninitializedBuffer):
                    shapes[step, "buffer", name] = buffer.dtype, buffer.shape
            for name, value in leaves_of(batch).items():
                if isinstance(value, Tensor):
                    shapes[step, "input", name] = value.dtype, value.shape
        offsets, total = {}, 0
        for key, (dtype, shape) in shapes.items():
            offsets[key] = total
            total += -(-max(1, math.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        _check_memory(total)
        memory = mmap.mmap(-1, max(total, 1))
        self._values = {
            key: torch.frombuffer(memory, dtype=dtype, count=max(1, math.prod(shape)), offset=offsets[key])[
                : math.prod(shape)
            ].view(shape)
            for key, (dtype, shape) in shapes.items()
        }
        self._order = {key: place for place, key in enumerate(self._values)}
        flags = mmap.mmap(-1, max(1, len(self._values)))
        self._present = torch.frombuffer(flags, dtype=torch.uint8)

    @torch.no_grad()
    def write(self, step: int, kind: str, values: Mapping[str, Tensor | None]) -> None:
        for name, value in values.items():
            slot = self._values.get((step, kind, name))
            if slot is not None and value is not None and value.shape == slot.shape:
                slot.copy_(value.detach())
                self._present[self._order[step, kind, name]] = 1

    def read(self, step: int, kind: str, name: str) -> Tensor | None:
        key = (step, kind, name)
        if key not in self._values or not self._present[self._order[key]]:
            return None
        return self._values[key]

    def has(self, step: int, kind: str, name: str) -> bool:
        return (step, kind, name) in self._values

    def differences(self, step: int, kind: str, values: Mapping[str, Tensor | None]) -> Iterator[Difference]:
        """Compare values with the recorded ones; those without a record are left out."""
        for name, value in values.items():
            if self.has(step, kind, name):
                known = self.read(step, kind, name)
                if known is not None and value is not None and known.shape != value.shape:
                    yield Difference(step, kind, name, math.inf, norm(known))
                else:
                    yield Difference(step, kind, name, distance(known, value), norm(known))

    def missing_gradients(self, found: Iterable[Difference]) -> Iterator[Difference]:
        """Return the gradients that no rank has compared: to the ranks of this layout they are 0."""
        compared = {one.key for one in found}
        for step, kind, name in self._values:
            if kind == "gradient" and (step, kind, name) not in compared:
                known = self.read(step, kind, name)
                yield Difference(step, kind, name, norm(known), norm(known))

    def loss(self, step: int) -> float:
        value = self.read(step, "loss", "")
        return math.nan if value is None else float(value)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def input_tensors(inputs: Inputs) -> dict[str, Tensor | None]:
    return {name: value for name, value in leaves_of(inputs).items() if isinstance(value, Tensor)}


def _is_number(parameter: Any) -> bool:
    return not isinstance(parameter, nn.UninitializedParameter)


def _check_memory(total: int) -> None:
    free = available_bytes(torch.device("cpu"))
    if free is not None and total > 0.7 * free:
        raise MemoryError(
            f"the numbers to compare take {format_bytes(total)}, and {format_bytes(free)} are free (verify a "
            "smaller configuration of the model, or fewer steps)"
        )
