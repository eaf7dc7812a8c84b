"""Waits for the orders of the manager: at a step boundary, as a joiner, and after the loss of a peer."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from varuna.errors import WorkerError
from varuna.types import MorphOrder

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

POLL_SECONDS = 1e-3
ORDER_SECONDS = 60.0
"""At a step boundary, the orders of all ranks are on their way, unless the manager restarts."""
JOIN_SECONDS = 3600.0
"""A joiner that is prepared waits this long. Its agent ends it earlier if the job does without it."""


def wait_for_order(model: "Varuna", seconds: float) -> MorphOrder:
    """Return the next order of this rank. Raise WorkerError if none comes in time."""
    return _wait_for(model, lambda: model._orders.is_pending, seconds)


def wait_for_loss_order(model: "Varuna", seconds: float) -> MorphOrder:
    """Return the next order that names lost ranks: an earlier one cannot be carried out any more.

    It may name only joiners of an order that this rank has not taken. The ranks that have taken that one have
    left this rank, which therefore is here.
    """
    return _wait_for(model, lambda: model._orders.has_loss, seconds)


def _wait_for(model: "Varuna", is_there: Callable[[], bool], seconds: float) -> MorphOrder:
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            raise WorkerError(f"this worker has waited {seconds:g} s for an order of the manager")
        time.sleep(POLL_SECONDS)
    return model._orders.take()
