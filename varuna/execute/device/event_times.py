"""Records when a device that runs behind its host has really done something.

The host queues an instruction and goes on; its own clock tells when the queueing was over. A mark queued
behind the instruction tells when its work was: an instruction takes from the mark before to its own. The
marks are read when somebody asks, by when they are long past.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from varuna.observe.record import Entry, Recorder, Snapshot, computing


class Mark(Protocol):
    """As torch.cuda.Event is one; in milliseconds."""

    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


class LateRecorder(Recorder):
    def __init__(self, mark: Callable[[], Mark]) -> None:
        super().__init__()
        self._mark = mark
        self._marks = [mark()]
        self._step_before: Snapshot = list

    def compute_seconds(self) -> float:
        """Of the step before the last: its marks are past, so that the host need not wait for its device."""
        before, self._step_before = self._step_before, self.snapshot()
        return computing(before())

    def clear(self) -> None:
        super().clear()
        self._marks = [self._mark()]

    def add(self, what: str, microbatch: int, start: float, stop: float) -> None:
        super().add(what, microbatch, start, stop)
        self._marks.append(self._mark())

    def snapshot(self) -> Snapshot:
        entries, marks, count = self.entries, self._marks, len(self.entries)
        return lambda: by_marks(entries[:count], marks[: count + 1])


def by_marks(entries: Sequence[Entry], marks: Sequence[Mark]) -> list[Entry]:
    """On the host's clock, for the host has waited for what a step ends with."""
    if not entries:
        return []
    marks[-1].synchronize()
    times = [marks[0].elapsed_time(mark) / 1000 for mark in marks]
    zero = entries[-1][3] - times[-1]
    return [
        (what, microbatch, zero + times[place], zero + times[place + 1])
        for place, (what, microbatch, _, _) in enumerate(entries)
    ]


def recorder_for(device: torch.device) -> Recorder:
    if device.type != "cuda":
        return Recorder()

    def mark() -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return LateRecorder(mark)
