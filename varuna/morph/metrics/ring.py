"""Records of a worker's steps and scalars in a memory ring that it shares with its agent, through a file.

The worker writes a record in about a microsecond. The agent takes the new ones at each heartbeat. Nobody
locks: a record begins and ends with its number, so a reader knows those that are complete, and those that
were overwritten. The file stands beside the progress page of the worker: `<progress file>.metrics`.
"""

import mmap
import os
import struct
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from varuna.files import open_private
from varuna.morph.state import WorkerFacts
from varuna.observe.history import ScalarPoint, StepPoint, finite

HEADER = 4096
_STEP = struct.Struct("<qqdddqqqq")  # number of the record, the fields of a StepPoint, the number again
_SCALAR = struct.Struct("<qqddH62sq")  # number, step, at, value, length and text of the name, number again
_FACTS = struct.Struct("<qqqdd")  # in the order of WorkerFacts
_FACTS_AT = 64
_DEVICE = struct.Struct("<H94s")
_DEVICE_AT = 128
NUM_STEPS = 1024
NUM_SCALARS = 1024
MAX_NAME = 62
"""Bytes of the name of a scalar."""
FILE_BYTES = HEADER + NUM_STEPS * _STEP.size + NUM_SCALARS * _SCALAR.size


class Ring:
    """Numbered records of one size in a part of a page. One process writes, another one reads.

    The numbers start at 1, because an empty page has zeros.
    """

    def __init__(self, page: mmap.mmap, record: struct.Struct, *, start: int, capacity: int) -> None:
        self._page, self._record, self._size = page, record, record.size
        self._start, self._capacity = start, capacity
        self._numbers = count(1)  # several threads may write
        self._next = 1  # to read

    def write(self, *values: object) -> None:
        number = next(self._numbers)
        place = self._start + number % self._capacity * self._size
        self._record.pack_into(self._page, place, number, *values, number)

    def take(self) -> tuple[list[tuple[Any, ...]], int]:
        """Return the new records, and the number of those that were overwritten."""
        found: list[tuple[Any, ...]] = []
        begun = self._next
        for _ in range(2 * self._capacity):  # the writer may be faster
            first, *values, last = self._read(self._next)
            if first > self._next:  # overwritten
                self._next = first - self._capacity + 1
            elif first == last == self._next:
                found.append(tuple(values))
                self._next += 1
            else:
                break
        return found, self._next - begun - len(found)

    def _read(self, number: int) -> tuple[Any, ...]:
        """Return the record at the place of this number, once it is the same twice."""
        place = self._start + number % self._capacity * self._size
        data = b""
        while data != (data := self._page[place : place + self._size]):
            pass
        return self._record.unpack(data)


def _rings(page: mmap.mmap) -> tuple[Ring, Ring]:
    scalars_at = HEADER + NUM_STEPS * _STEP.size
    return (
        Ring(page, _STEP, start=HEADER, capacity=NUM_STEPS),
        Ring(page, _SCALAR, start=scalars_at, capacity=NUM_SCALARS),
    )


class MetricsWriter:
    """Ignores all records: no agent reads them."""

    watched = False
    last_step = 0  # of the last record

    def step(self, step: int, loss: float | None, *, seconds: float, samples: int, tokens: int = 0) -> None:
        """Write the record of a finished step. Loss None: not known."""

    def scalar(self, name: str, value: float, step: int) -> None:
        """Write a value of `varuna.log`."""

    def describe(self, **changes: object) -> None:
        """Change fields of the worker's facts."""


class SharedMetricsWriter(MetricsWriter):
    """Writes records to the file. Only the process that opened it writes."""

    watched = True

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        self._steps, self._scalars = _rings(page)
        self._facts = WorkerFacts()
        self._pid = os.getpid()

    def step(self, step: int, loss: float | None, *, seconds: float, samples: int, tokens: int = 0) -> None:
        self.last_step = step
        known, number = loss is not None, 0.0 if loss is None else loss
        self._steps.write(step, time.time(), number, seconds, samples, tokens, known)

    def scalar(self, name: str, value: float, step: int) -> None:
        if os.getpid() != self._pid:  # a process of a data loader has inherited the page
            return
        text = name.encode()
        self._scalars.write(step, time.time(), value, len(text), text)

    def describe(self, **changes: object) -> None:
        self._facts = facts = msgspec.structs.replace(self._facts, **changes)
        *numbers, device = msgspec.structs.astuple(facts)
        _FACTS.pack_into(self._page, _FACTS_AT, *numbers)
        text = device.encode()[:94]
        _DEVICE.pack_into(self._page, _DEVICE_AT, len(text), text)


class MetricsReader:
    """Takes the records of one worker. Used by its agent."""

    def __init__(self, progress_file: Path) -> None:
        """Create the file with all its blocks: a worker must not touch a page that a full disk lacks."""
        self.path = metrics_path(progress_file)
        with os.fdopen(open_private(self.path, os.O_RDWR), "r+b") as file:
            file.write(bytes(FILE_BYTES))
            file.flush()
            self._page = mmap.mmap(file.fileno(), FILE_BYTES, access=mmap.ACCESS_READ)
        self._steps, self._scalars = _rings(self._page)

    def take(self) -> tuple[list[StepPoint], list[ScalarPoint], int]:
        """Return the new steps and scalars, and the number of records that were overwritten."""
        steps, lost_steps = self._steps.take()
        scalars, lost_scalars = self._scalars.take()
        return [_step(*row) for row in steps], [_scalar(*row) for row in scalars], lost_steps + lost_scalars

    def facts(self) -> WorkerFacts:
        length, text = _DEVICE.unpack_from(self._page, _DEVICE_AT)
        device = text[:length].decode(errors="replace")
        num_steps, memory, limit, flops, peak = _FACTS.unpack_from(self._page, _FACTS_AT)
        return WorkerFacts(num_steps, memory, limit, flops, peak, device)

    def close(self) -> None:
        self._page.close()
        self.path.unlink(missing_ok=True)


def _step(
    step: int, at: float, loss: float, seconds: float, samples: int, tokens: int, has_loss: int
) -> StepPoint:
    return StepPoint(step, at, finite(loss) if has_loss else None, seconds, samples, tokens, bool(has_loss))


def _scalar(step: int, at: float, value: float, length: int, text: bytes) -> ScalarPoint:
    return ScalarPoint(text[:length].decode(errors="replace"), step, at, finite(value))


def metrics_path(progress_file: Path) -> Path:
    return progress_file.with_name(f"{progress_file.name}.metrics")


@cache
def open_shared(progress_file: str) -> MetricsWriter:
    """Open the file of this process once: two writers would overwrite each other."""
    try:
        with metrics_path(Path(progress_file)).open("r+b") as file:
            return SharedMetricsWriter(mmap.mmap(file.fileno(), FILE_BYTES))
    except (OSError, ValueError):  # training continues without it
        return MetricsWriter()
