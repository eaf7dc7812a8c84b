"""Reads a script of faults: a TOML file with one table `[[fault]]` for each."""

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from varuna.chaos.faults.kinds import FAULTS
from varuna.chaos.injector import FaultRequest

KEYS = ("kind", "at", "machine", "seconds", "rate")


class ScheduledFault(msgspec.Struct, frozen=True):
    """A fault and its time."""

    request: FaultRequest
    at: float | None = None  # seconds after the first steps; None: as soon as the last fault is over


def read_script(path: Path, *, machines: int, hosts: bool) -> list[ScheduledFault]:
    """Return the faults of a file. Raise ValueError with the place of the first mistake."""
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the script {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from None
    for key in content:
        if key != "fault":
            raise ValueError(f"{path}: unknown table {key!r}; expected [[fault]], once for each fault")
    tables = content.get("fault", [])
    if not isinstance(tables, list) or not tables:
        raise ValueError(f"{path} has no fault: write [[fault]] and kind = ... once for each")
    found: list[ScheduledFault] = []
    for number, table in enumerate(tables, start=1):
        fault = _read_fault(table, f"{path}, fault {number}", machines=machines, hosts=hosts)
        last = next((one.at for one in reversed(found) if one.at is not None), 0.0)
        if fault.at is not None and fault.at < last:
            raise ValueError(
                f"{path}, fault {number}: at = {fault.at:g} is before the fault above ({last:g})"
            )
        found.append(fault)
    return found


def _read_fault(table: dict[str, Any], place: str, *, machines: int, hosts: bool) -> ScheduledFault:
    for key in table:
        if key not in KEYS:
            raise ValueError(f"{place}: unknown key {key!r}{nearest(key, KEYS)}")
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in FAULTS:
        raise ValueError(f"{place}: unknown kind {kind!r}{nearest(str(kind), tuple(FAULTS))}")
    for key in table.keys() - {"kind", "at"} - set(FAULTS[kind].options):
        raise ValueError(f"{place}: {kind} does not use {key!r} (remove it)")
    if FAULTS[kind].needs_hosts and not hosts:
        raise ValueError(
            f"{place}: {kind} needs machines with a network and disks of their own (add --hosts)"
        )
    machine = table.get("machine")
    if machine is not None and (type(machine) is not int or not 1 <= machine <= machines):
        raise ValueError(f"{place}: machine must be 1 to {machines}, not {machine!r}")
    rate = table.get("rate")
    if rate is not None and (not isinstance(rate, str) or not rate[:1].isdigit()):
        raise ValueError(f'{place}: rate must be text in the units of tc, such as "1mbit", not {rate!r}')
    request = FaultRequest(
        kind=kind, machine=machine, seconds=_seconds(table, "seconds", place, least=0.01), rate=rate
    )
    return ScheduledFault(request, _seconds(table, "at", place, least=0.0))


def _seconds(table: dict[str, Any], key: str, place: str, *, least: float) -> float | None:
    value = table.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not least <= value < 1e6:
        raise ValueError(f"{place}: {key} must be a number of seconds from {least:g} on, not {value!r}")
    return float(value)


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the nearest known name, for a message, or all."""
    found = get_close_matches(name, known, n=1)
    return f"; did you mean {found[0]!r}?" if found else f"; expected one of {', '.join(known)}"
