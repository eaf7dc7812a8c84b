"""All links of a rank, and the threads that move their bytes.

The computing thread does most of it: it sends what fits the kernel's buffers at once, and reads the sockets
in `poll` and `wait`. So a small message needs no thread switch and no contention for the interpreter lock. A
background thread, the pump, works while the computing thread computes:

    frames that did not fit the kernel's buffers      the pump sends them
    links that carry large messages                   the pump reads them, so that the sender can go on
    messages held back on purpose (`delay`)           the pump waits for their time

While the computing thread waits, the pump does not read.
"""

import atexit
import contextlib
import functools
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping

import torch

from varuna.execute.comm.address import CONNECT_SECONDS, Exchange, connect_sockets
from varuna.execute.comm.link import Delay, PeerLink

DEVICE_POLL_SECONDS = 20e-6
"""Interval between polls of a device that fills a message, which wakes no thread."""
GOODBYE_SECONDS = 5.0
"""`close` tries at most this long to deliver messages that a slow peer has not accepted yet."""


def connect(
    rank: int,
    peers: Mapping[int, str],
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    unix: bool = True,
    device: torch.device | str = "cpu",
    delay: Delay | None = None,
    timeout_seconds: float = CONNECT_SECONDS,
) -> "PeerNetwork":
    """Connect this rank to its peers, given as rank → name of the rank in errors.

    Every rank must call it, with or without peers, because `exchange` gathers from all ranks. `host` is this
    machine's address as the others reach it (see `own_address`).
    """
    sockets = connect_sockets(rank, peers, exchange, host=host, unix=unix, timeout_seconds=timeout_seconds)
    return PeerNetwork(rank, sockets, peers, device=torch.device(device), delay=delay)


class PeerNetwork:
    """All links of one rank: `links[peer].send`, `.ready`, `.take`; and `wait` for any of them.

    Only the computing thread may send, take, poll and wait. Any thread may `wake`.
    """

    def __init__(
        self,
        rank: int,
        sockets: Mapping[int, socket.socket],
        names: Mapping[int, str],
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - a value, never changed
        delay: Delay | None = None,
    ) -> None:
        self.rank = rank
        self._pump = Pump(self._wake_if_waiting)
        self.links = {
            peer: PeerLink(
                sockets[peer], peer, names[peer], device=device, delay=delay, on_backlog=self._pump.send_rest
            )
            for peer in sorted(sockets)
        }
        self._by_fd = {link.socket.fileno(): link for link in self.links.values()}
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        self._wakes = 0
        self._seen = 0
        self._waiting = False
        self._closed = False
        # A forked child (a data loader's worker) would keep the connections open after this process ends.
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))
        # A script that ends without `close` still says goodbye: other ranks must not think it was killed.
        atexit.register(self.close)
        self._pump.start()

    def poll(self) -> None:
        """Read what has arrived, without waiting."""
        self._read(0)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleep until an arrival, a `wake` or a peer's end since the last `wait`; False after the timeout.

        Raises `PeerLost` if a peer is gone without a goodbye. If a peer may end early, check its link's
        `over`.
        """
        if self._count() == self._seen:
            self._read(0)
        if self._count() == self._seen:
            self._raise_if_lost()
            self._sleep(math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds)
        count = self._count()
        happened = count != self._seen
        self._seen = count
        if not any(link.ready for link in self.links.values()):  # else take these messages first
            self._raise_if_lost()
        return happened

    def wake(self) -> None:
        """End the current or the next `wait`. Any thread may call it."""
        self._wakes += 1
        self._wakeup.set()

    def close(self) -> None:
        """Deliver pending messages, say goodbye, and close all files and threads."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for link in self.links.values():
            link.say_goodbye()
        self._pump.finish(list(self.links.values()))
        self._wakeup.close()
        self._epoll.close()
        for link in self.links.values():
            link.socket.close()

    def __enter__(self) -> "PeerNetwork":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self) -> int:
        """Return a number that changes with every event; a sum, so that the two threads need no lock."""
        count = self._wakes
        for link in self.links.values():
            count += link.received - link.num_unfilled + link.over
        return count

    def _raise_if_lost(self) -> None:
        for link in self.links.values():
            if link.lost is not None:
                raise link.error()

    def _wake_if_waiting(self) -> None:
        if self._waiting:
            self._wakeup.set()

    def _sleep(self, deadline: float) -> None:
        bulky = [link for link in self.links.values() if link.bulky]
        for link in bulky:
            self._pump.read(link, False)
        # From here on the pump wakes this thread; check once more for what it delivered before.
        self._waiting = True
        try:
            while True:
                polls = any(link.num_unfilled for link in self.links.values())
                left = deadline - time.monotonic()
                if self._count() != self._seen or left <= 0:
                    break
                self._read(left, polls=polls)
        finally:
            self._waiting = False
            for link in self.links.values():
                if link.bulky:
                    self._pump.read(link, True)

    def _read(self, seconds: float, *, polls: bool = False) -> None:
        if polls:
            select.select([self._epoll], [], [], min(seconds, DEVICE_POLL_SECONDS))
            seconds = 0
        for fd, _ in self._epoll.poll(None if seconds == math.inf else seconds):
            if fd == self._wakeup.fd:
                self._wakeup.clear()
                continue
            link = self._by_fd[fd]
            link.receive()
            if link.over:
                self._epoll.unregister(fd)
        for link in self.links.values():
            link.process_control()


