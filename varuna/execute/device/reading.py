"""Numbers that a device has computed, brought to the host without stopping the device.

The copy is queued behind the work that makes them, and more work behind the copy; the host waits for that
one copy alone, as late as it can. A plain `.item()` would let the device run dry.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class WaitsForDevice(Protocol):
    def for_device(self, done: Callable[[], bool]) -> None: ...


class Reading:
    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: Any = None  # an event
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def numbers(self, waiter: WaitsForDevice | None) -> list[float]:
        """`waiter` where waiting may be in vain: the device itself may wait for another process."""
        if self._copied is not None:
            if waiter is None:
                self._copied.synchronize()
            else:
                waiter.for_device(self._copied.query)
        found: list[float] = self._host.reshape(-1).tolist()
        return found


def runs_ahead(device: torch.device) -> bool:
    """Whether a call returns before its work is done, so that more can be queued behind it."""
    return device.type == "cuda"
