"""NCCL after a loss: its operations wait on the device for a rank that is gone, until they are aborted."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

KEEP_PROCESS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does the thread that watches the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no reports of what was in flight
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # the watchdog does not wait 60 s for reports of all ranks
}
"""Variables of torch. Those that are set already stay."""
ABORT_SECONDS = 10.0
"""Operations that have not ended this long after their abort never end."""


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


def abort_nccl(groups: Iterable[Any], seconds: float = ABORT_SECONDS) -> bool:
    """End all operations of these groups, here and on the device. The groups cannot be used again.

    Return False if they do not end in time. Each group is aborted in a thread of its own, because an abort
    frees memory, for which CUDA waits until no kernel runs: also not one of a group that is aborted later.
    torch aborts in another thread than its caller's, so `_group_start` does not help.
    """
    found = list(nccl_backends(groups))
    if not found:
        return True
    threads = [threading.Thread(target=backend.abort, name="varuna-abort", daemon=True) for backend in found]
    for thread in threads:
        thread.start()
    # What was queued behind the operations may still write gradients.
    threads.append(threading.Thread(target=torch.cuda.synchronize, name="varuna-abort", daemon=True))
    threads[-1].start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
