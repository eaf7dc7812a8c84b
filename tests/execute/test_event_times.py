"""Device times come from events in its queue, not from the time at which the host queued the work."""

import pytest

from varuna.execute.device.event_times import DeviceRecorder


class Device:
    """Works off its queue; an event happens when everything queued before it is done."""

    def __init__(self) -> None:
        self.host = self.done = 10.0

    def queue(self, seconds: float) -> None:
        self.done = max(self.done, self.host) + seconds

    def mark(self) -> "Moment":
        self.done = max(self.done, self.host)
        return Moment(self.done)


class Moment:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "Moment") -> float:
        return (end_event.seconds - self.seconds) * 1000


def test_work_takes_as_long_as_the_device_works_on_it() -> None:
    """B4: two forwards are queued at once, then the host waits for an adjacent stage, then for the device."""
    device = Device()
    recorder = DeviceRecorder(device.mark)
    recorder.clear()
    for number in (0, 1):
        device.queue(2.0)
        recorder.add("F", number, device.host, device.host)
    device.host = 17.0
    recorder.add("wait", -1, 10.0, 17.0)
    device.queue(3.0)
    recorder.add("B", 0, 17.0, 17.0)
    device.host = 20.0
    recorder.add("reduce", -1, 17.0, 20.0)
    snapshot = recorder.snapshot()
    recorder.clear()
    recorder.add("F", 0, 20.0, 20.0)
    times = [(what, start, stop) for what, _, start, stop in snapshot()]
    assert [what for what, _, _ in times] == ["F", "F", "wait", "B", "reduce"]
    stops = [(10.0, 12.0), (12.0, 14.0), (14.0, 17.0), (17.0, 20.0), (20.0, 20.0)]
    assert [moment for _, *span in times for moment in span] == pytest.approx([m for s in stops for m in s])


def test_nothing_recorded_is_nothing() -> None:
    assert DeviceRecorder(Device().mark).snapshot()() == []


def test_compute_seconds_are_of_the_previous_step_and_need_no_wait() -> None:
    """V44: the time to queue a step does not measure the machine."""
    device = Device()
    recorder = DeviceRecorder(device.mark)
    found = []
    for seconds in (1.0, 2.0, 3.0):
        recorder.clear()
        device.queue(seconds)
        recorder.add("F", 0, device.host, device.host)
        device.host += 5.0
        recorder.add("reduce", -1, device.host - 5.0, device.host)
        found.append(recorder.compute_seconds())
        recorder.add("F", 0, device.host, device.host)  # an evaluation, of which no step is slower
    assert found == pytest.approx([0.0, 1.0, 2.0])
