"""Waits for the orders of the manager: at a step boundary, as a joiner, and after the loss of a peer."""

import time
from typing import TYPE_CHECKING

from varuna.errors import WorkerError
from varuna.train.hot.morph import morph
from varuna.types import MorphOrder

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

POLL_SECONDS = 1e-3
ORDER_SECONDS = 30.0
"""At a step boundary, the orders of all ranks are on their way."""
JOIN_SECONDS = 3600.0
"""A joiner that is prepared waits this long. Its agent ends it earlier if the job does without it."""


def wait_for_order(model: "Varuna", seconds: float) -> MorphOrder:
    """Return the next order of this rank. Raise WorkerError if none comes in time."""
    deadline = time.monotonic() + seconds
    while not model._orders.is_pending:
        if time.monotonic() > deadline:
            raise WorkerError(f"this worker has waited {seconds:g} s for an order of the manager")
        time.sleep(POLL_SECONDS)
    return model._orders.take()


def follow_order(model: "Varuna") -> None:
    """Enter the next generation, together with all other ranks."""
    morph(model, wait_for_order(model, ORDER_SECONDS))


def join(model: "Varuna") -> None:
    """Tell the manager that this worker is prepared, and enter the running job at its next step boundary."""
    model._progress.waits(True)
    morph(model, wait_for_order(model, JOIN_SECONDS))