class Pump:
    """Background thread that sleeps unless it has one of its three tasks."""

    def __init__(self, on_arrival: Callable[[], None]) -> None:
        self._on_arrival = on_arrival
        self._epoll = select.epoll()
        self._wakeup = Wakeup()
        self._epoll.register(self._wakeup.fd, select.EPOLLIN)
        self._links: dict[int, PeerLink] = {}
        self._events: dict[int, int] = {}
        self._watch_lock = threading.Lock()
        self._held_back: set[PeerLink] = set()
        self._stop_seconds = math.inf
        self._finishing: list[PeerLink] | None = None
        self._thread = threading.Thread(target=self._run, name="varuna-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_rest(self, link: PeerLink) -> None:
        """Send what a link could not send at once."""
        if link.due_seconds > time.monotonic():
            self._held_back.add(link)
            self._wakeup.set()
        else:
            self._watch(link, select.EPOLLOUT, True)

    def read(self, link: PeerLink, wanted: bool) -> None:
        self._watch(link, select.EPOLLIN, wanted and not link.over)

    def finish(self, links: list[PeerLink]) -> None:
        """Send the rest within `GOODBYE_SECONDS`, still reading so that no peer is blocked; then end."""
        for link in links:
            self.read(link, True)
        self._finishing = links
        self._stop_seconds = time.monotonic() + GOODBYE_SECONDS
        self._wakeup.set()
        self._thread.join()
        self._wakeup.close()
        self._epoll.close()

    def forget(self) -> None:
        """Close the files in a forked child, which has no such thread."""
        self._wakeup.forget()
        self._epoll.close()

    def _watch(self, link: PeerLink, event: int, wanted: bool) -> None:
        with self._watch_lock:
            fd = link.socket.fileno()
            before = self._events.get(fd, 0)
            events = before | event if wanted else before & ~event
            if events == before:
                return
            self._events[fd] = events
            self._links[fd] = link
            # Even a registration for no event reports a hang-up again and again: unregister instead.
            if not events:
                self._epoll.unregister(fd)
            elif before:
                self._epoll.modify(fd, events)
            else:
                self._epoll.register(fd, events)

    def _run(self) -> None:
        while True:
            now = time.monotonic()
            for link in list(self._held_back):
                if link.due_seconds <= now:
                    self._held_back.discard(link)
                    self._send(link)
            if now >= self._stop_seconds:
                return
            if self._finishing is not None and not any(
                link.unsent and not link.over for link in self._finishing
            ):
                return
            next_due = min([self._stop_seconds, *(link.due_seconds for link in self._held_back)])
            for fd, events in self._sleep(next_due - now):
                if fd == self._wakeup.fd:
                    self._wakeup.clear()
                    continue
                link = self._links[fd]
                if events & ~select.EPOLLOUT:
                    before = link.received + link.over
                    link.receive()
                    if link.over:
                        self._watch(link, select.EPOLLIN, False)
                    if link.received + link.over != before:
                        self._on_arrival()
                if events & ~select.EPOLLIN:
                    self._send(link)

    def _sleep(self, seconds: float) -> list[tuple[int, int]]:
        if seconds == math.inf:
            return self._epoll.poll()
        # epoll's timeout is in milliseconds, too coarse for a delay; select on the epoll is finer.
        select.select([self._epoll], [], [], max(seconds, 0))
        return self._epoll.poll(0)

    def _send(self, link: PeerLink) -> None:
        link.flush()
        self._watch(link, select.EPOLLOUT, False)
        if link.unsent:  # or queued by the computing thread meanwhile
            self.send_rest(link)


class Wakeup:
    """Wakes a thread that sleeps in epoll."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:  # a late call must not write to a file that got the same number
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1

    def forget(self) -> None:
        os.close(self.fd)  # without the lock: another thread may have held it at the fork
        self.fd = -1


def _forget_in_child(reference: "weakref.ref[PeerNetwork]") -> None:
    network = reference()
    if network is None or network._closed:
        return
    network._closed = True
    network._pump.forget()
    network._wakeup.forget()
    network._epoll.close()
    for link in network.links.values():
        link.socket.close()
