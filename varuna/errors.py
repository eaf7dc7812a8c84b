"""The errors that users meet. Each says what was expected, what was found, and the way out."""

from collections.abc import Sequence


class VarunaError(Exception):
    """Any error of this library that has no closer built-in kin."""


class CaptureError(VarunaError, ValueError):
    """The model cannot be cut into stages as it stands."""


class ScheduleError(VarunaError, ValueError):
    """An order that would deadlock, lose a micro-batch, or cannot be read."""


class PlanError(VarunaError, ValueError):
    """No layout fits what was asked, or a profile does not hold what a plan needs."""


class WorkerError(VarunaError, RuntimeError):
    """Another rank failed; this carries its rank, stage, micro-batch and original traceback."""


class PeerLost(WorkerError):
    """Another rank is gone without a word: killed, or its machine is."""


class PeerHangs(WorkerError):
    """Another rank is there but has not moved for longer than the timeout."""


class OutOfDeviceMemory(VarunaError, RuntimeError):
    """A GPU has no room for a stage; this says who takes it, and what would fit."""


class CheckpointError(VarunaError, RuntimeError):
    """A checkpoint that cannot be written, or one that is missing, incomplete, broken or foreign."""


class StoreTaken(CheckpointError):
    """Another job writes its checkpoints to the same place, or another run of this one does."""

    by_this_job = False


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few of many names, for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}, not {name!r}")
