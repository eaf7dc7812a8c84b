"""Numbers with units: parsing what users write, and formatting what they read."""

import re
from collections.abc import Mapping
from math import ceil, isfinite

MEMORY: Mapping[str, float] = {"GiB": 2.0**30, "MiB": 2.0**20, "TiB": 2.0**40, "GB": 1e9, "MB": 1e6}
BANDWIDTH: Mapping[str, float] = {
    **{"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "Gbit/s": 1e9 / 8, "Mbit/s": 1e6 / 8},
    **{"GB/s": 1e9, "MB/s": 1e6},
}
"""In bytes per second. Case matters: Gbit and GB differ by a factor of 8."""
TIME: Mapping[str, float] = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
FILE_SIZE = {
    **{"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12},
    **{"KIB": 2**10, "MIB": 2**20, "GIB": 2**30},
}


def read_quantity(text: str, units: Mapping[str, float], key: str) -> float:
    """Return "80GiB" or "2.5 ms" as a number of base units. `key` names the option in errors."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(\S+)", text.strip())
    number = float(match[1]) * units.get(match[2], 0.0) if match else 0.0
    if not (number > 0 and isfinite(number)):
        raise ValueError(
            f"{key} {text!r} must be a number above zero with one of the units {', '.join(units)}, "
            f"such as 25{next(iter(units))}"
        )
    return number


def parse_bytes(text: str) -> int:
    """Return the bytes of "5GB", "500 mb", "2GiB" or "700"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", text.strip().upper())
    if match is None or match[2] not in FILE_SIZE or float(match[1]) == 0:
        raise ValueError(f'a size must be a number with a unit, such as "5GB" or "2GiB", not {text!r}')
    return int(float(match[1]) * FILE_SIZE[match[2]])


def read_numbers(text: str, key: str) -> list[int]:
    """Return the numbers of "1,2,4" without duplicates. `key` names the option in errors."""
    try:
        found = [int(number) for number in text.split(",")] if text.strip() else []
    except ValueError:
        raise ValueError(f"{key} {text!r} must be whole numbers separated by commas: 8 or 8,16,32") from None
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
    """Format bytes of memory in binary units: 1 GiB = 2**30 bytes."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            number = num_bytes / scale
            return f"{number:.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
    return f"{ceil(num_bytes)} bytes"


def format_bytes(num_bytes: float) -> str:
    """Format the size of files in decimal units: 1 GB = 10**9 bytes."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
    return f"{num_bytes / 1000:.1f} TB"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
