"""Pipeline schedules: build, check, print, and step through them."""

from varuna.schedule.check import check
from varuna.schedule.cursor import Cursor
from varuna.schedule.orders import (
    NAMES,
    build,
    half_done,
    held,
    limit,
    opportunistic,
    ops,
    recomputes,
    row,
    splits,
)
from varuna.schedule.text import from_csv, grid, to_csv

__all__ = [
    "NAMES",
    "Cursor",
    "build",
    "check",
    "from_csv",
    "grid",
    "half_done",
    "held",
    "limit",
    "opportunistic",
    "ops",
    "recomputes",
    "row",
    "splits",
    "to_csv",
]
