"""Continues a job after the loss of a rank: abandon the step, agree with the other survivors, run it again.

    step k: forwards, backwards, reductions ──► commit: one small message to all ranks ──► return, update

A rank takes part in the commit when its own gradients are whole. So if any survivor has finished the commit
of step k, the gradients of all survivors are whole: all finish step k, and morph before step k + 1. If none
has, all put back what the step has changed, morph, and run step k again with their new shares.
"""

import logging
from typing import TYPE_CHECKING

from varuna.errors import PeerLost, WorkerError
from varuna.execute.rebuild.generation import SurvivorStep, exchange_steps
from varuna.execute.update.reduce import StepTotals
from varuna.train.hot.eligible import why_not_hot
from varuna.train.hot.follow_orders import wait_for_order
from varuna.train.hot.morph import morph

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

log = logging.getLogger("varuna")

CAUSE_SECONDS = 0.2
"""After a broken connection, wait this long for an error of the failed rank: one that was killed has none."""
LOSS_SECONDS = 60.0
"""Time for the manager to notice the loss, to plan, and to give its orders."""


class StepBackup:
    """A copy of all that a step changes before its commit: earlier gradients, buffers, the loss scale."""

    def __init__(self, model: "Varuna") -> None:
        self._gradients = [(one, None if one.grad is None else one.grad.clone()) for one in model._weights]
        self._buffers = model._trainer.copy_buffers()
        self._loss_scale = model._loss_scale.state_dict()

    def restore(self, model: "Varuna") -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        model._trainer.restore_buffers(self._buffers)
        if model._loss_scale.checks_overflow:
            model._loss_scale.load_state_dict(self._loss_scale)


def survives_losses(model: "Varuna") -> bool:
    """Return whether the ranks commit each step: every stage has a replica to lose. The same on all ranks."""
    replicated = all(len(row) > 1 for row in model._session.stage_map)
    if not (model._waits_for_orders and replicated):
        return False
    if model._session.waiter is not None:
        model._session.waiter.cause_seconds = CAUSE_SECONDS
    return True


def note_loss(model: "Varuna", error: PeerLost) -> bool:
    """Tell the other survivors of a lost rank. Return False if this rank cannot go on in place."""
    board = model._session.board
    if board is None or why_not_hot(model):
        return False
    log.warning("%s; this rank waits for an order to go on without it", str(error).splitlines()[0])
    board.post_error(error, model._trainer.engine.where or "a step")  # they must not wait for the lost rank
    return True


def recover(model: "Varuna", error: PeerLost, backup: StepBackup | None) -> StepTotals | None:
    """Wait for an order, and agree with the other survivors.

    Returns the totals of the interrupted step if it counts: then this rank morphs before its next step.
    Returns None if this rank has morphed, and must run the step again. Raises the error if no order comes.
    """
    model._progress.waits(True)
    trainer = model._trainer
    try:
        order = wait_for_order(model, LOSS_SECONDS)
    except WorkerError:
        raise error from None
    own = SurvivorStep(trainer.iteration, trainer.uncommitted is not None)
    steps = exchange_steps(order, model._session.rank, own, seconds=LOSS_SECONDS)
    newest = max(step.iteration for step in steps)
    totals, trainer.uncommitted = trainer.uncommitted, None
    if own.iteration < newest:
        if totals is None:
            raise WorkerError(
                f"another rank has finished step {own.iteration}, whose gradients are not whole here"
            ) from error
        trainer.iteration += 1
        model._pending_order = order
        model._progress.waits(False)
        return totals
    if backup is not None:
        backup.restore(model)
    morph(model, order)
    return None
