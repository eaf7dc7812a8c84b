"""Waiting for others without hanging: every wait ends with what was waited for, or with a culprit.

A rank waits for its neighbours' tensors and for reductions. It is woken by an arrival, by the end
of a reduction, by another rank's error on the board, or by the timeout, and then knows whom to name.
"""

import time
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch.distributed as dist

from varuna.errors import PeerHangs, PeerLost, WorkerError

PATIENCE_SECONDS = 2.0
"""How long a broken connection waits for the error that broke it to be posted."""
NAP_SECONDS = 50e-6
"""Between two looks at a device, which rings no bell."""
GIVEN_UP_SECONDS = 3.0
"""How long a collective that was given up may take to notice that a peer has ended."""
LOOK_AROUND = 40
"""Naps between two looks at the links: a device may wait for a process that is gone."""


class Bell(Protocol):
    """Where the main thread sleeps: arrivals ring it, and so may any thread."""

    def wait(self, timeout: float | None) -> bool: ...
    def wake(self) -> None: ...


class Board(Protocol):
    """Where ranks tell each other of errors and of what they wait for."""

    def read(self, wait_seconds: float = 0) -> WorkerError | None: ...
    def waiting(self, what: str | None) -> None: ...
    def culprit(self) -> PeerHangs: ...


class Waiter:
    """Waits on behalf of one rank; raises the error that explains why there is no use in waiting on."""

    def __init__(self, bell: Bell, board: Board, *, timeout_seconds: float) -> None:
        self.bell = bell
        self.board = board
        self.timeout_seconds = timeout_seconds
        self.patience = (
            1.0  # raised for a step in which others may have long work of their own, such as compiling
        )
        self.failure: WorkerError | None = None  # set by the board's watcher
        self._given_up: Callable[[], bool] | None = None  # whether that collective has ended

    def fail(self, error: WorkerError) -> None:
        """Called from another thread: some rank has posted an error."""
        self.failure = error
        self.bell.wake()

    def until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Returns when `ready()`; `what` puts the wait into words, should it last."""
        timeout = self.timeout_seconds * self.patience
        deadline = time.monotonic() + timeout
        noted = False
        try:
            while not ready():
                if self.failure is not None:
                    raise self.failure
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.board.culprit()
                # After a third of the time the wait goes on the board: a culprit is one who does not wait.
                if not noted and left <= timeout * 2 / 3:
                    self.board.waiting(what())
                    noted = True
                self.bell.wait(min(left, timeout / 3))
        except (OSError, RuntimeError) as error:
            # The note stays: others who give up now must not take this rank for the culprit.
            self.reraise(error)
        if noted:
            self.board.waiting(None)

    def for_work(self, work: dist.Work, what: Callable[[], str]) -> None:
        """Waits for a collective that was started with `async_op=True`."""
        future = work.get_future()
        if not future.done():
            future.add_done_callback(lambda _: self.bell.wake())
            self._given_up = future.done
            self.until(future.done, what)
            self._given_up = None
        try:
            work.wait()
        except RuntimeError as error:
            self.reraise(error)

    def outlive(self) -> None:
        """At the end: a collective that failed after Python has would call into it, and abort the process."""
        deadline = time.monotonic() + GIVEN_UP_SECONDS
        while self._given_up is not None and not self._given_up() and time.monotonic() < deadline:
            time.sleep(0.01)

    def for_device(self, done: Callable[[], bool]) -> None:
        """Waits for work that was queued on a device, which in its turn may wait for another process's."""
        deadline = time.monotonic() + self.timeout_seconds * self.patience
        naps = 0
        while not done():
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise self.board.culprit()
            naps += 1
            if naps % LOOK_AROUND:
                time.sleep(NAP_SECONDS)
                continue
            try:
                self.bell.wait(0)
            except (OSError, RuntimeError) as error:
                self.reraise(error)

    def reraise(self, error: Exception) -> NoReturn:
        """A broken connection is a symptom: the posted error, if one comes soon, is the cause."""
        if isinstance(error, WorkerError) and not isinstance(error, PeerLost):
            raise error
        posted = self.failure or self.board.read(wait_seconds=PATIENCE_SECONDS)
        if posted is not None:
            raise posted from error
        if isinstance(error, PeerLost):
            raise error
        self.bell.wait(0)  # raises where a link has seen who is gone
        raise PeerLost(f"a peer is gone in a reduction: {error}") from error
