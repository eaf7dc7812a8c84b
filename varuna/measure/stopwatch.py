"""Takes times on any device, and makes of many single runs one that can be relied on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, pstdev
from typing import Any

import msgspec
import torch

from varuna.types import Duration

LEAST_SECONDS = 1e-7
"""What is left of a part that costs nothing beside its call: a profile holds no zeros."""


class Effort(msgspec.Struct, frozen=True):
    """How much is done for one number: runs for so many seconds, within bounds, after some to warm up."""

    seconds: float = 1.0
    fewest: int = 7
    most: int = 60
    warmups: int = 3

    def runs(self, seconds_each: float) -> int:
        return max(self.fewest, min(self.most, round(self.seconds / max(seconds_each, 1e-9))))


class Stopwatch:
    """For a device whose work is done when a call returns. `mark` it often, ask for `seconds` afterwards.

    Where one thread does all the work, the clock is that thread's own: what other processes take from
    its core does not count.
    """

    def __init__(self) -> None:
        self.mark: Callable[[], Any] = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def settle(self) -> None:
        """Waits until all that was marked has happened."""

    def seconds(self, start: Any, stop: Any) -> float:
        return float(stop - start)

    def host_seconds(self, start: Any, stop: Any) -> float:
        """In which the host was busy, though the device may have been busy for longer."""
        return self.seconds(start, stop)


class CudaStopwatch(Stopwatch):
    """Marks travel with the work, so that nothing waits in between, as nothing does in a stage.

    Where the host is slower than the device, the gaps count: the stage would have them too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.mark = self._mark

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event, time.perf_counter()

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds(self, start: Any, stop: Any) -> float:
        return float(start[0].elapsed_time(stop[0])) / 1000

    def host_seconds(self, start: Any, stop: Any) -> float:
        return float(stop[1] - start[1])


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else Stopwatch()


def duration(samples: Sequence[float], *, less: float = 0.0) -> Duration:
    """The median, less what is counted elsewhere; the spread is that of a single run."""
    return Duration(max(median(samples) - less, LEAST_SECONDS), pstdev(samples))
