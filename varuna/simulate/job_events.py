"""Measures what the ledger of a job does not hold, from the log of its events.

`varuna chaos --trace` notes in the log folder when it has taken a machine away. Nobody else knows that time.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec

EVENTS = "events.jsonl"
REMOVALS = "removed.jsonl"
MOST_SECONDS = 60.0
"""A machine that is lost later was lost for another reason."""
_GENERATION = re.compile(r"generation (\d+)")
_PAUSE = re.compile(r"pause ([0-9.]+) s")


class MeasuredEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of what happened to a job, one number for each time."""

    prepare_seconds: tuple[float, ...] = ()  # joiners built their model, and the others trained on
    morph_seconds: tuple[float, ...] = ()  # pauses of morphs in place
    detect_seconds: tuple[float, ...] = ()  # from the end of a machine to its detection


class _Event(msgspec.Struct, frozen=True):
    at: str
    what: str
    why: str = ""


class Removal(msgspec.Struct, frozen=True):
    """A machine was taken away."""

    at: float  # seconds since 1970
    machine: str


def measure_events(folder: Path) -> MeasuredEvents:
    """Read the log of events of a log folder. A folder without one gives no numbers."""
    if not (folder / EVENTS).is_file():
        return MeasuredEvents()
    prepares: dict[str, float] = {}
    lost: list[tuple[float, str]] = []
    found: dict[str, list[float]] = {"prepare": [], "morph": []}
    for at, event in _events(folder / EVENTS):
        if event.what == "preparing" and (number := _GENERATION.search(event.why)):
            prepares[number[1]] = at
        elif event.what == "generation" and (number := re.match(r"(\d+):", event.why)):
            if number[1] in prepares:
                found["prepare"].append(at - prepares.pop(number[1]))
        elif event.what == "morphed" and (pause := _PAUSE.search(event.why)):
            found["morph"].append(float(pause[1]))
        elif event.what == "machine lost":
            lost.append((at, event.why.partition(": ")[0]))
    return MeasuredEvents(
        prepare_seconds=tuple(found["prepare"]),
        morph_seconds=tuple(found["morph"]),
        detect_seconds=tuple(_detections(folder / REMOVALS, lost)),
    )


def _events(path: Path) -> Iterator[tuple[float, _Event]]:
    for line in path.read_bytes().splitlines():
        try:
            event = msgspec.json.decode(line, type=_Event)
            yield datetime.fromisoformat(event.at).timestamp(), event
        except (msgspec.DecodeError, ValueError):  # a line that was cut by a crash
            continue


def _detections(path: Path, lost: list[tuple[float, str]]) -> Iterator[float]:
    if not path.is_file():
        return
    for line in path.read_bytes().splitlines():
        try:
            removal = msgspec.json.decode(line, type=Removal)
        except (msgspec.DecodeError, ValueError):  # a line that was cut by a full disk
            continue
        later = [at - removal.at for at, name in lost if name == removal.machine and at >= removal.at]
        if later and later[0] < MOST_SECONDS:
            yield later[0]


def note_removal(folder: Path, removal: Removal) -> None:
    """Add a removal to the notes of a log folder."""
    with (folder / REMOVALS).open("ab") as file:
        file.write(msgspec.json.encode(removal) + b"\n")
