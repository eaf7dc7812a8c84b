"""Takes times on any device, and makes of many single runs one that can be relied on."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from statistics import pstdev
from typing import Any, NamedTuple

import msgspec
import torch

from varuna.types import Duration

LEAST_SECONDS = 1e-7
"""What is left of a part that costs nothing beside its call: a profile holds no zeros."""


class Effort(msgspec.Struct, frozen=True):
    """How much is done for one number: runs for so many seconds, within bounds, after some to warm up.

    The run in the middle counts. On cores that others use too, a quicker one tells what they can do.
    """

    seconds: float = 1.0
    fewest: int = 7
    most: int = 60
    warmups: int = 3
    quantile: float = 0.5  # of the runs sorted by time: which one counts

    def runs(self, seconds_each: float) -> int:
        return max(self.fewest, min(self.most, round(self.seconds / max(seconds_each, 1e-9))))


class Moment(NamedTuple):
    """On the clocks of a thread."""

    wall: float
    own: float  # in which it had a core
    waits: int  # how often it has left its core of its own accord


MOST_HEAD_START_SECONDS = 0.05
CYCLES_A_SECOND = 2e9
"""Of a fast GPU; on a slower one a head start is longer."""


class Stopwatch:
    """For a device whose work is done when a call returns. `mark` it often, ask for `seconds` afterwards.

    Where one thread does all the work, the clock is that thread's own: what other processes take from
    its core does not count. What it waits for (a disk, another device, a timer) does.
    """

    runs_behind = False  # whether the host queues what the device does later

    def __init__(self) -> None:
        self._own = torch.get_num_threads() == 1
        self.mark: Callable[[], Any] = self._mark

    def _mark(self) -> Any:
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return Moment(time.perf_counter(), time.thread_time(), waits)

    def settle(self) -> None:
        """Waits until all that was marked has happened."""

    def head_start(self, seconds: float) -> bool:
        """Lets the host get ahead of the device by so much, as it is in training; False where it cannot."""
        return False

    def seconds(self, start: Any, stop: Any) -> float:
        computed = self._own and start.waits == stop.waits
        return float(stop.own - start.own if computed else stop.wall - start.wall)

    def host_seconds(self, start: Any, stop: Any) -> float:
        """In which the host was busy, though the device may have been busy for longer."""
        return self.seconds(start, stop)


class CudaStopwatch(Stopwatch):
    """Marks travel with the work, so that nothing waits in between, as nothing does in a stage.

    With a head start the host has queued all of it before the device begins, and no gap counts.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mark = self._mark

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event, time.perf_counter()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def head_start(self, seconds: float) -> bool:
        sleep: Any = torch.cuda._sleep
        with torch.cuda.device(self._device):
            sleep(round(min(seconds, MOST_HEAD_START_SECONDS) * CYCLES_A_SECOND))
        return True

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start[0].elapsed_time(stop[0])) / 1000

    def host_seconds(self, start: Any, stop: Any) -> float:
        return float(stop[1] - start[1])


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch()


def typical(samples: Sequence[float], quantile: float) -> float:
    """The sample that so large a share of them is below, between two of them in proportion."""
    place = quantile * (len(samples) - 1)
    low = int(place)
    below, above = sorted([*samples, max(samples)])[low : low + 2]
    return below + (place - low) * (above - below)


def duration(samples: Sequence[float], *, less: float = 0.0, quantile: float = 0.5) -> Duration:
    """The typical one, less what is counted elsewhere; the spread is that of a single run."""
    return Duration(max(typical(samples, quantile) - less, LEAST_SECONDS), pstdev(samples))
