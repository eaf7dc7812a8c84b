"""Waits for other ranks and never hangs: a wait ends with success, or with an error that names the cause.

A rank waits for tensors from adjacent stages and for collectives. An arrival, a finished collective, an
error on the board, or the timeout ends the wait.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch.distributed as dist

from varuna.errors import PeerLost, WorkerError
from varuna.execute.comm.board import StatusBoard
from varuna.execute.comm.frame_socket import describe_end
from varuna.execute.comm.network import PeerNetwork

ORDER_SECONDS = 0.005
"""While a rank waits, it looks this often for an order of the manager to go on without lost ranks."""
CALL_SECONDS = 1.0
"""After this long, a waiting rank compares its call with those of other waiting ranks."""
CAUSE_SECONDS = 2.0
"""After a broken connection, wait this long for the failed rank to post its error."""
DEVICE_POLL_SECONDS = 50e-6
"""Interval between polls of a device, which cannot wake a thread."""
POLLS_PER_LINK_CHECK = 40
"""Check the links after this many polls of a device: it may wait for a process that is gone."""
ABANDONED_SECONDS = 3.0
"""An abandoned collective needs at most this long to notice that a peer has ended."""
SPIN_SECONDS = 100e-6
"""A rank that waits for memory of another one looks all the time for so long: a sleep takes as long."""
LATE_SHARE = 1 / 64
"""Later, such a wait is late by at most this share of itself."""


class Waiter:
    """Waits on behalf of one rank. Raises the error that explains why a wait cannot succeed."""

    def __init__(self, network: PeerNetwork, board: StatusBoard, *, timeout_seconds: float) -> None:
        self.network = network
        self.board = board
        self.timeout_seconds = timeout_seconds
        self.failure: WorkerError | None = None  # set by the board's watcher thread
        self.call = ""  # the current call of the script that all ranks must make
        self.call_number = 0
        self.survives = False  # the caller handles PeerLost and goes on without the lost rank
        self.has_order: Callable[[], bool] | None = None  # the manager has ended the current wait
        self._patience = 1.0
        self._has_ended: Callable[[], bool] | None = None  # of a collective that may have been abandoned

    def listen(self, has_order: Callable[[], bool] | None) -> None:
        """End all waits as soon as the manager has lost ranks."""
        self.has_order = has_order
        if has_order is not None:
            self.board.interrupt_with(has_order)

    @contextmanager
    def patient(self, factor: float) -> Iterator[None]:
        """Multiply timeouts by `factor` inside the block."""
        before, self._patience = self._patience, max(factor, self._patience)
        try:
            yield
        finally:
            self._patience = before

    def fail(self, error: WorkerError) -> None:
        """End the current wait and all later ones with the error of another rank. Any thread may call it."""
        self.failure = error
        self.network.wake()

    def until(
        self,
        ready: Callable[[], bool],
        what: Callable[[], str],
        pause: Callable[[float], object] | None = None,
    ) -> None:
        """Wait until `ready()`. `what` describes the wait for other ranks, if it takes long.

        `pause(seconds)` sleeps until there is something new; None: the network wakes this thread.
        """
        pause = pause or self.network.wait
        timeout = self.timeout_seconds * self._patience
        deadline = time.monotonic() + timeout
        compare_at = deadline - timeout + CALL_SECONDS
        noted = False
        try:
            while not ready():
                if self.failure is not None:
                    raise self.failure
                self.check_order()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.board.find_hanging_rank()
                if deadline - left >= compare_at:
                    compare_at = deadline
                    self._compare_call()
                # Ranks that wait say so on the board after a third of the timeout: they are not the cause.
                if not noted and left <= timeout * 2 / 3:
                    self.board.set_waiting(what())
                    noted = True
                seconds = min(left, timeout / 3, compare_at - deadline + left)
                pause(seconds if self.has_order is None else min(seconds, ORDER_SECONDS))
        except (OSError, RuntimeError) as error:
            # The note stays on the board, so that other ranks do not blame this one.
            self.raise_cause(error)
        if noted:
            self.board.set_waiting(None)

    def for_work(self, work: dist.Work, what: Callable[[], str]) -> None:
        """Wait for a collective that was started with `async_op=True`."""
        future = work.get_future()
        if not future.done():
            future.add_done_callback(lambda _: self.network.wake())
            self._has_ended = future.done
            self.until(future.done, what)
            self._has_ended = None
        try:
            work.wait()
        except RuntimeError as error:
            self.raise_cause(error)

    def for_memory(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `ready()` by what other processes write to shared memory: that wakes no thread."""
        started = time.monotonic()
        while not ready():
            if time.monotonic() - started > SPIN_SECONDS:
                break
            os.sched_yield()

        def pause(seconds: float) -> None:
            self.network.wait(0)  # raises if a link has lost its peer
            so_far = time.monotonic() - started
            time.sleep(min(seconds, max(DEVICE_POLL_SECONDS, LATE_SHARE * so_far)))

        self.until(ready, what, pause)

    def for_device(self, done: Callable[[], bool]) -> None:
        """Wait for work that was queued on a device. The device may itself wait for another process."""
        started = time.monotonic()
        deadline = started + self.timeout_seconds * self._patience
        compare_at = started + CALL_SECONDS
        polls = 0
        while not done():
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > compare_at:
                compare_at = deadline
                self._compare_call()
            if time.monotonic() > deadline:
                raise self.board.find_hanging_rank()
            polls += 1
            if polls % POLLS_PER_LINK_CHECK:
                time.sleep(DEVICE_POLL_SECONDS)
                continue
            self.check_order()
            try:
                self.network.wait(0)
            except (OSError, RuntimeError) as error:
                self.raise_cause(error)

    def check_order(self) -> None:
        """Raise PeerLost if the manager has lost ranks: this rank may wait for them forever."""
        if self.has_order is not None and self.has_order():
            raise PeerLost("the manager has ordered this rank to go on without lost ranks")

    def _compare_call(self) -> None:
        """Raise if another rank waits in another call than this rank."""
        error = self.board.compare_call(self.call_number, self.call) if self.call else None
        if error is not None:
            raise error

    def drain_abandoned(self, works: Sequence[dist.Work] = (), seconds: float = ABANDONED_SECONDS) -> bool:
        """Wait until abandoned collectives no longer write to their tensors. Return False if some may.

        One that fails after the interpreter has ended would call into it and abort the process.
        `works` were started and not waited for. Gloo forgets an operation whose connection ends in the middle
        of a message: it stays until its own timeout.
        """
        ended = [work.get_future().done for work in works]
        if self._has_ended is not None:
            ended.append(self._has_ended)
        deadline = time.monotonic() + seconds
        while not all(done() for done in ended):
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)
        return True

    def raise_cause(self, error: Exception) -> NoReturn:
        """Raise the error that another rank posts soon, if any: a broken connection is only a symptom."""
        if isinstance(error, WorkerError) and not isinstance(error, PeerLost):
            raise error
        if self.survives and not self.network.has_ended_peer:
            raise (
                error if isinstance(error, PeerLost) else PeerLost(f"another rank ended: {error}")
            ) from error
        self._compare_call()
        posted = self.failure or self.board.read_error(wait_seconds=CAUSE_SECONDS)
        if posted is not None:
            raise posted from error
        if isinstance(error, PeerLost):
            raise error
        self.network.wait(0)  # raises if a link has lost its peer
        ended = " and ".join(map(self.board.describe, self.board.find_ended_ranks())) or "another rank"
        raise PeerLost(f"{describe_end(ended)}: {error}") from error
