"""A word from any rank at any moment, on which all ranks act at one and the same step boundary.

    any moment         SIGUSR1, or on_demand_checkpoint(store) ──► kept on this rank
    during every step  the sum of losses tells it along        ──► all ranks know that some rank has asked
    next call of step  what was asked, gathered ──► decide ──► save, call the script's handler, or leave

Nothing is done when the signal comes: this rank may be in the middle of a step, and the others may
not have heard of it.
"""

import atexit
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from varuna.environment import VarunaEnvironment, variable_name
from varuna.errors import CheckpointError
from varuna.morph.run.worker import early_signal

STORE_VARIABLE = variable_name("checkpoint_store")
USR1: int | None = getattr(signal, "SIGUSR1", None)  # not every platform has it

NO_STORE = (
    "SIGUSR1: nothing is saved, because no checkpoint has been saved or loaded yet that would say where; "
    f"training goes on (set {STORE_VARIABLE} to a folder, or set a handler of SIGUSR1 on every rank that "
    "calls model.on_demand_checkpoint(folder) and exits)"
)
NOT_EVERYWHERE = (
    "SIGUSR1: only some ranks have a handler of the script's own; none of them is called, all ranks save "
    "and exit (set the handler on every rank, or on none)"
)

log = logging.getLogger("varuna")

# What signal.getsignal wraps: before Python 3.12 the wrapper takes 2 µs to see that a function is no number.
_getsignal: Callable[[int], Any] = getattr(signal, "_signal", signal).getsignal


# ---------------------------------------------------------------- deciding


@dataclass(frozen=True)
class Word:
    """What one rank says at the boundary."""

    signalled: bool
    has_handler: bool  # of the script's own
    store: str | None  # where it was asked to save
    usual_store: str | None  # where it saves unless told otherwise
    due: str | None = None  # where to save though nobody has asked: it is time
    has_room: bool = True  # for a copy of its state, so that it can be saved while training goes on


@dataclass(frozen=True)
class Verdict:
    """What all ranks do, in this order."""

    complaint: str = ""
    save_to: str | None = None
    call_handler: bool = False
    leave: bool = False
    keep_in: str | None = None  # a save that nobody asked for
    in_background: bool = False


def decide(words: Sequence[Word]) -> Verdict:
    """From the words of all ranks, in their order; so it is the same on each of them."""
    named = _first(word.store for word in words)
    if not any(word.signalled for word in words):
        due = _first(word.due for word in words)
        if named is not None or due is None:
            return Verdict(save_to=named)
        return Verdict(keep_in=due, in_background=all(word.has_room for word in words))
    if all(word.has_handler for word in words):
        return Verdict(save_to=named, call_handler=True)
    store = named or _first(word.usual_store for word in words)
    if store is None:
        return Verdict(NO_STORE)
    some_have_one = any(word.has_handler for word in words)
    return Verdict(NOT_EVERYWHERE if some_have_one else "", save_to=store, leave=True)


def _first(stores: Iterable[str | None]) -> str | None:
    return next((store for store in stores if store is not None), None)


# ---------------------------------------------------------------- one wrapped model


