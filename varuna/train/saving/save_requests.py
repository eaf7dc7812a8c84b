"""Save requests: any rank can get one at any moment; all ranks act on it at the same step boundary.

    any moment         SIGUSR1, or on_demand_checkpoint(store)  -> stored on this rank
    during every step  the ranks exchange whether any has a request
    next call of step  gather the requests, decide; then save, call the script's handler, or exit

Nothing happens at the signal itself: this rank may be inside of a step that the other ranks need.
"""

import atexit
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from varuna.environment import variable_name
from varuna.morph.run.worker import early_signal
from varuna.train.saving.autosave import AutosaveTimer

STORE_VARIABLE = variable_name("checkpoint_store")

NO_STORE = (
    "SIGUSR1: nothing was saved, because the job has no checkpoint store yet; training continues "
    f"(set {STORE_VARIABLE} to a folder, or set a SIGUSR1 handler on every rank that calls "
    "model.on_demand_checkpoint(folder) and exits)"
)
HANDLERS_DIFFER = (
    "SIGUSR1: only some ranks have a SIGUSR1 handler of the script; no handler is called, all ranks save "
    "and exit (set the handler on every rank, or on none)"
)

# Before Python 3.12 signal.getsignal adds 2 µs.
_getsignal: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal


@dataclass(frozen=True)
class RankRequest:
    """The requests of one rank at a step boundary."""

    signalled: bool
    has_handler: bool  # the script has its own SIGUSR1 handler
    store: str | None  # where a script wants to save
    default_store: str | None  # where to save after a signal
    autosave_store: str | None = None  # where an autosave is due
    fits_in_memory: bool = True  # a snapshot fits, so an autosave can run in the background
    has_order: bool = False  # the manager wants the ranks to enter the next generation
    groups: str | None = None  # hash of the optimizer's groups; None: this rank cannot morph in place


@dataclass(frozen=True)
class BoundaryDecision:
    """The actions of all ranks at a step boundary, in this order."""

    warning: str = ""
    save_to: str | None = None
    call_handler: bool = False
    exit: bool = False
    autosave_to: str | None = None
    in_background: bool = False
    signalled: bool = False  # the manager, or the user, wants the ranks to save and exit
    morph: bool = False  # enter the next generation


def decide(requests: Sequence[RankRequest]) -> BoundaryDecision:
    """Decide from the requests of all ranks, in the order of ranks; every rank gets the same result."""
    groups = {request.groups for request in requests}
    is_hot = len(groups) == 1 and None not in groups
    return replace(decide_saves(requests), morph=is_hot and any(request.has_order for request in requests))


def decide_saves(requests: Sequence[RankRequest]) -> BoundaryDecision:
    requested = _first(request.store for request in requests)
    if not any(request.signalled for request in requests):
        due = _first(request.autosave_store for request in requests)
        if requested is not None or due is None:
            return BoundaryDecision(save_to=requested)
        return BoundaryDecision(
            autosave_to=due, in_background=all(request.fits_in_memory for request in requests)
        )
    if all(request.has_handler for request in requests):
        return BoundaryDecision(save_to=requested, call_handler=True, signalled=True)
    store = requested or _first(request.default_store for request in requests)
    if store is None:
        return BoundaryDecision(NO_STORE, signalled=True)
    handlers_differ = any(request.has_handler for request in requests)
    warning = HANDLERS_DIFFER if handlers_differ else ""
    return BoundaryDecision(warning, save_to=store, exit=True, signalled=True)


def _first(stores: Iterable[str | None]) -> str | None:
    return next((store for store in stores if store is not None), None)


class SaveRequests:
    """The requests of this rank that are not done yet."""

    def __init__(self, autosave: AutosaveTimer) -> None:
        self.autosave = autosave
        self._queue: deque[str | None] = deque()  # stores to save to; None for the signal
        self._handler_thread: int | None = None  # the thread that runs the script's handler

    def add(self, store: str | os.PathLike[str] | None = None) -> None:
        """Add a request without a lock, because signal handlers call this; deque.append is thread-safe."""
        self._queue.append(None if store is None else os.fspath(store))

    def is_pending(self) -> bool:
        return bool(self._queue) or (self.autosave.store is not None and self.autosave.due)

    @property
    def in_handler(self) -> bool:
        """True if the caller is the script's handler, which all ranks run at this moment."""
        return self._handler_thread == threading.get_ident()

    def take(self, *, default_store: str | None, fits_in_memory: bool) -> RankRequest:
        """Remove and return all requests."""
        queue = self._take()
        return RankRequest(
            signalled=None in queue,
            has_handler=usr1.script_has_handler,
            store=_first(queue),
            default_store=default_store,
            autosave_store=self.autosave.store if self.autosave.due else None,
            fits_in_memory=fits_in_memory,
        )

    def put_back(self, request: RankRequest) -> None:
        """Add the requests again: a rank was lost before all had run them."""
        if request.signalled:
            self.add()
        if request.store is not None:
            self.add(request.store)

    def call_handler(self) -> None:
        self._handler_thread = threading.get_ident()
        try:
            usr1.script_handler(signal.SIGUSR1, sys._getframe())
        finally:
            self._handler_thread = None
        # Drop signals that came during the call, also if the handler has passed its signal on to ours.
        self._queue.extend(request for request in self._take() if request is not None)

    def _take(self) -> list[str | None]:
        # One by one: a signal in between is either among them or stays for the next boundary.
        return [self._queue.popleft() for _ in range(len(self._queue))]


class Usr1Signal:
    """SIGUSR1 in this process. While a wrapped model is open, the signal becomes a save request."""

    def __init__(self) -> None:
        self.script_handler: Any = signal.SIG_DFL
        self._listeners: list[SaveRequests] = []
        self._ours = self._handle  # one object, for comparison by identity

    @property
    def script_has_handler(self) -> bool:
        return callable(self.script_handler) and self.script_handler is not early_signal

    def listen(self, requests: SaveRequests) -> None:
        """Send signals to `requests`, until `release` or until another model is wrapped."""
        if not self._listeners:
            atexit.register(self._ignore)
        self._listeners.append(requests)
        self.hold()
        if early_signal.came:
            early_signal.came = False
            requests.add()

    def hold(self) -> None:
        """Install our handler again if the script has set one: the script's runs at a step boundary."""
        current = _getsignal(signal.SIGUSR1)
        if current is self._ours or current is None:  # None: a handler of C code
            return
        self.script_handler = current
        if _in_main_thread():  # Python allows no other thread to set handlers
            signal.signal(signal.SIGUSR1, self._ours)
            signal.siginterrupt(signal.SIGUSR1, False)  # do not interrupt system calls

    def release(self, requests: SaveRequests) -> None:
        """Stop sending signals to `requests`; after the last model, restore the script's handler."""
        if requests not in self._listeners:
            return
        self._listeners.remove(requests)
        if not self._listeners:
            atexit.unregister(self._ignore)
            if _getsignal(signal.SIGUSR1) is self._ours and _in_main_thread():
                signal.signal(signal.SIGUSR1, self.script_handler)
                self.script_handler = signal.SIG_DFL

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._listeners:
            self._listeners[-1].add()
        elif callable(self.script_handler):  # the last model was released outside of the main thread
            self.script_handler(signum, frame)

    def _ignore(self) -> None:
        """Ignore the signal at exit: Python drops its handlers then, and the default would kill."""
        if _getsignal(signal.SIGUSR1) is self._ours:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


usr1 = Usr1Signal()
