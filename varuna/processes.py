"""Processes that must not outlive the process that started them, and their names."""

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
BACKGROUND_NICE = 5
"""A process with this value gets a quarter of a core that one worker wants, too."""


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent, the process `parent`, ends for any reason. Works on Linux only.

    Elsewhere it only ends this process if the parent is gone already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os.kill(os.getpid(), signal.SIGKILL)


def raise_file_limit(wanted: int) -> None:
    """Allow this process to open `wanted` files and sockets, or as many as the user may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 characters. Works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def yield_to_workers() -> None:
    """Let workers go first: this process does not interrupt them, and gets less of a busy core."""
    with suppress(OSError):  # a container may forbid it
        os.nice(BACKGROUND_NICE)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def is_running(pid: int) -> bool:
    """Return whether a process of this machine has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError, IndexError):  # elsewhere than on Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    return True
