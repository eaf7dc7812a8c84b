"""Failures of workers: find the one that caused the others, and describe it.

When one worker fails, the others fail too: with a `WorkerError` that quotes the first failure, with a
lost connection, or because the launcher kills them. The user needs the first failure.
"""

import signal
from collections.abc import Sequence

import msgspec

from varuna.types import Layout


class ExtraInfo(msgspec.Struct, frozen=True):
    """Details of an exception. We add `kinds` (its classes, closest first) and `seconds`."""

    py_callstack: str
    timestamp: str
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0


class ErrorMessage(msgspec.Struct, frozen=True, rename={"extra_info": "extraInfo"}):
    message: str
    extra_info: ExtraInfo


class ErrorFile(msgspec.Struct, frozen=True):
    """The error file of a worker that raised, in the format of torch elastic."""

    message: ErrorMessage

    @property
    def seconds(self) -> float:
        return self.message.extra_info.seconds or float(self.message.extra_info.timestamp)

    @property
    def quotes_another(self) -> bool:
        """True if the exception reports the failure of another rank."""
        kinds = self.message.extra_info.kinds
        if not kinds:  # torch elastic wrote the file; it names only the class
            return self.message.message.split(":")[0] in {"WorkerError", "PeerLost", "PeerHangs"}
        return "varuna.errors.WorkerError" in kinds and SCRIPT_MISTAKE not in kinds


SCRIPT_MISTAKE = "varuna.errors.ScriptError"
BROKEN, TAKEN = "varuna.errors.BrokenCheckpoint", "varuna.errors.StoreOfOtherJob"
PAST = "varuna.errors.PastCall"


class WorkerFailure(msgspec.Struct, frozen=True):
    rank: int
    exit_code: int | None  # None: the error file is there, but the process still runs
    error: ErrorFile | None

    @property
    def second_hand(self) -> bool:
        return self.error is not None and self.error.quotes_another

    @property
    def broken_checkpoint(self) -> bool:
        """True if the worker could not load a checkpoint because it is damaged."""
        return self._raised(BROKEN)

    @property
    def store_taken(self) -> bool:
        """True if another job writes to the store of checkpoints."""
        return self._raised(TAKEN)

    @property
    def of_joiner_alone(self) -> bool:
        """True if only this rank has failed: it made calls that the others had made before it joined."""
        return self._raised(PAST)

    def _raised(self, kind: str) -> bool:
        return self.error is not None and kind in self.error.message.extra_info.kinds

    @property
    def script_mistake(self) -> bool:
        """True if the script would fail in the same way after a restart."""
        return self._raised(SCRIPT_MISTAKE)

    @property
    def in_script(self) -> bool:
        """True if the script itself raised, or exited with a code (as argparse does)."""
        return not self.second_hand and (self.error is not None or (self.exit_code or 0) > 0)


# These signals are never the result of another worker's failure.
_FIRST_HAND_SIGNALS = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


def find_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Return the failure that caused the others; all must precede the first kill by the launcher."""

    def order(failure: WorkerFailure) -> tuple[int, float, int]:
        if failure.error is None:
            return 0 if failure.exit_code in _FIRST_HAND_SIGNALS else 2, 0.0, failure.rank
        return 3 if failure.second_hand else 1, failure.error.seconds, failure.rank

    return min(failures, key=order)


def describe_failure(cause: WorkerFailure, layout: Layout, *, last_lines: str = "") -> str:
    """Name the rank, and show its traceback or the last lines of its log."""
    stage, replica = layout.place(cause.rank)
    who = f"rank {cause.rank} (stage {stage}, replica {replica})"
    if cause.error is not None:
        message = cause.error.message
        return f"{who} raised {message.message}\n\n{message.extra_info.py_callstack.rstrip()}"
    end = describe_exit(cause.exit_code or 0)
    text = last_lines.rstrip()
    log = f"last lines of its stderr:\n\n{text}" if text.strip() else "it wrote nothing to stderr"
    return f"{who} {end}, without a Python exception; {log}"


def describe_exit(code: int) -> str:
    """Return "exited with code 1" or "was killed by SIGKILL"."""
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}" if code < 0 else f"exited with code {code}"


def shorten_reason(reason: str) -> str:
    """Remove the traceback or log lines from a reason."""
    return reason.partition("\n\n")[0].removesuffix("; last lines of its stderr:")
