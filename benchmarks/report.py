"""Results as a table in the terminal, as Markdown and as JSON."""

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from rich.table import Table

from benchmarks.measure import Spread


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison: medians and quartiles of both sides, and of their ratio."""

    benchmark: str
    case: str
    against: str
    unit: str
    ours: Spread
    other: Spread
    ratio: Spread
    cpu_ours: Spread | None = None
    cpu_other: Spread | None = None
    cpu_ratio: Spread | None = None
    target: float | None = None
    cpu_target: float | None = None
    runs: int | None = None  # where a time limit may end the measurement before all runs

    @property
    def reached(self) -> bool | None:
        """None where nothing is to be reached. Judged by the medians, to the digits that are printed."""
        if self.target is None:
            return None
        fast = round(self.ratio.median, digits(self.target)) <= self.target
        if self.cpu_target is None or self.cpu_ratio is None:
            return fast
        return fast and round(self.cpu_ratio.median, digits(self.cpu_target)) <= self.cpu_target


COLUMNS = (
    "benchmark",
    "case",
    "against",
    "ours",
    "other",
    "ratio (quartiles)",
    "CPU ours",
    "CPU other",
    "CPU ratio (quartiles)",
    "to reach",
    "reached",
)


def digits(target: float | None) -> int:
    """Return the digits of ratios: two, or four where the target has three."""
    return 2 if target is None or round(target, 2) == target else 4


def _limit(target: float) -> str:
    """Return a target with two digits, or three where it has three."""
    return f"{target:.3f}".removesuffix("0")


def cells(row: Row) -> tuple[str, ...]:
    reach = [] if row.target is None else [f"≤ {_limit(row.target)}"]
    reach += [] if row.cpu_target is None else [f"CPU ≤ {_limit(row.cpu_target)}"]
    return (
        row.benchmark,
        row.case if row.runs is None else f"{row.case}; runs: {row.runs}",
        row.against,
        _amount(row.ours, row.unit),
        _amount(row.other, row.unit),
        _ratio(row.ratio, digits(row.target)),
        _amount(row.cpu_ours, "ms"),
        _amount(row.cpu_other, "ms"),
        _ratio(row.cpu_ratio, digits(row.cpu_target)),
        ", ".join(reach),
        {True: "yes", False: "NO", None: ""}[row.reached],
    )


def _amount(value: Spread | None, unit: str) -> str:
    if value is None:
        return ""
    text = f"{value.median:.3g}" if value.median < 1000 else f"{value.median:.0f}"
    return f"{text} {unit}"


def _ratio(value: Spread | None, places: int) -> str:
    if value is None:
        return ""
    if value.low == value.high:
        return f"{value.median:.{places}f}"
    return f"{value.median:.{places}f} ({value.low:.{places}f} to {value.high:.{places}f})"


def table(rows: Sequence[Row]) -> Table:
    made = Table(title=machine())
    for column in COLUMNS:
        made.add_column(column, overflow="fold")
    before = ""
    for row in rows:
        if before and row.benchmark != before:
            made.add_section()
        before = row.benchmark
        made.add_row(*cells(row), style="red" if row.reached is False else "")
    return made


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        "# Benchmarks",
        "",
        f"Measured on {machine()}. What each line means: docs/benchmarks.md.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {_processor()}, one thread per worker, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


class Saved(msgspec.Struct, frozen=True):
    """The file of one benchmark."""

    machine: str
    rows: Sequence[Row]


def save(name: str, rows: Sequence[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(Saved(machine(), rows)), indent=1)
    (folder / f"{name}.json").write_bytes(text + b"\n")


def load(folder: Path, names: Sequence[str]) -> Iterator[Row]:
    """Load the last saved rows of each benchmark, so that a partial run keeps the table complete."""
    for name in names:
        path = folder / f"{name}.json"
        if path.exists():
            yield from msgspec.json.decode(path.read_bytes(), type=Saved).rows
