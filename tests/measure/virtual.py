"""A clock that moves only when told, and stopwatches, segments and link ends that run on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.measure.stopwatch import Effort, Stopwatch

THREE_RUNS = Effort(seconds=0.0, fewest=3, most=3, warmups=1)


class VirtualClock:
    """Stands for the module `time`: all its clocks show the same time."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    thread_time = process_time = monotonic = perf_counter


class VirtualStopwatch(Stopwatch):
    """For a device whose work is done when a call returns."""

    def __init__(self, clock: VirtualClock) -> None:
        self.mark: Callable[[], Any] = clock.perf_counter
        self.num_synchronized = 0

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def seconds(self, start: Any, stop: Any) -> float:
        return float(stop - start)


class VirtualAsyncStopwatch(Stopwatch):
    """For a device that works behind its host: marks show both clocks."""

    is_async = True

    def __init__(self, host: VirtualClock, device: VirtualClock) -> None:
        self.mark: Callable[[], Any] = lambda: (device.now, host.now)
        self.head_starts: list[float] = []

    def head_start(self, seconds: float) -> bool:
        self.head_starts.append(seconds)
        return True

    def seconds(self, start: Any, stop: Any) -> float:
        return float(stop[0] - start[0])

    def host_seconds(self, start: Any, stop: Any) -> float:
        return float(stop[1] - start[1])


class VirtualSegment:
    """Takes a given time for each part, and writes down what it was called for."""

    relayed: Sequence[bool] = (False,)
    wanted: Sequence[bool] = (True,)

    def __init__(
        self,
        run: Callable[[str], None],
        name: str = "",
        log: list[str] | None = None,
        enter: Callable[[], object] | None = None,
    ) -> None:
        self._run = run
        self._name = name
        self._log = [] if log is None else log
        self.enter = enter
        self.held = self.most_held = 0

    def _call(self, part: str) -> None:
        self._run(part)
        self._log.append(f"{part} {self._name}".strip())

    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]:
        self._call("forward" if keep_graph else "forward_only")
        self.held += keep_graph
        self.most_held = max(self.most_held, self.held)
        return [torch.ones(2)]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert gradients and (gradients[0] != 0).all(), "gradients are never zero"
        self._call("backward")
        self.held -= 1
        return [torch.ones(2)]

    def backward_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        self._call("backward_inputs")
        return [torch.ones(2)]

    def backward_weights(self) -> None:
        self._call("backward_weights")
        self.held -= 1

    def forget(self) -> None:
        self.held = 0
