"""All links of a rank, and who moves their bytes.

The thread that computes does it itself wherever it can: it sends what fits the kernel's buffers at
once, and reads the sockets when it asks (`poll`) or has nothing else to do (`wait`). So a small
message costs neither a thread switch nor a fight for the interpreter's lock. A background thread,
the pump, stands in for it while it computes:

    what did not fit the kernel's buffers             the pump sends it
    links that carry big messages, while computing    the pump reads them, so that the sender gets on
    messages held back on purpose (`delay`)           the pump waits for their time

While the computing thread waits, the pump keeps its hands off the reading.
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
from types import TracebackType

import torch

from varuna.execute.comm.address import MEET_SECONDS, Exchange, meet
from varuna.execute.comm.link import Delay, Link

NAP_SECONDS = 20e-6
"""Between two looks at a device that fills a message, and rings no bell."""
GOODBYE_SECONDS = 5.0
"""How long `close` tries to hand over what was sent but not yet accepted by a slow peer."""


def connect(
    rank: int,
    peers: Mapping[int, str],
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    unix: bool = True,
    device: torch.device | str = "cpu",
    delay: Delay | None = None,
    timeout_seconds: float = MEET_SECONDS,
) -> "Network":
    """Links this rank to its peers, given as rank → how to name it in an error.

    A collective: every rank calls it, with or without peers, because `exchange` gathers from all.
    `host` is this machine's address as the others reach it (see `address_facing`).
    """
    met = meet(rank, peers, exchange, host=host, unix=unix, timeout_seconds=timeout_seconds)
    return Network(rank, met, peers, device=torch.device(device), delay=delay)


class Network:
    """What one rank needs of its neighbours: `links[peer].send`, `.ready`, `.take`, and a place to wait.

    Only one thread, the one that computes, may send, take, poll and wait; any thread may `wake`.
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
        self._pump = Pump(self._news_for_waiter)
        self.links = {
            peer: Link(
                sockets[peer], peer, names[peer], device=device, delay=delay, backlog=self._pump.send_rest
            )
            for peer in sorted(sockets)
        }
        self._by_fd = {link.socket.fileno(): link for link in self.links.values()}
        self._epoll = select.epoll()
        self._bell = Bell()
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        for fd in self._by_fd:
            self._epoll.register(fd, select.EPOLLIN)
        self._wakes = 0
        self._seen = 0
        self._waiting = False
        self._closed = False
        # A forked child (a data loader's worker) would keep our connections open after our death.
        os.register_at_fork(after_in_child=functools.partial(_forget_in_child, weakref.ref(self)))
        # A script that just ends, ends in order: ranks that are still at work must not think it killed.
        atexit.register(self.close)
        self._pump.start()

    def poll(self) -> None:
        """Takes in what has arrived; never waits."""
        self._take_in(0)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Sleeps until something has happened since the last `wait`: an arrival, a `wake`, a peer's end.

        False where the time passed without. Raises `PeerLost` where a peer is gone without a goodbye;
        one that said goodbye may be missed by nobody: whoever waits for it looks at its link's `over`.
        """
        if self._count() == self._seen:
            self._take_in(0)
        if self._count() == self._seen:
            self._raise_if_lost()
            self._sleep(math.inf if timeout_seconds is None else time.monotonic() + timeout_seconds)
        count = self._count()
        happened = count != self._seen
        self._seen = count
        if not any(link.ready for link in self.links.values()):  # else the last words come first
            self._raise_if_lost()
        return happened

    def wake(self) -> None:
        """Ends a `wait`, the present or the next one; from any thread, at any time."""
        self._wakes += 1
        self._bell.ring()

    @property
    def lost(self) -> list[int]:
        return [peer for peer, link in self.links.items() if link.lost is not None]

    def close(self) -> None:
        """Hands over what was sent, says goodbye, and leaves nothing behind."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        for link in self.links.values():
            link.say_goodbye()
        self._pump.finish(list(self.links.values()))
        self._bell.close()
        self._epoll.close()
        for link in self.links.values():
            link.socket.close()

    def __enter__(self) -> "Network":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self) -> int:
        """Changes whenever there is news; a sum, so that the two threads need no lock."""
        count = self._wakes
        for link in self.links.values():
            count += link.received - link.unripe + link.over
        return count

    def _raise_if_lost(self) -> None:
        for link in self.links.values():
            if link.lost is not None:
                raise link.error()

    def _news_for_waiter(self) -> None:
        if self._waiting:
            self._bell.ring()

    def _sleep(self, deadline: float) -> None:
        bulky = [link for link in self.links.values() if link.bulky]
        for link in bulky:
            self._pump.read(link, False)
        # From here on the pump rings for what it was about to deliver; so look again after saying so.
        self._waiting = True
        try:
            while True:
                naps = any(link.unripe for link in self.links.values())  # asked before the news: it may come
                left = deadline - time.monotonic()
                if self._count() != self._seen or left <= 0:
                    break
                self._take_in(left, naps=naps)
        finally:
            self._waiting = False
            for link in self.links.values():
                if link.bulky:
                    self._pump.read(link, True)

    def _take_in(self, seconds: float, *, naps: bool = False) -> None:
        if naps:
            select.select([self._epoll], [], [], min(seconds, NAP_SECONDS))
            seconds = 0
        for fd, _ in self._epoll.poll(None if seconds == math.inf else seconds):
            if fd == self._bell.fd:
                self._bell.clear()
                continue
            link = self._by_fd[fd]
            link.receive()
            if link.over:
                self._epoll.unregister(fd)
        for link in self.links.values():
            link.tidy()


