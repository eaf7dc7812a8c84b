"""Timing of messages between two ranks, over the same links that stages use.

Both ends call `measure_link`; one of them leads. For each message size there are three measurements:

    ping-pong         half of a round trip is the time one way
    both ways         both ends send at once, and each waits for the other's message
    while computing   both ends compute, and the receiver polls now and then: the result is the time that a
                      message takes away from computing

If CPU cores do the computing, the CPU time of a link's background threads counts as taken away, too.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from varuna.measure.stopwatch import Effort, stopwatch_for, typical_duration
from varuna.types import LinkCost, MessageCost

MESSAGE_BYTES = tuple(1 << power for power in range(12, 27, 2))
"""4 KiB to 64 MiB."""
LINK_EFFORT = Effort(seconds=0.15, fewest=5, most=40, warmups=2)
POLL_SECONDS = 1e-3
"""Shortest time that a receiver computes between two polls."""


class LinkEndpoint(Protocol):
    """One end of a link."""

    @property
    def ready(self) -> int: ...  # number of messages that can be taken
    def send(self, tensors: Sequence[Tensor]) -> None: ...
    def take(self) -> list[Tensor]: ...
    def poll(self) -> None: ...
    def wait(self) -> None: ...  # until something has happened


def measure_link(
    end: LinkEndpoint,
    *,
    leads: bool,
    device: torch.device,
    sizes: Sequence[int],
    effort: Effort = LINK_EFFORT,
) -> LinkCost | None:
    """Measure messages of these bytes; return the costs at the leading end, None at the other."""
    compute = _small_computation()
    messages = []
    for size in sizes:
        payload = torch.zeros(size, dtype=torch.uint8, device=device)
        round_trips = _measure_round_trip(end, payload, effort, leads, at_once=False)
        one_way = typical_duration([seconds / 2 for seconds in round_trips])
        both_ways = typical_duration(_measure_round_trip(end, payload, effort, leads, at_once=True))
        # The receiver computes for as long as the leading end measured one way.
        one_way_seconds = _send_number(end, one_way.seconds, leads)
        busy = _measure_while_computing(end, payload, effort, leads, one_way_seconds, compute)
        receiver_busy = _send_number(end, busy, not leads)
        if leads:
            messages.append(
                MessageCost(
                    num_bytes=size,
                    one_way=one_way,
                    both_ways=max(both_ways, one_way, key=lambda d: d.seconds),
                    sender_seconds=min(busy, one_way.seconds),
                    receiver_seconds=receiver_busy,
                )
            )
    return LinkCost(tuple(messages)) if leads else None


def _measure_round_trip(
    end: LinkEndpoint, payload: Tensor, effort: Effort, leads: bool, *, at_once: bool
) -> list[float]:
    """Return the seconds of round trips; `at_once`: both ends send before they receive."""

    def run() -> float:
        start = time.perf_counter()
        if leads or at_once:
            end.send([payload])
        _take_bytes(end, payload.device)
        if not leads and not at_once:
            end.send([payload])
        return time.perf_counter() - start

    return _repeat(end, run, effort, leads)


def _measure_while_computing(
    end: LinkEndpoint,
    payload: Tensor,
    effort: Effort,
    leads: bool,
    one_way_seconds: float,
    compute: Callable[[], object],
) -> float:
    """Return the seconds in which this end could not compute: sending if it leads, else receiving."""
    on_cpu = payload.device.type == "cpu"
    # On cores only CPU time counts, not what another process takes; a device makes the thread wait.
    clock = time.thread_time if on_cpu else time.perf_counter

    def other_threads() -> float:
        """Return the CPU seconds of all other threads so far."""
        return time.process_time() - time.thread_time() if on_cpu else 0.0

    def send() -> float:
        others = other_threads()
        start = clock()
        end.send([payload])
        busy = clock() - start
        while not end.ready:
            compute()
            end.poll()
        end.take()
        return busy + other_threads() - others

    def receive() -> float:
        others, busy = other_threads(), 0.0
        while not end.ready:
            until = time.perf_counter() + max(one_way_seconds, POLL_SECONDS)
            while time.perf_counter() < until:
                compute()
            start = clock()
            end.poll()
            busy += clock() - start
        start = clock()
        end.take()
        busy += clock() - start + other_threads() - others
        end.send([])
        return busy

    return median(_repeat(end, send if leads else receive, effort, leads))


def _repeat(end: LinkEndpoint, run: Callable[[], float], effort: Effort, leads: bool) -> list[float]:
    """Run as often on both ends as the leading end decides."""
    seconds = [run() for _ in range(effort.warmups)]
    count = _send_number(end, float(effort.runs(min(seconds))), leads)
    return [run() for _ in range(round(count))]


def _send_number(end: LinkEndpoint, number: float, sends: bool) -> float:
    """Send a number, or receive the one that the other end sends; both ends return the same number."""
    if sends:
        end.send([torch.tensor([number], dtype=torch.float64)])
        return number
    return float(_take(end)[0].item())


def _take(end: LinkEndpoint) -> list[Tensor]:
    while not end.ready:
        end.wait()
    return end.take()


def _take_bytes(end: LinkEndpoint, device: torch.device) -> None:
    """Take a message and wait for its bytes: a device may copy them after the message was announced."""
    _take(end)
    stopwatch_for(device).synchronize()


def _small_computation() -> Callable[[], object]:
    """Return a function that computes for a few microseconds."""
    matrix = torch.full((64, 64), 0.01)
    return partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
