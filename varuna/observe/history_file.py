"""The file `metrics.jsonl` in the log folder of a job: the curves of its history, one point per line.

    {"step":12,"at":1760000000.25,"loss":0.31,"seconds":0.2,"samples":48}
    {"step":12,"at":1760000000.31,"name":"accuracy","value":0.9}

The file only grows, and a restarted manager continues it. A long job writes every step at first, then every
second one, and so on, so that its file stays readable. A full disk does not disturb the job.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path

import msgspec

from varuna.codec import UNDECODABLE
from varuna.files import LineFile
from varuna.observe.history import JobHistory, ScalarPoint, StepPoint

NAME = "metrics.jsonl"
LINES_PER_STRIDE = 250_000
"""After so many lines, only half of the points are written, then a quarter, and so on."""
MAX_WAITING = 10_000
"""Lines that wait for a full disk; of more, the oldest are dropped."""
RETRY_SECONDS = 5.0
HOLD_SECONDS = 1.5
"""A step that does not follow the last one waits so long for the steps between, like all scalars.

After a morph, another machine reports the steps, and its first report may overtake the last one before.
"""


class MetricLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line: a step, or a scalar, which has a name. A number that is missing is not finite.

    `has_loss` false: the loss is not known.
    """

    step: int
    at: float
    loss: float | None = None
    seconds: float = 0.0
    samples: int = 0
    tokens: int = 0
    name: str = ""
    value: float | None = None
    has_loss: bool = True

    @property
    def step_point(self) -> StepPoint:
        return StepPoint(
            self.step, self.at, self.loss, self.seconds, self.samples, self.tokens, self.has_loss
        )


_decoder = msgspec.json.Decoder(MetricLine)


def read_lines(path: Path) -> Iterator[MetricLine]:
    """Yield the lines of a file. Skip those that a crash has cut or a disk has changed."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield _decoder.decode(line)
                except UNDECODABLE:
                    continue
    except FileNotFoundError:
        return


def read_history(folder: Path) -> JobHistory:
    """Read the history in a log folder. It is empty if the file does not exist."""
    history = JobHistory()
    for line in read_lines(folder / NAME):
        add_line(history, line)
    return history


def line_of(point: StepPoint) -> MetricLine:
    return MetricLine(
        point.step,
        point.at,
        point.loss,
        point.seconds,
        point.samples,
        point.tokens,
        has_loss=point.has_loss,
    )


def add_line(history: JobHistory, line: MetricLine) -> None:
    if line.name:
        history.add_scalar(ScalarPoint(line.name, line.step, line.at, line.value))
    else:
        history.add(line.step_point)


class HistoryKeeper:
    """Keeps the history of a running job in memory and in its file."""

    def __init__(self, folder: Path, *, continues: bool, monotonic: Callable[[], float]) -> None:
        """`continues`: the job had a manager before."""
        self.history = JobHistory()
        self.problem = ""  # why the file is not up to date
        self._file = LineFile(folder / NAME)
        self._monotonic = monotonic
        self._retry_at = 0.0
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)
        self._held_steps: list[tuple[int, float, StepPoint]] = []
        self._held_scalars: list[tuple[int, float, int, ScalarPoint]] = []
        self._num_lines = 0
        self._counts: dict[str, int] = {}  # points of each curve so far
        if continues:
            try:
                for line in read_lines(self._file.path):
                    add_line(self.history, line)
                    self._num_lines += 1
            except OSError as error:
                self.problem = f"{self._file.path} cannot be read: {error.strerror or error}"
        self.history.begin_layout()

    def add(self, steps: Iterable[StepPoint], scalars: Iterable[ScalarPoint], *, rank: int = 0) -> None:
        """Add the points of a worker. `release` moves them to the history, in order."""
        due = self._monotonic() + HOLD_SECONDS
        self._held_steps += ((point.step, due, point) for point in steps)
        self._held_scalars += ((point.step, due, rank, point) for point in scalars)

    def release(self, *, all_of_them: bool = False) -> tuple[list[StepPoint], list[ScalarPoint]]:
        """Move points to the history, and write them. Return those that it did not have.

        A step waits for the one before, which another machine may send, but not for long.
        """
        now = float("inf") if all_of_them else self._monotonic()
        steps, scalars = self._release_steps(now), self._release_scalars(now)
        for point in steps:
            if self._is_kept(""):
                self._waiting.append(msgspec.json.encode(line_of(point)))
        for scalar in scalars:
            if self._is_kept(scalar.name):
                line = MetricLine(scalar.step, scalar.at, name=scalar.name, value=scalar.value)
                self._waiting.append(msgspec.json.encode(line))
        self.write()
        return steps, scalars

    def _release_steps(self, now: float) -> list[StepPoint]:
        held, self._held_steps = sorted(self._held_steps, key=itemgetter(0)), []
        found = []
        for step, due, point in held:
            last = self.history.last.step if self.history.last is not None else 0
            if step > last + 1 and due > now:
                self._held_steps.append((step, due, point))
            elif self.history.add(point):
                found.append(point)
        return found

    def _release_scalars(self, now: float) -> list[ScalarPoint]:
        """Return those up to the last step that is due: the lowest rank may report a little later."""
        if not self._held_scalars or self._held_scalars[0][1] > now:  # the first one is due first
            return []
        held = sorted(self._held_scalars, key=itemgetter(0, 2))
        last = max(step for step, due, _, _ in held if due <= now)
        self._held_scalars = [one for one in self._held_scalars if one[0] > last]
        return [
            point for step, _, rank, point in held if step <= last and self.history.add_scalar(point, rank)
        ]

    def _is_kept(self, curve: str) -> bool:
        """Count a point of a curve. Return whether it gets a line."""
        count = self._counts[curve] = self._counts.get(curve, -1) + 1
        is_kept: bool = count % 2 ** (self._num_lines // LINES_PER_STRIDE) == 0
        self._num_lines += is_kept
        return is_kept

    def write(self) -> None:
        """Write the lines that wait; after an error, try again some seconds later."""
        if not self._waiting or self._monotonic() < self._retry_at:
            return
        try:
            self._file.append(b"\n".join(self._waiting))
            self._waiting.clear()
            self.problem = ""
        except OSError as error:  # a full disk must not end the job
            self._retry_at = self._monotonic() + RETRY_SECONDS
            self.problem = f"{self._file.path} cannot be written: {error.strerror or error}"
