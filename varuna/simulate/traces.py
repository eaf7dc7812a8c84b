"""Reads traces of spot machines: Bamboo's events, SkyPilot's availability, and Varuna's own CSV.

| format | content |
|---|---|
| Bamboo | CSV lines `MILLISECONDS,add,NODE` and `MILLISECONDS,remove,NODE`, without a header |
| SkyPilot | JSON: `{"metadata": {"gap_seconds": 300}, "data": [0, 16, 15, ...]}`, machines in each period |
| Varuna | CSV with the header `seconds,event,machine`, in any order; events are add, remove, notice and end |
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

HEADER = ("seconds", "event", "machine")
EXPECTED = (
    "expected a trace: lines MILLISECONDS,add|remove,NODE (Bamboo); a header seconds,event,machine and such "
    "lines (Varuna); or JSON with metadata.gap_seconds and data (SkyPilot)"
)
MOST_NOTES = 5
MOST_MACHINES = 100_000
MOST_SECONDS = 1e10
ABSOLUTE_SECONDS = 1e8
"""A trace that begins after this time, three years, has times since 1970."""
LATE = 0.5
"""A first event after this part of the trace is noted: its times may have another unit."""
COMMENT = re.compile(r"(^|\s)#.*")


class MachineChange(msgspec.Struct, frozen=True):
    """Machines that come and go at the same time. One that is in both is replaced under its name."""

    at: float  # seconds since the start of the trace
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    noticed: tuple[str, ...] = ()  # machines whose removal is announced


class RemovalNotice(NamedTuple):
    """An announcement that a machine will be taken away."""

    at: float
    machine: str
    deadline: float  # its removal


class MarketTrace(msgspec.Struct, frozen=True):
    """The machines of a spot market over time."""

    source: str
    changes: tuple[MachineChange, ...]
    end: float  # in seconds
    notes: tuple[str, ...] = ()  # lines that were ignored, and why

    @property
    def most_machines(self) -> int:
        live = most = 0
        for change in self.changes:
            live += len(change.added) - len(change.removed)
            most = max(most, live)
        return most

    @property
    def machine_seconds(self) -> float:
        total, live, last = 0.0, 0, 0.0
        for change in self.changes:
            total += live * (change.at - last)
            live, last = live + len(change.added) - len(change.removed), change.at
        return total + live * (self.end - last)

    @property
    def mean_machines(self) -> float:
        return self.machine_seconds / self.end if self.end else 0.0

    def notices(self, seconds: float) -> list[RemovalNotice]:
        """Return a notice for each removal, `seconds` before it, but not before the machine is there.

        A removal that the trace announces itself gets no second notice.
        """
        found: list[RemovalNotice] = []
        announced: set[str] = set()
        added_at: dict[str, float] = {}
        for change in self.changes if seconds else ():
            for name in change.removed:
                if name not in announced:
                    at = max(change.at - seconds, added_at.get(name, 0.0))
                    found.append(RemovalNotice(at, name, change.at))
                announced.discard(name)
            announced.update(change.noticed)
            added_at |= dict.fromkeys(change.added, change.at)
        return found

    def announced(self) -> list[RemovalNotice]:
        """Return the notices of the trace itself. One without a later removal means nothing."""
        found: list[RemovalNotice] = []
        removals: dict[str, float] = {}  # the next one of each machine
        for change in reversed(self.changes):
            found += [
                RemovalNotice(change.at, name, removals[name]) for name in change.noticed if name in removals
            ]
            removals |= dict.fromkeys(change.removed, change.at)
        return found[::-1]

    def cut(self, seconds: float) -> "MarketTrace":
        """Return the first `seconds`; if the trace is shorter, its last machines stay until then."""
        changes = tuple(change for change in self.changes if change.at < seconds)
        return msgspec.structs.replace(self, changes=changes, end=seconds)


class TraceRow(NamedTuple):
    number: int  # line, or entry
    at: float
    event: str
    machine: str


def read_trace(path: Path) -> MarketTrace:
    """Read a trace in one of the formats; refuse other files with the line that does not fit."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the trace {str(path)!r}: {error.strerror}") from None
    return parse_trace(data, source=str(path))


def parse_trace(data: bytes, *, source: str) -> MarketTrace:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source}, line {number}: not UTF-8 text; {EXPECTED}") from None
    if text.lstrip()[:1] in ("{", "["):
        return _read_availability(text, source)
    rows, end, notes = _read_rows(text, source)
    return _build(rows, source=source, end=end, notes=notes)


