"""Keeps the curve of a job of any length in bounded memory, and returns any part of it with few points.

A bucket holds one step at first. When all buckets are full, pairs are merged, so a bucket holds 2, 4, ...
steps. Minimum and maximum survive every merge: a spike of one step in a million stays visible.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from math import isfinite, nan
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_BUCKETS = 2**17

Axis = Literal["step", "time"]


class Band(msgspec.Struct, frozen=True):
    """One quantity: mean, minimum and maximum at each point; NaN (null in JSON) without a value."""

    mean: list[float]
    low: list[float]
    high: list[float]


class CurveWindow(msgspec.Struct, frozen=True):
    """A part of the curve."""

    steps: list[int]
    times: list[float]  # seconds since 1970
    bands: dict[str, Band]
    first_step: int  # of the whole curve, as are the next three
    last_step: int
    first_time: float
    last_time: float


class BucketColumn:
    """Sums, counts, minima and maxima of one quantity in each bucket."""

    def __init__(self) -> None:
        self.total, self.low, self.high = array("d"), array("d"), array("d")
        self.count = array("q")

    def add(self, value: float | None, *, to_last: bool) -> None:
        known = value is not None and isfinite(value)
        low = high = value if known and value is not None else nan
        if not to_last:
            self.total.append(low if known else 0.0)
            self.low.append(low)
            self.high.append(high)
            self.count.append(known)
        elif known:
            first = not self.count[-1]
            self.total[-1] += low
            self.low[-1] = low if first else min(self.low[-1], low)
            self.high[-1] = high if first else max(self.high[-1], high)
            self.count[-1] += 1

    def merge(self, starts: Sequence[int], stop: int) -> "MergedBuckets":
        """Merge the buckets from each of `starts` up to the next one; the last group ends before `stop`.

        A group without values has the minimum and maximum NaN.
        """
        total, low, high = (np.frombuffer(one)[:stop] for one in (self.total, self.low, self.high))
        count = np.frombuffer(self.count, np.int64)[:stop]
        return MergedBuckets(
            np.add.reduceat(total, starts),
            np.add.reduceat(count, starts),
            np.fmin.reduceat(low, starts),
            np.fmax.reduceat(high, starts),
        )

    def halve(self) -> None:
        merged = self.merge(range(0, len(self.count), 2), len(self.count))
        self.total, self.low, self.high = (array("d", one) for one in (merged.total, merged.low, merged.high))
        self.count = array("q", merged.counts)


class MergedBuckets(NamedTuple):
    """Groups of buckets of one quantity."""

    total: NDArray[np.float64]
    counts: NDArray[np.int64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def band(self) -> Band:
        with np.errstate(invalid="ignore"):  # no values: 0 / 0
            mean = self.total / self.counts
        return Band(mean.tolist(), self.low.tolist(), self.high.tolist())


class StepBuckets:
    """All steps so far. Steps and times only grow: points of steps that are run again are left out."""

    def __init__(self, names: Sequence[str], *, max_buckets: int = MAX_BUCKETS) -> None:
        self._columns = {name: BucketColumn() for name in names}
        self._steps, self._times = array("q"), array("d")  # the last of each bucket
        self._max_buckets = max_buckets
        self._width = 1
        self._in_last = 0  # steps in the last bucket
        self._first_step, self._first_time = 0, 0.0

    @property
    def last_step(self) -> int:
        return self._steps[-1] if self._steps else -1

    def add(self, step: int, time: float, values: Sequence[float | None]) -> None:
        if self._steps and step <= self._steps[-1]:
            return
        if not self._steps:
            self._first_step, self._first_time = step, time
        time = max(time, self._times[-1]) if self._times else time  # a clock that is set back
        to_last = 0 < self._in_last < self._width
        if to_last:
            self._steps[-1], self._times[-1] = step, time
        else:
            if len(self._steps) == self._max_buckets:
                self._halve()
            self._steps.append(step)
            self._times.append(time)
            self._in_last = 0
        self._in_last += 1
        for column, value in zip(self._columns.values(), values, strict=True):
            column.add(value, to_last=to_last)

    def step_at(self, time: float) -> int:
        """Return the last step that had finished at a time, up to the width of a bucket."""
        place = bisect_right(self._times, time)
        return self._steps[place - 1] if place else self._first_step

    def _halve(self) -> None:
        self._steps, self._times = self._steps[1::2], self._times[1::2]
        for column in self._columns.values():
            column.halve()
        self._width *= 2

    def window(self, first: float, last: float, *, axis: Axis, points: int) -> CurveWindow:
        """Return the part from `first` to `last`, and one point beside it on each side."""
        places = self._steps if axis == "step" else self._times
        start = max(0, bisect_left(places, first) - 1)
        stop = min(len(places), bisect_right(places, last) + 1)
        starts, ends = _groups(start, stop, points)
        bands = {
            name: column.merge(starts, stop).band() if starts else Band([], [], [])
            for name, column in self._columns.items()
        }
        return CurveWindow(
            [self._steps[end - 1] for end in ends],
            [self._times[end - 1] for end in ends],
            bands,
            self._first_step,
            self.last_step,
            self._first_time,
            self._times[-1] if self._times else 0.0,
        )


def _groups(start: int, stop: int, points: int) -> tuple[list[int], list[int]]:
    """Divide buckets into at most `points` equal parts; return where each starts and ends."""
    count = min(points, stop - start)
    edges = [start + (stop - start) * at // count for at in range(count + 1)] if count else []
    return edges[:-1], edges[1:]
