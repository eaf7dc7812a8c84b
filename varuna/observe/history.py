"""History of a job: one monotone curve for the steps and one for each logged scalar, in bounded memory.

A job may be restarted and run steps again. The first record of a step counts, later ones are dropped, so a
curve has each step once. A curve that is full drops every second point, so a job of any length fits.
"""

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

import msgspec

MAX_STEPS = 8192
"""Points of the curve of steps; more are thinned out."""
MAX_SCALARS = 1024
"""Points of the curve of one scalar."""
MAX_NAMES = 256
"""Scalars of a job; more are ignored."""
RECENT = 32
"""Steps whose mean is the present speed."""


class StepPoint(msgspec.Struct, frozen=True, array_like=True):
    """Record of one step."""

    step: int  # number of finished steps
    at: float  # seconds since 1970
    loss: float | None  # None: not a finite number, or not known
    seconds: float  # since the end of the previous step
    samples: int = 0  # of the whole job in this step
    tokens: int = 0  # 0: unknown
    has_loss: bool = True  # False: the loss is not known, as if the script computes it


class ScalarPoint(msgspec.Struct, frozen=True, array_like=True):
    """A value of `varuna.log`."""

    name: str
    step: int
    at: float
    value: float | None  # None: not a finite number


class Curve:
    """Values by step, each step once and in order. A full curve drops every second point."""

    def __init__(self, num_values: int, capacity: int) -> None:
        self._capacity = capacity
        self._steps = array("q")
        self._values = [array("d") for _ in range(num_values)]
        self._stride = 1  # one of so many points is kept
        self.newest: tuple[float, ...] = ()
        self.count = 0  # all points so far
        self.last_step = -1

    def add(self, step: int, *values: float) -> bool:
        """Add a point. Return False if the curve has this step, or a later one, already."""
        if step <= self.last_step:
            return False
        self.last_step, self.newest = step, values
        if self.count % self._stride == 0:
            if len(self._steps) == self._capacity:
                self._thin()
            if self.count % self._stride == 0:
                self._steps.append(step)
                for column, value in zip(self._values, values, strict=True):
                    column.append(value)
        self.count += 1
        return True

    def _thin(self) -> None:
        self._stride *= 2
        self._steps = self._steps[::2]
        self._values = [column[::2] for column in self._values]

    def rows(self, limit: int | None = None, *, after: int = -1) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield at most about `limit` points after a step, evenly chosen, and always the newest one."""
        start, stop = bisect_right(self._steps, after), len(self._steps)
        stride = 1 if limit is None else max(1, math.ceil((stop - start) / limit))
        for place in range(start, stop, stride):
            if self._steps[place] != self.last_step:
                yield self._steps[place], tuple(column[place] for column in self._values)
        if self.last_step > after:
            yield self.last_step, self.newest


class JobHistory:
    """Curves of a job."""

    def __init__(self) -> None:
        self._steps = Curve(6, MAX_STEPS)
        self._scalars: dict[str, Curve] = {}
        self._ranks: dict[str, int] = {}  # lowest rank that has logged a scalar
        self._recent: deque[StepPoint] = deque(maxlen=RECENT)
        self.last: StepPoint | None = None  # of the curve
        self.newest: StepPoint | None = None  # also if the curve has its step already
        self.dropped = 0  # records that did not reach the manager, and scalars beyond MAX_NAMES

    def add(self, point: StepPoint) -> bool:
        """Add a step. Return False if the history has it, or a later one, already."""
        self.newest = point
        self._recent.append(point)
        values = (point.at, _number(point.loss), point.seconds, point.samples, point.tokens, point.has_loss)
        if not self._steps.add(point.step, *map(float, values)):
            return False
        self.last = point
        return True

    def add_scalar(self, point: ScalarPoint, rank: int = 0) -> bool:
        """Add a scalar. If several ranks log it, the values of the lowest rank count."""
        curve = self._scalars.get(point.name)
        if curve is None:
            if len(self._scalars) >= MAX_NAMES:
                self.dropped += 1
                return False
            curve = self._scalars[point.name] = Curve(2, MAX_SCALARS)
        if rank > self._ranks.setdefault(point.name, rank):
            return False
        self._ranks[point.name] = rank
        return curve.add(point.step, point.at, _number(point.value))

    def begin_layout(self) -> None:
        """Forget the speed of the last layout, and which rank logs a scalar."""
        self._recent.clear()
        self._ranks.clear()

    @property
    def num_steps(self) -> int:
        """Steps that were added, also those that are thinned out."""
        return self._steps.count

    @property
    def step_seconds(self) -> float | None:
        """Mean of the recent steps of this layout; None: unknown."""
        if not self._recent:
            return None
        return sum(point.seconds for point in self._recent) / len(self._recent)

    @property
    def samples_per_second(self) -> float | None:
        return self._per_second("samples")

    @property
    def tokens_per_second(self) -> float | None:
        return self._per_second("tokens") or None

    def _per_second(self, what: str) -> float | None:
        seconds = sum(point.seconds for point in self._recent)
        return sum(getattr(point, what) for point in self._recent) / seconds if seconds > 0 else None

    def steps(self, limit: int | None = None, *, after: int = -1) -> list[StepPoint]:
        """Return at most about `limit` points after a step, evenly chosen, and always the newest one."""
        return [
            StepPoint(step, at, finite(loss), seconds, int(samples), int(tokens), bool(has_loss))
            for step, (at, loss, seconds, samples, tokens, has_loss) in self._steps.rows(limit, after=after)
        ]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        return tuple(self._scalars)

    def scalar(self, name: str, limit: int | None = None, *, after: int = -1) -> list[ScalarPoint]:
        """Return the curve of a scalar, chosen like `steps`."""
        rows = self._scalars[name].rows(limit, after=after) if name in self._scalars else iter(())
        return [ScalarPoint(name, step, at, finite(value)) for step, (at, value) in rows]

    def last_scalars(self) -> dict[str, float | None]:
        """Return the newest value of each scalar."""
        return {name: finite(curve.newest[1]) for name, curve in self._scalars.items() if curve.count}


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def finite(value: float) -> float | None:
    """Return a finite number, or None."""
    return value if math.isfinite(value) else None
