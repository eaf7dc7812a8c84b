"""All links of a rank: connects them, and waits for any of them.

The computing thread sends what fits the kernel's buffers at once, and reads the sockets in `poll` and `wait`.
So a small message needs no thread switch. The pump, a background thread, does the rest (`pump.py`).
"""

import atexit
import functools
import math
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Mapping

import torch

from varuna.execute.comm.address import CONNECT_SECONDS, Exchange, connect_sockets
from varuna.execute.comm.link import Delay, PeerLink
from varuna.execute.comm.pump import Pump, Wakeup

DEVICE_POLL_SECONDS = 20e-6
"""Interval between polls of a device that fills a message, which wakes no thread."""


def connect(
    rank: int,
    peers: Mapping[int, str],
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    key: bytes | None = None,
    unix: bool = True,
    device: torch.device | str = "cpu",
    delay: Delay | None = None,
    timeout_seconds: float = CONNECT_SECONDS,
    has_order: Callable[[], bool] | None = None,
) -> "PeerNetwork":
    """Connect this rank to its peers, given as rank → name of the rank in errors.

    Every rank must call it, with or without peers, because `exchange` gathers from all ranks. `host` is this
    machine's address as the others reach it (see `own_address`), `key` a secret that only these ranks know.
    """
    sockets = connect_sockets(
        *(rank, peers, exchange),
        host=host,
        key=key,
        unix=unix,
        timeout_seconds=timeout_seconds,
        has_order=has_order,
    )
    return PeerNetwork(sockets, peers, device=torch.device(device), delay=delay)


class PeerNetwork:
    """All links of one rank: `links[peer].send`, `.ready`, `.take`; and `wait` for any of them.

    Only the computing thread may send, take, poll and wait. Any thread may `wake`.
    """

    def __init__(
        self,
        sockets: Mapping[int, socket.socket],
        names: Mapping[int, str],
        *,
        device: torch.device,
        delay: Delay | None,
    ) -> None:
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

    @property
    def has_ended_peer(self) -> bool:
        """Return whether a peer has said goodbye: its script has ended, and it was not lost."""
        self._read(0)
        return any(link.ended for link in self.links.values())

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

    def abandon(self) -> None:
        """Close all files and threads without a goodbye. A peer may not read any more."""
        for link in self.links.values():
            link.lost = link.lost or "this rank has abandoned its step"
        self.close()

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
        for link in self.links.values():
            if link.bulky:
                self._pump.read(link, False)
        # From here on the pump wakes this thread; check once more for what it delivered before.
        self._waiting = True
        try:
            while True:
                # Before the count, because a message may be filled in between.
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
