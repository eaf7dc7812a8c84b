"""Links on a virtual network: latency, bandwidth and the time that messages take from computing come back."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.measure.virtual import VirtualClock
from varuna.measure import links as module
from varuna.measure.links import POLL_SECONDS, measure_link
from varuna.measure.stopwatch import Effort
from varuna.types import LinkCost

CPU = torch.device("cpu")
LATENCY, BANDWIDTH = 3e-4, 2e9
SEND_SECONDS, TAKE_SECONDS = 1e-5, 4e-6  # to hand a message over, and to take one
FOLLOWER_BUSY = 7e-5  # what the other end reports of itself
SIZES = (1 << 12, 1 << 16, 1 << 22)
EFFORT = Effort(seconds=0.0, fewest=3, most=3, warmups=1)
PHASES = ("ping-pong", "both ways", "while computing")


class VirtualFollower:
    """The end that leads, with the other end simulated: it knows the order of the measurements.

    A number follows the warm-up runs of each phase: how many runs there are. Another number, the time one
    way, precedes the last phase.
    """

    def __init__(self, clock: VirtualClock, *, slowdown: float = 1.0) -> None:
        self.clock = clock
        self.slowdown = slowdown  # of messages that meet another one
        self.incoming: list[tuple[float, list[Tensor]]] = []  # arrival, tensors
        self.numbers: list[float] = []
        self.phase = 0
        self.runs_left: int | None = None
        self.sent_bytes: list[tuple[str, int]] = []

    def travel(self, num_bytes: int) -> float:
        return LATENCY + num_bytes / BANDWIDTH

    def send(self, tensors: Sequence[Tensor]) -> None:
        (tensor,) = tensors
        if tensor.dtype == torch.float64:
            self._take_number(float(tensor.item()))
            return
        phase, size = PHASES[self.phase], tensor.nbytes
        self.sent_bytes.append((phase, size))
        if phase == "while computing":
            self.clock.advance(SEND_SECONDS)
        seconds = {
            "ping-pong": 2 * self.travel(size),
            "both ways": self.slowdown * self.travel(size),
            "while computing": self.travel(size),
        }[phase]
        self.incoming.append((self.clock.now + seconds, [tensor]))
        if self.runs_left is not None:
            self.runs_left -= 1
            if self.runs_left == 0:
                self._end_phase()

    def _take_number(self, number: float) -> None:
        self.numbers.append(number)
        if self.phase == 2 and len(self.numbers) % 4 == 3:
            return  # the time one way
        self.runs_left = round(number)

    def _end_phase(self) -> None:
        self.runs_left = None
        self.phase = (self.phase + 1) % 3
        if self.phase == 0:  # the other end reports how long it was busy
            report = [torch.tensor([FOLLOWER_BUSY], dtype=torch.float64)]
            self.incoming.append((self.clock.now + 1.0, report))

    @property
    def ready(self) -> int:
        return sum(arrival <= self.clock.now for arrival, _ in self.incoming)

    def take(self) -> list[Tensor]:
        return self.incoming.pop(0)[1]

    def poll(self) -> None:
        self.clock.advance(1e-6)

    def wait(self) -> None:
        self.clock.now = max(self.clock.now, self.incoming[0][0])


def measure(monkeypatch: pytest.MonkeyPatch, *, slowdown: float = 1.0) -> tuple[LinkCost, VirtualFollower]:
    clock = VirtualClock()
    monkeypatch.setattr(module, "time", clock)
    end = VirtualFollower(clock, slowdown=slowdown)
    cost = measure_link(end, leads=True, device=CPU, sizes=SIZES, effort=EFFORT)
    assert cost is not None
    return cost, end


def test_latency_and_bandwidth_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, _ = measure(monkeypatch)
    assert [message.num_bytes for message in cost.messages] == list(SIZES)
    for message in cost.messages:
        assert message.one_way.seconds == pytest.approx(LATENCY + message.num_bytes / BANDWIDTH)
        assert message.both_ways.seconds == pytest.approx(message.one_way.seconds)
    small, large = cost.messages[0], cost.messages[-1]
    bandwidth = (large.num_bytes - small.num_bytes) / (large.one_way.seconds - small.one_way.seconds)
    assert bandwidth == pytest.approx(BANDWIDTH)
    assert small.one_way.seconds - small.num_bytes / bandwidth == pytest.approx(LATENCY)


def test_messages_that_meet_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, _ = measure(monkeypatch, slowdown=1.7)
    for message in cost.messages:
        assert message.both_ways.seconds == pytest.approx(1.7 * message.one_way.seconds)


def test_two_messages_at_once_never_seem_faster_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, _ = measure(monkeypatch, slowdown=0.4)
    assert all(message.both_ways == message.one_way for message in cost.messages)


def test_only_handing_over_keeps_a_sender_from_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, _ = measure(monkeypatch)
    for message in cost.messages:
        assert message.sender_seconds == pytest.approx(SEND_SECONDS)
        assert message.receiver_seconds == pytest.approx(FOLLOWER_BUSY), "reported by the other end"


def test_both_ends_run_equally_often_and_know_the_time_one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, end = measure(monkeypatch)
    for phase in PHASES:
        for size in SIZES:
            assert end.sent_bytes.count((phase, size)) == EFFORT.warmups + EFFORT.fewest
    for number, message in enumerate(cost.messages):
        runs, more_runs, one_way, last_runs = end.numbers[4 * number : 4 * number + 4]
        assert runs == more_runs == last_runs == EFFORT.fewest
        assert one_way == message.one_way.seconds


class VirtualLeader:
    """The end that follows, with the leading end simulated: all messages are there when they are needed."""

    def __init__(self, clock: VirtualClock, runs: int) -> None:
        self.clock = clock
        total = EFFORT.warmups + runs
        number = [torch.tensor([float(runs)], dtype=torch.float64)]
        one_way = [torch.tensor([POLL_SECONDS / 10], dtype=torch.float64)]
        payload = [torch.zeros(8, dtype=torch.uint8)]
        phase = [payload] * EFFORT.warmups + [number] + [payload] * runs
        self.messages = [*phase, *phase, one_way, *phase]
        self.polls_until_ready = 0
        self.computing = 3 * total - total
        self.sent: list[list[Tensor]] = []
        self.polls = 0

    @property
    def ready(self) -> int:
        return int(self.polls_until_ready == 0)

    def send(self, tensors: Sequence[Tensor]) -> None:
        self.sent.append(list(tensors))
        if not tensors:  # an answer in the last phase: the next message comes after two polls
            self.polls_until_ready = 2

    def take(self) -> list[Tensor]:
        self.clock.advance(TAKE_SECONDS)
        message = self.messages.pop(0)
        return message

    def poll(self) -> None:
        self.polls += 1
        self.clock.advance(1e-6)
        self.polls_until_ready -= 1

    def wait(self) -> None:
        self.polls_until_ready = 0


def test_a_receiver_counts_only_polling_and_taking(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(module, "time", clock)
    computed: list[float] = []

    def computation() -> None:
        computed.append(clock.now)
        clock.advance(POLL_SECONDS / 4)

    monkeypatch.setattr(module, "_small_computation", lambda: computation)
    end = VirtualLeader(clock, runs=3)
    assert measure_link(end, leads=False, device=CPU, sizes=[8], effort=EFFORT) is None
    (report,) = end.sent[-1]
    # The median run polled twice and took the message; what it computed in between does not count.
    assert report.item() == pytest.approx(2e-6 + TAKE_SECONDS)
    assert not end.messages and computed


def test_a_receiver_computes_at_least_a_while_between_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    monkeypatch.setattr(module, "time", clock)
    times: list[float] = []

    def computation() -> None:
        times.append(clock.now)
        clock.advance(POLL_SECONDS / 4)

    monkeypatch.setattr(module, "_small_computation", lambda: computation)
    end = VirtualLeader(clock, runs=3)
    measure_link(end, leads=False, device=CPU, sizes=[8], effort=EFFORT)
    assert len(times) == 4 * end.polls  # although a message takes a tenth of that
