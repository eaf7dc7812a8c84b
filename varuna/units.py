"""Numbers with their units, as people read and write them."""

import re
from collections.abc import Mapping
from math import ceil, isfinite

MEMORY: Mapping[str, float] = {"GiB": 2.0**30, "MiB": 2.0**20, "TiB": 2.0**40, "GB": 1e9, "MB": 1e6}
BANDWIDTH: Mapping[str, float] = {
    **{"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8},
    **{"GB/s": 1e9, "MB/s": 1e6},
}
"""In bytes a second. Capitals matter: a bit is no byte."""
TIME: Mapping[str, float] = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def read_quantity(text: str, units: Mapping[str, float], key: str) -> float:
    """What "80GiB" or "2.5 ms" means, in the unit that counts as 1; an error names the key."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(\S+)", text.strip())
    number = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not (number > 0 and isfinite(number)):
        raise ValueError(
            f"{key} {text!r} is no number above zero with one of the units {', '.join(units)} "
            f"(written as 25{next(iter(units))})"
        )
    return number


def read_numbers(text: str, key: str) -> list[int]:
    """The numbers of "1,2,4", each once."""
    try:
        found = [int(number) for number in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"{key} {text!r} must be whole numbers, parted by commas: 8 or 8,16,32") from None
    for number in found:
        if number < 1:
            raise ValueError(f"{key} must be 1 or more, not {number}")
    return list(dict.fromkeys(found))


def duration(seconds: float) -> str:
    if seconds == 0:
        return "0"
    if abs(seconds) >= 1000:
        return f"{seconds:.0f} s"
    if abs(seconds) >= 1:
        return f"{seconds:.4g} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.4g} ms"
    return f"{seconds * 1e6:.4g} µs"


def memory(num_bytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            number = num_bytes / scale
            return f"{number:.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{ceil(num_bytes)} bytes"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
