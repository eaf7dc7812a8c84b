"""SIGUSR1 during `train()`: the ranks save a checkpoint folder between two steps, and end."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from varuna.morph.run.worker import early_signal
from varuna.train.saving.save_requests import usr1


@contextmanager
def saving_on_signal(
    save_and_exit: Callable[[], None], *, is_wrapped: Callable[[], bool], is_managed: bool
) -> Iterator[None]:
    """Call `save_and_exit` on all ranks after a signal. After the block, the script's handler is back.

    A signal before the model is wrapped waits for its first step. Outside of a managed job, a script that
    handles or ignores the signal itself keeps doing so.
    """
    before = _script_handler()
    stays = before not in (signal.SIG_DFL, early_signal) and not is_managed
    if threading.current_thread() is not threading.main_thread() or before is None or stays:
        yield
        return

    def handle(number: int, frame: Any) -> None:
        if is_wrapped():
            save_and_exit()  # the wrapped model calls this between two steps
        else:
            early_signal(number, frame)

    if is_wrapped():
        _set_handler(handle)
    else:  # not through another wrapped model, which may make no step any more
        signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN:  # this process does not end by a signal
            _set_handler(before)


def ignore_signal() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _script_handler() -> Any:
    """Return the script's handler, which a wrapped model calls for it; None: a handler of C code."""
    current = signal.getsignal(signal.SIGUSR1)
    return usr1.script_handler if current is usr1._ours else current


def _set_handler(handler: Any) -> None:
    if signal.getsignal(signal.SIGUSR1) is usr1._ours:
        usr1.script_handler = handler
    else:
        signal.signal(signal.SIGUSR1, handler)