# ---------------------------------------------------------------- CSV


class TraceColumns(NamedTuple):
    """Places of the columns, as the header says; without one, those of Bamboo."""

    seconds: int = 0
    event: int = 1
    machine: int = 2
    width: int = 3
    scale: float = 1e-3  # seconds in a unit of time
    events: tuple[str, ...] = ("add", "remove")


def _read_rows(text: str, source: str) -> tuple[list[TraceRow], float | None, list[str]]:
    """Return the events in order of time, the time of the event `end`, and notes for the user."""
    rows: list[TraceRow] = []
    notes: list[str] = []
    columns, end, end_line, is_first = TraceColumns(), None, 0, True
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{source}, line {number}"
        row = _cells(line, place)
        if row == [""]:
            continue
        header = _header(row) if is_first else None
        is_first = False
        if header is not None:
            columns = header
            notes += [f"column {name!r} is not used" for name in row if name.lower() not in HEADER]
            continue
        if len(row) == columns.width - 1 == columns.machine and row[columns.event].lower() == "end":
            row.append("")
        if len(row) != columns.width:
            raise ValueError(f"{place}: {line[:80]!r} has {len(row)} columns; {EXPECTED}")
        at = _time(row[columns.seconds], place, columns.scale)
        event, machine = row[columns.event].lower(), row[columns.machine]
        if event not in columns.events:
            expected = " or ".join(columns.events)
            raise ValueError(f"{place}: unknown event {row[columns.event][:40]!r}; expected {expected}")
        if event == "end":
            end, end_line = at, number
            continue
        if not machine:
            raise ValueError(f"{place}: the machine has no name")
        rows.append(TraceRow(number, at, event, machine))
    if not rows:
        raise ValueError(f"{source}, line 1: the file has no event; {EXPECTED}")
    rows.sort(key=lambda row: row.at)
    start = rows[0].at
    if start * columns.scale > ABSOLUTE_SECONDS:
        notes.append("times are absolute; they were moved so that the first event is at 0")
    else:
        start = 0.0
    rows = [row._replace(at=(row.at - start) * columns.scale) for row in rows]
    end = None if end is None else (end - start) * columns.scale
    last = rows[-1].at if end is None else end
    if end is not None and end < rows[-1].at:
        late = f"but line {rows[-1].number} has an event at {rows[-1].at:g} s"
        raise ValueError(f"{source}, line {end_line}: the trace ends at {end:g} s, {late}")
    if rows[0].at > LATE * last:
        unit = "seconds" if columns.scale == 1.0 else "milliseconds"
        notes.append(f"the first event is at {rows[0].at:,.0f} s of {last:,.0f} s (times are in {unit})")
    return rows, end, notes


def _cells(line: str, place: str) -> list[str]:
    """Return the cells of a line; they may be quoted. A line without a cell is [""]."""
    if '"' not in line:
        return [cell.strip() for cell in COMMENT.sub("", line).split(",")]
    if line.lstrip().startswith("#"):
        return [""]
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True, strict=True))]
    except csv.Error as error:
        raise ValueError(f"{place}: {line[:80]!r} is not a line of a CSV file: {error}; {EXPECTED}") from None


def _header(row: Sequence[str]) -> TraceColumns | None:
    """Return the columns of a header; None: it is none."""
    names = [name.lower() for name in row]
    if any(names.count(name) != 1 for name in HEADER):
        return None
    seconds, event, machine = map(names.index, HEADER)
    events = ("add", "remove", "notice", "end")
    return TraceColumns(seconds, event, machine, width=len(names), scale=1.0, events=events)


def _time(text: str, place: str, scale: float) -> float:
    """Return a time in the unit of the file, which has `scale` seconds."""
    try:
        at = float(text)
    except ValueError:
        raise ValueError(f"{place}: {text[:40]!r} is not a time; {EXPECTED}") from None
    if at * scale >= MOST_SECONDS:
        unit, most = "seconds" if scale == 1.0 else "milliseconds", f"{MOST_SECONDS / scale:.0e}"
        raise ValueError(f"{place}: the time {text[:40]} is too large (times are in {unit}, below {most})")
    if not at >= 0:
        raise ValueError(f"{place}: the time {text[:40]} is not 0 or more")
    return at


