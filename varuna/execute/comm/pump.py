"""Background thread that moves bytes of the links while the computing thread computes:

    frames that did not fit the kernel's buffers      the pump sends them
    links that carry large messages                   the pump reads them, so that the sender can go on
    messages held back on purpose (`delay`)           the pump waits for their time

While the computing thread waits, it reads itself and the pump does not.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable

from varuna.execute.comm.link import PeerLink

GOODBYE_SECONDS = 5.0
"""`finish` tries at most this long to deliver messages that a slow peer has not accepted yet."""


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
