"""Continues a job after the loss of a rank: abandon the call, agree with the other survivors, run it again.

    step k: forwards, backwards, reductions ──► commit: one small message to all ranks ──► return, update

A rank takes part in the commit when its own part of the call is done: in a step, when its gradients are
whole. So if any survivor has finished the commit of a call, all survivors have their results: all finish the
call, and morph before the next one. If none has, all put back what the call has changed, morph, and run it
again: a step with their new shares.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from varuna.errors import PastCall, PeerLost, WorkerError
from varuna.execute.rebuild.generation import (
    SurvivorStep,
    abandon_generation,
    ended_by,
    exchange_steps,
    is_interruption,
)
from varuna.execute.rebuild.handover import Unit
from varuna.morph.state import MorphParts
from varuna.train.hot.copies import needs_copies
from varuna.train.hot.eligible import code_identity, why_not_hot
from varuna.train.hot.follow_orders import (
    JOIN_SECONDS,
    ORDER_SECONDS,
    wait_for_loss_order,
    wait_for_order,
)
from varuna.train.hot.hot_state import EarlierStep, Finished
from varuna.train.hot.morph import end_move, morph
from varuna.types import MorphOrder

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

T = TypeVar("T")
log = logging.getLogger("varuna")

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


def commits_calls(model: "Varuna") -> bool:
    """Return whether the ranks commit their calls: every stage has replicas. The same on all ranks."""
    replicated = all(len(row) > 1 for row in model._session.stage_map)
    return model._hot.waits_for_orders and replicated and not model._options.shard_optimizer


def survives_losses(model: "Varuna") -> bool:
    """Return whether survivors can go on: they commit their calls, or have copies. The same on all ranks."""
    return commits_calls(model) or (needs_copies(model) and not model._state_copies.is_off)


def can_go_on(model: "Varuna", error: PeerLost) -> bool:
    """Return whether this rank can go on in place after this loss."""
    if why_not_hot(model):
        return False
    log.warning("%s; this rank waits for an order to go on", str(error).splitlines()[0])
    return True


class Commit:
    """Makes the result of one call count on all ranks, when each has sent the others that its part is done.

    Between `begin` and `finish` a rank works on, and so it waits less for slower ones.
    """

    def __init__(self, model: "Varuna") -> None:
        self._model = model
        self._has_begun = False

    def begin(self) -> None:
        """Tell the other ranks that this one needs none of them any more in this call."""
        self._model._session.start_barrier()
        self._has_begun = True

    def finish(self, value: T) -> T:
        """Wait for the other ranks: from now on, the result counts on all ranks."""
        session, hot = self._model._session, self._model._hot
        hot.uncommitted = Finished(value)
        if not self._has_begun:
            self.begin()
        session.finish_barrier()
        hot.uncommitted = None
        session.num_commits += 1
        return value


@contextmanager
def expecting_losses(model: "Varuna") -> Iterator[None]:
    """Do not search for the cause of a lost connection inside the block: the manager knows it."""
    waiter = model._session.waiter
    assert waiter is not None, "a job with replicas has several ranks"
    waiter.survives = True
    try:
        yield
    finally:
        waiter.survives = False


def check_for_order(model: "Varuna") -> None:
    """Raise PeerLost if the manager has lost ranks since the last call."""
    if model._session.waiter is not None:
        model._session.waiter.check_order()


def follow_order(model: "Varuna", seconds: float = ORDER_SECONDS) -> None:
    """Enter the next generation, together with all other ranks, which get their orders within `seconds`."""
    order = wait_for_order(model, seconds)
    if order.lost and order.old_rank is not None:  # lost after all had agreed to follow an earlier order
        _rejoin(model, order, None, MorphParts(), between=True)
    else:
        carry_out(model, order)


def join(model: "Varuna") -> None:
    """Tell the manager that this worker is prepared, and enter the running job at its next step boundary."""
    model._progress.runs(code_identity(model))
    model._progress.waits(True)
    follow_order(model, JOIN_SECONDS)
    model._hot.has_joined = True


def carry_out(
    model: "Varuna",
    order: MorphOrder,
    parts: MorphParts | None = None,
    *,
    copied: Mapping[str, Unit] | None = None,
) -> None:
    """Enter the next generation. If more ranks are lost meanwhile, enter the one after it.

    `copied`: state before an earlier step, to which all ranks go back; then they go back again. Else, a rank
    still has the state of the last layout, or has all of the next one (`HotState.move`). The values are the
    same, so the order for the generation after it hands over what each rank has.
    """
    try:
        with ended_by(lambda: model._orders.abandons):
            morph(model, order, parts, copied=copied)
    except Exception as error:
        if not is_interruption(error) or order.rank is None:
            raise
        log.warning("the morph to generation %d was interrupted: %s", order.generation, error)
        recover(model, error, between=copied is None)


def enter_pending(model: "Varuna") -> None:
    """Carry out an order that waits for the end of an interrupted call."""
    if model._hot.pending_order is None:
        return
    pending, model._hot.pending_order = model._hot.pending_order, None
    if model._orders.abandons:  # more ranks were lost
        recover(model, PeerLost("more ranks were lost"), between=True)
    else:
        model._progress.waits(True)
        carry_out(model, pending)


def choose_earlier_step(
    model: "Varuna", order: MorphOrder, steps: Sequence[SurvivorStep], parts: MorphParts
) -> EarlierStep:
    """Return the newest step of which all survivors have copies."""
    members = [set(step.copied) for step in steps if not step.joins]
    common = members[0].intersection(*members[1:]) if members else set()
    if not common:
        raise PeerLost("the survivors of a lost rank have no copies of one step (the job must restart)")
    step = max(common)
    log.warning("going back from step %d to the copies of step %d", model._trainer.iteration, step)
    return EarlierStep(step, order, model._state_copies.units_at(step), parts)


def go_back(model: "Varuna") -> None:
    """Enter the next generation at an earlier step, if the ranks have agreed on one."""
    earlier, model._hot.going_back = model._hot.going_back, None
    if earlier is None:
        return
    if model._orders.abandons:  # more ranks were lost
        recover(model, PeerLost("more ranks were lost"))
    else:
        model._progress.waits(True)
        carry_out(model, earlier.order, earlier.parts, copied=earlier.copied)


def refuse_while_going_back(model: "Varuna") -> None:
    """Raise PeerLost if this call comes between a step that was not trained and the next batch.

    The ranks may be in different steps of the loop, so not all of them make this call.
    """
    if (earlier := model._hot.going_back) is not None:
        raise PeerLost(
            f"a rank was lost, and the others go back to step {earlier.step} at the next batch, but the "
            "script makes another call of the model first (the job restarts from its store; to go on in "
            "place, skip the rest of the loop after a step that returns overflow=True)"
        )


def refuse_past_calls(model: "Varuna") -> None:
    """Raise PastCall if a joiner makes a call after a loop that was over before it joined.

    The other ranks have made this call long ago: now, each would wait for another call.
    """
    if (end := model._hot.passed_end) is not None:
        raise PastCall(
            f"this rank joined the job at step {model.iteration}, and makes a call that comes after step "
            f"{end} in the script: the others have made it before (begin with the present epoch, for example "
            "`for epoch in range(model.iteration // steps_per_epoch, epochs)`)"
        )


def recover(
    model: "Varuna",
    error: Exception,
    backup: StepBackup | None = None,
    *,
    between: bool = False,
    in_step: bool = False,
) -> Finished[Any] | None:
    """Wait for an order, and agree with the other survivors.

    Returns the result of the interrupted call if it counts: then this rank morphs before its next call.
    Returns None if this rank has morphed, and must run the call again. Raises the error if no order comes.
    `in_step`: the script is in the middle of a step. If the ranks go back to an earlier one, this rank does
    so before its next batch (`HotState.going_back`), because the script knows the number of this one.
    """
    noticed = time.perf_counter()
    model._progress.waits(True)  # the manager hears of it before it gives the order
    try:
        order = wait_for_loss_order(model, LOSS_SECONDS)
    except WorkerError:
        raise error from None
    parts = MorphParts(waited=time.perf_counter() - noticed)
    return _rejoin(model, order, backup, parts, between=between, in_step=in_step)


def _rejoin(
    model: "Varuna",
    order: MorphOrder,
    backup: StepBackup | None,
    parts: MorphParts,
    *,
    between: bool,
    in_step: bool = False,
) -> Finished[Any] | None:
    started, session = time.perf_counter(), model._session
    model._progress.waits(True)
    finished, model._hot.uncommitted = model._hot.uncommitted, None
    abandon_generation(session, model._trainer.reducer.unfinished_works())
    model._saver.lose_ranks()
    copied = model._state_copies.steps()
    between = between or commits_calls(model)
    joins = model._hot.joins
    own = SurvivorStep(model._hot.generation, session.num_commits, between or joins, copied, joins)
    try:
        with ended_by(lambda: model._orders.abandons):
            # Another survivor may be in a long micro-batch, or between two steps, and notice the loss later.
            steps = exchange_steps(order, own)
    except Exception as error:
        if not is_interruption(error):
            raise
        model._hot.uncommitted = finished
        return recover(model, error, backup, between=between, in_step=in_step)
    together = all(step.between for step in steps)
    if (move := model._hot.move) is not None:
        end_move(model, counts=together and any(step.generation == move.generation for step in steps))
    parts.rebuild = time.perf_counter() - started
    if not together and joins:  # it takes the earlier state of the others
        carry_out(model, order, parts, copied={})
        return None
    if not together:
        model._hot.going_back = choose_earlier_step(model, order, steps, parts)
        if in_step:
            model._progress.waits(False)
            model._progress.meets(False)
        else:
            go_back(model)
        return None
    if is_behind(own, steps):
        if finished is None:
            raise WorkerError(f"another rank has finished call {own.calls}, which is not complete here")
        session.num_commits += 1
        model._hot.pending_order = order
        model._progress.waits(False)
        return finished
    if backup is not None:
        backup.restore(model)
    carry_out(model, order, parts)
    return None


def is_behind(own: SurvivorStep, steps: Sequence[SurvivorStep]) -> bool:
    """Return whether another survivor has finished the call in which this rank was interrupted.

    A generation begins when all its ranks have entered it. So if ranks have reached different generations,
    none has finished a call of the newest one, and all are between the same two calls.
    """
    generation, calls = max((step.generation, step.calls) for step in steps)
    return own.generation == generation and own.calls < calls
