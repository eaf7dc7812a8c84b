"""The result of a verification: values for programs, JSON, and a table for people."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from varuna.units import count
from varuna.verification.reference import describe

Status = Literal["equal", "differs", "refused", "failed"]
LARGEST_FINITE = 1e300
COLUMNS = ("loss", "gradient", "parameter", "buffer")
"""Kinds of numbers in the table."""


class FirstDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The first number of a layout that is not that of the plain process."""

    step: int
    kind: str
    name: str
    distance: float
    norm: float
    allowed: float
    others: int = 0  # tensors that differ, too
    operation: str | None = None  # where the values part, with the line of the model

    def __str__(self) -> str:
        more = f", and {count(self.others, 'other tensor')} too" if self.others else ""
        place = f". First operation: {self.operation}" if self.operation else ""
        return (
            f"step {self.step}: {describe(self.kind, self.name)} differs by {self.distance:.3g} where its "
            f"norm is {self.norm:.3g} (allowed: {self.allowed:.3g}){more}{place}"
        )


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """The largest differences of one parameter or buffer over all steps, as shares of the norm."""

    name: str
    kind: str  # parameter or buffer
    gradient: float | None = None  # None: it has none
    value: float | None = None  # after the update; None: no rank has compared it

    @property
    def largest(self) -> float:
        found = [share for share in (self.gradient, self.value) if share is not None]
        return math.inf if any(map(math.isnan, found)) else max(found, default=0.0)


class LayoutResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one layout. `largest`: the largest difference of each kind, as a share of the norm."""

    layout: str
    processes: int
    status: Status
    largest: dict[str, float] = {}
    tensors: tuple[TensorDifference, ...] = ()  # every parameter and buffer, the largest difference first
    first: FirstDifference | None = None
    reason: str = ""  # of a layout that was refused or failed
    seconds: float = 0.0


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all layouts. `print` shows them as a table."""

    model: str
    face: str
    precision: str
    steps: int
    batch_size: int
    status: Status
    verdict: str
    tolerance: str
    layouts: tuple[LayoutResult, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.status == "equal"

    @property
    def is_infinite(self) -> bool:
        """True if the first difference of a layout is that of a value that is not finite."""
        return any(one.first is not None and one.first.distance > LARGEST_FINITE for one in self.layouts)

    @property
    def exit_code(self) -> int:
        """0: all layouts equal the plain process; 1: one differs or is refused; 2: one could not run."""
        return {"equal": 0, "differs": 1, "refused": 1, "failed": 2}[self.status]

    def tensor_table(self) -> str:
        """Return the largest difference of every parameter and buffer, a table for each layout."""
        return "\n\n".join(
            "\n".join([f"{result.layout}:", *_lines(_tensor_rows(result))])
            for result in self.layouts
            if result.tensors
        )

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.model}: {self.steps} steps of {self.batch_size} samples in {self.precision}, "
                f"{self.face}, against one plain process",
                *([""] if self.layouts else []),
                *_table(self.layouts),
                *(["", *(f"note: {note}" for note in self.notes)] if self.notes else []),
                "",
                f"tolerance: {self.tolerance}",
                f"verdict: {self.verdict}",
            ]
        )


def _table(results: tuple[LayoutResult, ...]) -> list[str]:
    if not results:
        return []
    heads = ("layout", "processes", "losses", "gradients", "parameters", "buffers", "result")
    rows = [
        (
            result.layout,
            str(result.processes),
            *(f"{result.largest[kind]:.1e}" if kind in result.largest else "-" for kind in COLUMNS),
            result.status,
        )
        for result in results
    ]
    lines = _lines([heads, *rows])
    lines.append("(largest difference of each kind, as a share of the tensor's norm)")
    for result in results:
        if result.first is not None:
            lines.append(f"{result.layout}: {result.first}")
        elif result.reason and (first := next(r for r in results if r.reason == result.reason)) is result:
            same = [other.layout for other in results if other.reason == result.reason]
            lines.append(f"{', '.join(same) if first is result else result.layout}: {result.reason}")
    return lines


def _tensor_rows(result: LayoutResult) -> list[tuple[str, ...]]:
    shares = [
        (
            one.name,
            one.kind,
            *("-" if share is None else f"{share:.1e}" for share in (one.gradient, one.value)),
        )
        for one in result.tensors
    ]
    return [("name", "kind", "gradient", "value"), *shares]


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def overall(results: tuple[LayoutResult, ...]) -> Status:
    """Return the worst status; without a layout, nothing is verified."""
    if not results:
        return "failed"
    found = {result.status for result in results}
    order: tuple[Status, ...] = ("differs", "refused", "failed")
    return next((status for status in order if status in found), "equal")
