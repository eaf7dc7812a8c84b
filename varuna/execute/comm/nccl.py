"""NCCL after a loss: its operations wait on the device for a rank that is gone, until they are aborted."""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

KEEP_PROCESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does the thread that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # the watchdog does not wait until all ranks have written reports
}
"""Variables of torch, unless they are set already."""


def keep_process_after_errors() -> None:
    """Let torch leave this process alone when NCCL loses a rank. Call it before groups are made.

    By default torch's watchdog ends the process, which could go on in place.
    """
    for name, value in KEEP_PROCESS.items():
        os.environ.setdefault(name, value)


def nccl_backends(groups: Iterable[Any]) -> Iterator[Any]:
    """Yield the NCCL backends among process groups and bare backends."""
    kind = getattr(dist, "ProcessGroupNCCL", None)  # this torch may have been built without it
    if kind is None:
        return
    for group in groups:
        if isinstance(group, kind):
            yield group
            continue
        try:
            backend = group._get_backend(torch.device("cuda"))
        except (AttributeError, RuntimeError):  # a bare gloo backend; a group without one for GPUs
            continue
        if isinstance(backend, kind):
            yield backend


def abort_nccl(groups: Iterable[Any]) -> None:
    """End all operations of these groups, here and on the device. The groups cannot be used again.

    Communicators are aborted as one group: one after the other, two ranks could wait for each other.
    """
    found = list(nccl_backends(groups))
    if not found:
        return
    found[0]._group_start()
    try:
        for backend in found:
            backend.abort()
    finally:
        found[0]._group_end()
    torch.cuda.synchronize()  # what was queued behind the operations may still write gradients
