"""Copies numbers from a device to the host without stopping the device.

The copy is queued behind the work that computes the numbers, and more work behind the copy. The host waits
for this one copy only, as late as possible. A plain `.item()` would leave the device without work.
"""

from typing import Any

import torch
from torch import Tensor

from varuna.execute.comm.wait import Waiter


class HostCopy:
    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: Any = None  # an event
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def numbers(self, waiter: Waiter | None) -> list[float]:
        """Return the numbers. Give a `waiter` if the device may itself wait for another process."""
        if self._copied is not None:
            if waiter is None:
                self._copied.synchronize()
            else:
                waiter.for_device(self._copied.query)
        found: list[float] = self._host.reshape(-1).tolist()
        return found
