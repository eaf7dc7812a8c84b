"""Waits for the work that is queued on a device, and notices meanwhile that a rank is lost."""

import torch

from varuna.execute.comm.wait import Waiter


def wait_for_queued(device: torch.device, waiter: Waiter | None) -> None:
    """Wait until the device has done all work of its current stream. On a CPU nothing is queued.

    torch counts a collective of NCCL as done when it is queued. If a rank is lost before the device has run
    it, its result is wrong.
    """
    if device.type != "cuda":
        return
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    if waiter is None:
        event.synchronize()
    else:
        waiter.for_device(event.query)
