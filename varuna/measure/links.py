"""Times messages between two ranks, over the links that stages use.

Both ends call `measure_link`, one of them leading. For each size there are three turns:

    there and back    half of it is one way
    at once           both send, and each waits for the other's
    at work           the sender computes on, and so does the receiver, who looks now and then: what is
                      left is the time that a message costs those who have better things to do

Where the devices that compute are the processor's cores, what the background threads of a link spend is
taken from the computing as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from varuna.measure.stopwatch import Effort, duration, stopwatch_for
from varuna.types import Duration, LinkCost, MessageCost

MESSAGE_BYTES = tuple(1 << power for power in range(12, 27, 2))
"""4 KiB to 64 MiB."""
LINK_EFFORT = Effort(seconds=0.15, fewest=5, most=40, warmups=2)
WORK_SECONDS = 1e-3
"""The least for which a receiver computes before it looks: small messages are there long before."""


class End(Protocol):
    """One end of a link."""

    @property
    def ready(self) -> int: ...  # messages that can be taken
    def send(self, tensors: Sequence[Tensor]) -> None: ...
    def take(self) -> list[Tensor]: ...
    def poll(self) -> None: ...
    def wait(self) -> None: ...  # until something has happened


def measure_link(
    end: End,
    *,
    leads: bool,
    device: torch.device,
    sizes: Sequence[int],
    effort: Effort = LINK_EFFORT,
) -> LinkCost | None:
    """What messages of these bytes cost; None at the end that does not lead."""
    work = _work()
    messages = []
    for size in sizes:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        one_way = _there_and_back(end, payload, effort, leads)
        both_ways = _at_once(end, payload, effort, leads)
        # The other end works for as long as this one has found a message to take.
        seconds = _agree(end, [one_way.seconds if one_way else 0.0], leads)[0]
        busy = _at_work(end, payload, effort, leads, seconds, work)
        sender, receiver = (busy, _told(end)) if leads else (0.0, _tell(end, busy))
        if one_way is not None and both_ways is not None:
            messages.append(
                MessageCost(
                    num_bytes=size,
                    one_way=one_way,
                    both_ways=max(both_ways, one_way, key=lambda d: d.seconds),
                    sender_seconds=min(sender, one_way.seconds),
                    receiver_seconds=receiver,
                )
            )
    return LinkCost(tuple(messages)) if leads else None


def _there_and_back(end: End, payload: Tensor, effort: Effort, leads: bool) -> Duration | None:
    def run() -> float:
        start = time.perf_counter()
        if leads:
            end.send([payload])
            _take_whole(end, payload.device)
        else:
            _take_whole(end, payload.device)
            end.send([payload])
        return time.perf_counter() - start

    samples = _repeat(end, run, effort, leads)
    return duration([sample / 2 for sample in samples]) if leads else None


def _at_once(end: End, payload: Tensor, effort: Effort, leads: bool) -> Duration | None:
    def run() -> float:
        start = time.perf_counter()
        end.send([payload])
        _take_whole(end, payload.device)
        return time.perf_counter() - start

    samples = _repeat(end, run, effort, leads)
    return duration(samples) if leads else None


def _at_work(
    end: End, payload: Tensor, effort: Effort, leads: bool, one_way: float, work: Callable[[], None]
) -> float:
    """The seconds in which this end could not compute, sending where it leads and else receiving."""
    on_cores = payload.device.type == "cpu"
    # Of cores only what is spent counts, not what another process takes; a device keeps a thread waiting.
    own = time.thread_time if on_cores else time.perf_counter

    def elsewhere() -> float:
        """What other threads than this one have spent."""
        return time.process_time() - time.thread_time() if on_cores else 0.0

    def send() -> float:
        others = elsewhere()
        start = own()
        end.send([payload])
        busy = own() - start
        while not end.ready:
            work()
            end.poll()
        end.take()
        return busy + elsewhere() - others

    def receive() -> float:
        others, busy = elsewhere(), 0.0
        while not end.ready:
            until = time.perf_counter() + max(one_way, WORK_SECONDS)
            while time.perf_counter() < until:
                work()
            start = own()
            end.poll()
            busy += own() - start
        start = own()
        end.take()
        busy += own() - start + elsewhere() - others
        end.send([])
        return busy

    return median(_repeat(end, send if leads else receive, effort, leads))


def _repeat(end: End, run: Callable[[], float], effort: Effort, leads: bool) -> list[float]:
    """As often as the leading end finds right."""
    seconds = [run() for _ in range(effort.warmups)]
    count = _agree(end, [float(effort.runs(min(seconds)))], leads)[0]
    return [run() for _ in range(round(count))]


def _agree(end: End, numbers: Sequence[float], leads: bool) -> list[float]:
    """The leading end's numbers, on both."""
    if leads:
        end.send([torch.tensor(numbers, dtype=torch.float64)])
        return list(numbers)
    values: list[float] = _take(end)[0].tolist()
    return values


def _tell(end: End, number: float) -> float:
    end.send([torch.tensor([number], dtype=torch.float64)])
    return number


def _told(end: End) -> float:
    return float(_take(end)[0].item())


def _take(end: End) -> list[Tensor]:
    while not end.ready:
        end.wait()
    return end.take()


def _take_whole(end: End, device: torch.device) -> None:
    """Waits for the bytes too, where a device moves them after the word of them has come."""
    _take(end)
    stopwatch_for(device).settle()


def _work() -> Callable[[], None]:
    """Some dozen microseconds of computing."""
    matrix = torch.full((64, 64), 0.01)
    result = torch.empty_like(matrix)

    def work() -> None:
        torch.mm(matrix, matrix, out=result)

    return work