class Pump:
    """The background thread. Asleep unless one of its three tasks is at hand."""

    def __init__(self, news: Callable[[], None]) -> None:
        self._news = news
        self._epoll = select.epoll()
        self._bell = Bell()
        self._epoll.register(self._bell.fd, select.EPOLLIN)
        self._links: dict[int, Link] = {}
        self._events: dict[int, int] = {}
        self._watching = threading.Lock()
        self._held_back: set[Link] = set()
        self._stop_seconds = math.inf
        self._finishing: list[Link] | None = None
        self._thread = threading.Thread(target=self._run, name="varuna-pump", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_rest(self, link: Link) -> None:
        """Sees to what a link could not send at once."""
        if link.due_seconds > time.monotonic():
            self._held_back.add(link)
            self._bell.ring()
        else:
            self._watch(link, select.EPOLLOUT, True)

    def read(self, link: Link, wanted: bool) -> None:
        self._watch(link, select.EPOLLIN, wanted and not link.over)

    def finish(self, links: list[Link]) -> None:
        """Sends all that is left, for a while, reading on so that nobody is stuck; then ends."""
        for link in links:
            self.read(link, True)
        self._finishing = links
        self._stop_seconds = time.monotonic() + GOODBYE_SECONDS
        self._bell.ring()
        self._thread.join()
        self._bell.close()
        self._epoll.close()

    def forget(self) -> None:
        """In a forked child, which has no such thread: closes the files."""
        self._bell.forget()
        self._epoll.close()

    def _watch(self, link: Link, event: int, wanted: bool) -> None:
        with self._watching:
            fd = link.socket.fileno()
            before = self._events.get(fd, 0)
            events = before | event if wanted else before & ~event
            if events == before:
                return
            self._events[fd] = events
            self._links[fd] = link
            # Even a watch for nothing reports a hang-up, over and over: so rather none.
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
                if fd == self._bell.fd:
                    self._bell.clear()
                    continue
                link = self._links[fd]
                if events & ~select.EPOLLOUT:
                    before = link.received + link.over
                    link.receive()
                    if link.over:
                        self._watch(link, select.EPOLLIN, False)
                    if link.received + link.over != before:
                        self._news()
                if events & ~select.EPOLLIN:
                    self._send(link)

    def _sleep(self, seconds: float) -> list[tuple[int, int]]:
        if seconds == math.inf:
            return self._epoll.poll()
        # epoll counts in milliseconds, too coarse for a delay; select on the epoll itself does not.
        select.select([self._epoll], [], [], max(seconds, 0))
        return self._epoll.poll(0)

    def _send(self, link: Link) -> None:
        link.flush()
        self._watch(link, select.EPOLLOUT, False)
        if link.unsent:  # or put there by the computing thread, in the meantime
            self.send_rest(link)


class Bell:
    """Wakes a thread that sleeps in epoll."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def ring(self) -> None:
        with self._lock:  # a late ring must not write to whatever has got our number since
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
        os.close(self.fd)  # without the lock: another thread may have held it at the fork, for good
        self.fd = -1


def _forget_in_child(reference: "weakref.ref[Network]") -> None:
    network = reference()
    if network is None or network._closed:
        return
    network._closed = True
    network._pump.forget()
    network._bell.forget()
    network._epoll.close()
    for link in network.links.values():
        link.socket.close()