def _build(rows: Sequence[TraceRow], *, source: str, end: float | None, notes: Sequence[str]) -> MarketTrace:
    live: set[str] = set()
    changes: list[MachineChange] = []
    notes = list(notes)
    if any(a.number > b.number for a, b in pairwise(rows)):
        notes.append("the lines are not in order of time; they were sorted")
    index = 0
    while index < len(rows):
        at = rows[index].at
        group = index
        while group < len(rows) and rows[group].at == at:
            group += 1
        change = _net_change(rows[index:group], live, notes)
        if change.added or change.removed or change.noticed:
            changes.append(change)
        index = group
    notes += [
        f"line {row.number}: notice of {row.machine}, which is not removed later; ignored"
        for row in _open_notices(rows)
        if row.machine in live
    ]
    last = rows[-1].at
    return MarketTrace(source, tuple(changes), last if end is None else end, _few(notes))


def _open_notices(rows: Iterable[TraceRow]) -> list[TraceRow]:
    """Return notices after which their machine is not removed."""
    found: dict[str, TraceRow] = {}
    for row in rows:
        if row.event == "notice":
            found.setdefault(row.machine, row)
        elif row.event == "remove":
            found.pop(row.machine, None)
    return list(found.values())


def _net_change(rows: Iterable[TraceRow], live: set[str], notes: list[str]) -> MachineChange:
    """Apply events of the same time to `live`, in their order, and return the difference."""
    before = set(live)
    removed: dict[str, None] = {}
    noticed: dict[str, None] = {}
    at = 0.0
    for number, at, event, machine in rows:  # noqa: B007
        if event == "add" and machine in live:
            notes.append(f"line {number}: {machine} is added, but is there already; ignored")
        elif event == "add":
            live.add(machine)
        elif machine not in live:
            notes.append(f"line {number}: {event} of {machine}, which is not there; ignored")
        elif event == "notice":
            noticed[machine] = None
        else:
            live.discard(machine)
            if machine in before:
                removed[machine] = None
    added = tuple(sorted(name for name in live if name not in before or name in removed))
    return MachineChange(at, tuple(removed), added, tuple(name for name in noticed if name in live))


def _few(notes: Sequence[str]) -> tuple[str, ...]:
    more = len(notes) - MOST_NOTES
    return (*notes[:MOST_NOTES], f"{more} more lines are ignored") if more > 0 else tuple(notes)


# ---------------------------------------------------------------- JSON


def _read_availability(text: str, source: str) -> MarketTrace:
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        number = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise ValueError(f"{source}, line {number}: invalid JSON: {error}; {EXPECTED}") from None
    metadata = content.get("metadata") if isinstance(content, dict) else None
    gap: Any = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not _is_number(gap) or not 0 < gap < MOST_SECONDS:
        raise ValueError(f"{source}, line 1: metadata.gap_seconds must be a number above 0; {EXPECTED}")
    data = content.get("data")
    if not isinstance(data, list) or not data:
        raise ValueError(f"{source}, line 1: data must be a list of numbers of machines; {EXPECTED}")
    for index, number in enumerate(data):
        whole = _is_number(number) and number == int(number)
        if not whole or not 0 <= number <= MOST_MACHINES:
            line = _line_of_entry(text, index)
            raise ValueError(
                f"{source}, line {line}: data[{index}] is {json.dumps(number)[:40]}; expected a number of "
                f"machines from 0 to {MOST_MACHINES}"
            )
    return _from_counts([int(number) for number in data], float(gap), source)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _line_of_entry(text: str, index: int) -> int:
    place = text.find("[", max(0, text.find('"data"')))
    for _ in range(index):
        place = text.find(",", place + 1)
    rest = text[place + 1 :]
    place += len(rest) - len(rest.lstrip())
    return text.count("\n", 0, place + 1) + 1


def _from_counts(counts: Sequence[int], gap: float, source: str) -> MarketTrace:
    """Give the machines names. The youngest are taken away first; a new machine has a new name."""
    live: list[str] = []
    changes: list[MachineChange] = []
    num_named = 0
    for index, number in enumerate(counts):
        if number < len(live):
            changes.append(MachineChange(index * gap, removed=tuple(live[number:])))
            del live[number:]
        elif number > len(live):
            added = [f"vm{num_named + extra}" for extra in range(number - len(live))]
            num_named += len(added)
            live += added
            changes.append(MachineChange(index * gap, added=tuple(added)))
    return MarketTrace(source, tuple(changes), len(counts) * gap)