@dataclass(eq=False)
class Attention:
    """What this rank has been asked for and not done yet; and the doing, together with all ranks."""

    _asks: deque[str | None] = field(default_factory=deque)  # stores to save to; None stands for the signal
    _acting: int | None = None  # the thread that runs the script's handler

    def ask(self, store: str | os.PathLike[str] | None = None) -> None:
        """Takes no lock, for it runs in signal handlers; and a deque loses nothing to another thread."""
        self._asks.append(None if store is None else os.fspath(store))

    def asked(self) -> bool:
        return bool(self._asks)

    @property
    def at_boundary(self) -> bool:
        """Whether the caller is the script's handler, which all ranks run now."""
        return self._acting == threading.get_ident()

    def act(
        self,
        gather: Callable[[Word], Sequence[Word]],
        *,
        save: Callable[[str, bool], "Future[Any]"],
        keep: Callable[[str, bool], None],
        usual_store: str | None,
        due: str | None,
        has_room: bool,
        leave: Callable[[], None],
    ) -> None:
        """All ranks call it, between two steps. Raises SystemExit where the job is to end."""
        asks = self._take()
        word = Word(
            signalled=None in asks,
            has_handler=usr1.script_has_handler,
            store=_first(asks),
            usual_store=usual_store or VarunaEnvironment.read(os.environ).checkpoint_store,
            due=due,
            has_room=has_room,
        )
        verdict = decide(gather(word))
        if verdict.complaint:
            log.error(verdict.complaint)
        if verdict.keep_in is not None:
            keep(verdict.keep_in, verdict.in_background)
        saved = verdict.save_to is not None and _try_to_save(save, verdict.save_to, by_itself=verdict.leave)
        if verdict.call_handler:
            self._call_handler()
        if verdict.leave and saved:
            log.warning("SIGUSR1: all is saved to %s; this rank ends", verdict.save_to)
            usr1.script_handler = signal.SIG_IGN  # one more on the way out must not kill
            leave()
            raise SystemExit(0)

    def _take(self) -> list[str | None]:
        # One by one: a signal that comes in between must be among them, or stay for the next boundary.
        return [self._asks.popleft() for _ in range(len(self._asks))]

    def _call_handler(self) -> None:
        self._acting = threading.get_ident()
        try:
            usr1.script_handler(USR1, sys._getframe())
        finally:
            self._acting = None
        # A signal that came meanwhile has been answered; so has one that the handler handed on to ours.
        self._asks.extend(ask for ask in self._take() if ask is not None)


def _try_to_save(save: Callable[[str, bool], "Future[Any]"], store: str, *, by_itself: bool) -> bool:
    try:
        save(store, by_itself).result()
    except CheckpointError as error:  # the same on all ranks, and no reason to lose what is in memory
        log.error("no checkpoint on demand, training goes on: %s", error)
        return False
    return True


# ---------------------------------------------------------------- the signal, of which a process has one


class Usr1:
    """SIGUSR1 in this process: held back while a wrapped model is open, else as the script has it."""

    def __init__(self) -> None:
        self.script_handler: Any = signal.SIG_DFL
        self._listeners: list[Attention] = []
        self._ours = self._notice  # one object, to be recognised by

    @property
    def script_has_handler(self) -> bool:
        return callable(self.script_handler) and self.script_handler is not early_signal

    def tell(self, attention: Attention) -> None:
        """From now on of every signal, until `release` or until another model is wrapped."""
        if not self._listeners:
            atexit.register(self._ignore)
        self._listeners.append(attention)
        self.hold()
        if early_signal.came:
            early_signal.came = False
            attention.ask()

    def hold(self) -> None:
        """Takes the signal back where the script has set a handler since: that waits for a boundary too."""
        if USR1 is None:
            return
        current = _getsignal(USR1)
        if current is self._ours or current is None:  # None: a handler that is not Python's
            return
        self.script_handler = current
        if _in_main_thread():  # Python lets no other thread set handlers
            signal.signal(USR1, self._ours)
            signal.siginterrupt(USR1, False)  # whoever waits may wait on: the signal is in no hurry

    def release(self, attention: Attention) -> None:
        """Hands the signal back to the script with the last model."""
        if attention not in self._listeners:
            return
        self._listeners.remove(attention)
        if not self._listeners:
            atexit.unregister(self._ignore)
            if USR1 is not None and _getsignal(USR1) is self._ours and _in_main_thread():
                signal.signal(USR1, self.script_handler)
                self.script_handler = signal.SIG_DFL

    def _notice(self, signum: int, frame: FrameType | None) -> None:
        if self._listeners:
            self._listeners[-1].ask()
        elif callable(self.script_handler):  # the last model was let go of outside the main thread
            self.script_handler(signum, frame)

    def _ignore(self) -> None:
        """At the very end Python gives up its handlers, and a late signal would kill what has ended well."""
        if USR1 is not None and _getsignal(USR1) is self._ours:
            signal.signal(USR1, signal.SIG_IGN)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


usr1 = Usr1()
