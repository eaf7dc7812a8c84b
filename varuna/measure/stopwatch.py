"""Stopwatches for any device, and the rule that turns many runs into one duration."""

import resource
import time
from collections.abc import Callable, Sequence
from statistics import pstdev
from typing import Any, NamedTuple

import msgspec
import torch

from varuna.types import Duration

LEAST_SECONDS = 1e-7
"""The shortest duration that is reported: a profile holds no zeros."""
MOST_HEAD_START_SECONDS = 0.05
CYCLES_A_SECOND = 2e9
"""Clock rate of a fast GPU; on a slower one a head start lasts longer."""


class Effort(msgspec.Struct, frozen=True):
    """Number of runs behind one measured value.

    After `warmups` runs, the measurement repeats for `seconds`, at least `fewest` and at most `most`
    times. The default reports the median run. On cores shared with other jobs, a lower `quantile`
    reports what the cores can do alone.
    """

    seconds: float = 1.0
    fewest: int = 7
    most: int = 60
    warmups: int = 3
    quantile: float = 0.5  # of the runs sorted by time: the one that is reported

    def runs(self, seconds_each: float) -> int:
        return max(self.fewest, min(self.most, round(self.seconds / max(seconds_each, 1e-9))))


class ThreadClocks(NamedTuple):
    """The clocks of one thread at one moment."""

    wall: float
    cpu: float  # seconds in which the thread had a core
    waits: int  # number of times the thread gave up its core to wait


class Stopwatch:
    """Stopwatch for a device whose work is done when a call returns.

    If one thread does all the work, CPU time counts: time that other processes take from the core does
    not. If the thread waited (for a disk, a device, a timer), wall time counts.
    """

    is_async = False
    """True if the host queues work that the device does later."""

    def __init__(self) -> None:
        self._one_thread = torch.get_num_threads() == 1
        self.mark: Callable[[], Any] = self._mark  # an attribute: one lookup less in timed code

    def _mark(self) -> Any:
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        return ThreadClocks(time.perf_counter(), time.thread_time(), waits)

    def synchronize(self) -> None:
        """Wait until the device has reached every mark."""

    def head_start(self, seconds: float) -> bool:
        """Delay the device so that the host queues work ahead, as in training; False if impossible."""
        return False

    def seconds(self, start: Any, stop: Any) -> float:
        only_computed = self._one_thread and start.waits == stop.waits
        return float(stop.cpu - start.cpu if only_computed else stop.wall - start.wall)

    def host_seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds in which the host was busy; the device may be busy for longer."""
        return self.seconds(start, stop)


class CudaStopwatch(Stopwatch):
    """Stopwatch whose marks are CUDA events: they are queued with the work, and nothing waits for them.

    With a head start the host queues all work before the device begins, so no gap is counted.
    """

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mark = self._mark

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event, time.perf_counter()

    def synchronize(self) -> None:
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
    """Return a quantile of the samples, interpolated between the two nearest."""
    place = quantile * (len(samples) - 1)
    low = int(place)
    below, above = sorted([*samples, max(samples)])[low : low + 2]
    return below + (place - low) * (above - below)


def typical_duration(samples: Sequence[float], *, less: float = 0.0, quantile: float = 0.5) -> Duration:
    """Return the typical sample minus `less`, which is counted elsewhere, and the spread of one run."""
    return Duration(max(typical(samples, quantile) - less, LEAST_SECONDS), pstdev(samples))
