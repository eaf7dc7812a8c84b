"""Records when a device, which runs behind its host, really executes its work.

The host queues an instruction and goes on, so its clock only shows when it queued the work. An event queued
behind the instruction shows when the work was done: an instruction lasts from the previous event to its own.
The events are read when somebody needs the times, long after they happened.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from varuna.observe.record import Entry, Recorder, Snapshot, computing_seconds

TimingEvent = Any
"""A torch.cuda.Event, which is only partly typed. It measures in milliseconds."""


class DeviceRecorder(Recorder):
    def __init__(self, record_event: Callable[[], TimingEvent]) -> None:
        super().__init__()
        self._record_event = record_event
        self._events = [record_event()]
        self._step_before: Snapshot = list

    def compute_seconds(self) -> float:
        """Return the compute time of the step before the last: its events are over, so no wait is needed."""
        before, self._step_before = self._step_before, self.snapshot()
        return computing_seconds(before())

    def clear(self) -> None:
        super().clear()
        self._events = [self._record_event()]

    def add(self, what: str, microbatch: int, start: float, stop: float) -> None:
        super().add(what, microbatch, start, stop)
        self._events.append(self._record_event())

    def snapshot(self) -> Snapshot:
        entries, events, count = self.entries, self._events, len(self.entries)
        return lambda: _with_device_times(entries[:count], events[: count + 1])


def _with_device_times(entries: Sequence[Entry], events: Sequence[TimingEvent]) -> list[Entry]:
    """Return the entries with the device's times, on the host's clock.

    The clocks are aligned at the last entry, because the host waits for the end of a step.
    """
    if not entries:
        return []
    events[-1].synchronize()
    times = [events[0].elapsed_time(event) / 1000 for event in events]
    zero = entries[-1][3] - times[-1]
    return [
        (what, microbatch, zero + times[place], zero + times[place + 1])
        for place, (what, microbatch, _, _) in enumerate(entries)
    ]


def recorder_for(device: torch.device) -> Recorder:
    if device.type != "cuda":
        return Recorder()

    def record_event() -> TimingEvent:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return DeviceRecorder(record_event)
