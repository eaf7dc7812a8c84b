"""Of several workers that failed, which one is to blame, and how that is told.

One worker's failure takes the others down. They fail second-hand: with a `WorkerError` that quotes
the first, with a lost connection, or by the launcher's own signal. The user wants the first.
"""

import signal
from collections.abc import Sequence

import msgspec

from varuna.types import Layout


class ExtraInfo(msgspec.Struct, frozen=True):
    """`kinds` (the exception's classes, closest first) and `seconds` are ours, the rest is torch's."""

    py_callstack: str
    timestamp: str
    kinds: tuple[str, ...] = ()
    seconds: float = 0.0


class ErrorMessage(msgspec.Struct, frozen=True, rename={"extra_info": "extraInfo"}):
    message: str
    extra_info: ExtraInfo


class ErrorFile(msgspec.Struct, frozen=True):
    """What a worker that raised leaves behind, in the form of torch elastic's error files."""

    message: ErrorMessage

    @property
    def seconds(self) -> float:
        return self.message.extra_info.seconds or float(self.message.extra_info.timestamp)

    @property
    def quotes_another(self) -> bool:
        """A `WorkerError`, or kin of it, speaks of another rank's failure."""
        kinds = self.message.extra_info.kinds
        if not kinds:  # written by torch elastic itself, which names the class alone
            return self.message.message.split(":")[0] in {"WorkerError", "PeerLost", "PeerHangs"}
        return "varuna.errors.WorkerError" in kinds


class WorkerFailure(msgspec.Struct, frozen=True):
    rank: int
    exit_code: int | None  # None while the process has told of its error and is not gone yet
    error: ErrorFile | None

    @property
    def second_hand(self) -> bool:
        return self.error is not None and self.error.quotes_another

    @property
    def by_its_own_hand(self) -> bool:
        """The script raised, or left with a code, as it does for an option that it does not know."""
        return not self.second_hand and (self.error is not None or (self.exit_code or 0) > 0)


# No peer's failure ends a process like this: who dies of it, died first.
_FIRST_HAND_SIGNALS = {-signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE}


def find_cause(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """The failure that the others follow from, among those seen before the launcher ended any worker."""

    def order(failure: WorkerFailure) -> tuple[int, float, int]:
        if failure.error is None:
            return 0 if failure.exit_code in _FIRST_HAND_SIGNALS else 2, 0.0, failure.rank
        return 3 if failure.second_hand else 1, failure.error.seconds, failure.rank

    return min(failures, key=order)


def describe(cause: WorkerFailure, layout: Layout, *, last_lines: str = "") -> str:
    """Who failed, and its own words: the original traceback, or the last lines of its log."""
    stage, replica = layout.place(cause.rank)
    who = f"rank {cause.rank} (stage {stage}, replica {replica})"
    if cause.error is not None:
        message = cause.error.message
        return f"{who} raised {message.message}\n\n{message.extra_info.py_callstack.rstrip()}"
    code = cause.exit_code or 0
    end = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    said = f"its last words:\n\n{last_lines.rstrip()}" if last_lines.strip() else "it wrote nothing to stderr"
    return f"{who} {end}, without a Python exception; {said}"


def in_short(reason: str) -> str:
    """Without the traceback, or the last lines."""
    return reason.partition("\n\n")[0].removesuffix("; its last words:")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
