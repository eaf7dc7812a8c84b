"""Errors that users see. Each says what was expected, what was found, and what to do."""

from collections.abc import Sequence


class VarunaError(Exception):
    """Base class of the errors of this library."""


class CaptureError(VarunaError, ValueError):
    """The model cannot be divided into stages."""


class ScriptError(VarunaError):
    """A mistake of the script: every restart would fail in the same way, so the manager does not restart."""


class ScheduleError(VarunaError, ValueError):
    """A schedule would deadlock, skip a micro-batch, or cannot be parsed."""


class PlanError(VarunaError, ValueError):
    """No layout meets the request, or the profile lacks data that the plan needs."""


class WorkerError(VarunaError, RuntimeError):
    """Another rank failed. The message has its rank, stage, micro-batch and traceback."""


class CallMismatch(ScriptError, WorkerError):
    """The ranks are in different calls, which all ranks must make: the message names each call."""


class PastCall(VarunaError, RuntimeError):
    """A rank that joined a running job makes a call that the others made before. They go on without it."""


class PeerLost(WorkerError):
    """Another rank ended without an error message: it or its machine was killed."""


class PeerHangs(WorkerError):
    """Another rank is alive but has made no progress for longer than the timeout."""


class OutOfDeviceMemory(VarunaError, RuntimeError):
    """A GPU has too little memory for a stage. The message shows what uses it and what would fit."""


class CheckpointError(VarunaError, RuntimeError):
    """A checkpoint cannot be written, or is missing, incomplete, damaged, or of another format."""


class BrokenCheckpoint(CheckpointError):
    """A checkpoint was complete once and is damaged now. It is set aside and not taken again."""


class StoreTaken(CheckpointError):
    """Another job, or another run of this job, writes checkpoints to the same store."""

    by_this_job = False
    by_this_launch = False  # by another generation of the same managed job
    is_given_up = False  # the manager has taken the store from it; its machine may be frozen
    runs_here = False  # by a live process of this machine


class StoreOfOtherJob(StoreTaken):
    """Another job, not an earlier generation of this one, writes to the store of a managed job."""


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not {name!r}")
