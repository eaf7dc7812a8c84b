"""Runs the calls of a wrapped model, and runs a call again after a loss, in the next generation."""

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from varuna.capture.model.batch import Batch
from varuna.errors import PeerLost
from varuna.execute.update.clipping import ListedNorm, ModelNorm, NormMeasurement
from varuna.execute.update.reduce import StepTotals
from varuna.train.data import SampleOrder
from varuna.train.hot.copies import needs_copies
from varuna.train.hot.eligible import why_not_hot
from varuna.train.hot.fetch import Fetch, FetchedInputs, evaluated_share
from varuna.train.hot.morph import compare_groups
from varuna.train.hot.moving import hash_groups
from varuna.train.hot.recover import (
    Commit,
    StepBackup,
    can_go_on,
    check_for_order,
    commits_calls,
    enter_pending,
    expecting_losses,
    follow_order,
    go_back,
    join,
    recover,
    refuse_past_calls,
    refuse_while_going_back,
    survives_losses,
)
from varuna.train.saving.save_requests import usr1
from varuna.train.validate import check_evaluated, check_share

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

T = TypeVar("T")

NOT_TRAINED = StepTotals(loss=math.nan, overflow=True, norm=None)
"""Totals of a step in which a rank was lost, if all ranks go back to an earlier step."""


def attempt_step(
    model: "Varuna",
    inputs: Mapping[str, object] | Fetch,
    order: SampleOrder | None,
    max_norm: float | None,
    *,
    can_fetch: bool,
) -> StepTotals | None:
    """Run a step. Returns None if a rank was lost, and this rank must run the step again.

    Returns NOT_TRAINED if this rank goes back to an earlier step before its next batch. Until then it has no
    gradients, so an update of the script changes no weight; all else that the script changes goes back, too.
    `can_fetch`: the library can fetch the inputs of another share.
    """
    survives = can_fetch and survives_losses(model)
    backup = StepBackup(model) if survives and commits_calls(model) else None
    lost: PeerLost | None = None
    totals: StepTotals | None = None
    with (
        expecting_losses(model) if survives else nullcontext(),
        model._session.call("step", announce=False),
        model._report_errors("step"),
    ):
        if not model._update.is_open:
            model._progress.enter()
        inputs = _fetched(model, inputs, order)
        if model._optimizer is None:
            raise RuntimeError(
                "no optimizer is set (call model.set_optimizer(optimizer) before the first step)"
            )
        model._saver.warn_without_store()
        model._programs.follow_changes(model._session)
        batch = model._programs.batch(inputs)
        check_share(batch.size, model._session, model.plan)
        model._trainer.commit = None if backup is None else Commit(model)
        try:
            totals = _train(model, inputs, batch, max_norm, survives=survives)
            model._record_step()
            model._reporter.report_if_due()
        except PeerLost as error:
            model._trainer.reducer.hooks.put_back()
            if not (survives and can_go_on(model, error)):
                raise
            lost = error
    # After a step, the next one notices the loss again.
    return _recovered(model, lost, backup) if totals is None and lost is not None else totals


def _train(
    model: "Varuna", inputs: Mapping[str, object], batch: Batch, max_norm: float | None, *, survives: bool
) -> StepTotals:
    """Run forward and backward of these inputs, after what all ranks compare or copy before a step."""
    model._metrics.note_inputs(inputs)
    model._programs.update_traits(model._trainer, inputs, batch)
    check_for_order(model)
    compare_groups(model)
    if survives and needs_copies(model):
        model._state_copies.visit(model)
    return model._trainer.step(
        inputs,
        num_samples=batch.size,
        dims=batch.dims,
        training=model.training,
        loss_scale=model._loss_scale,
        max_norm=max_norm,
    )


def _recovered(model: "Varuna", lost: PeerLost, backup: StepBackup | None) -> StepTotals | None:
    """Return the totals of a step in which a rank was lost, if it counts; else as `attempt_step`."""
    if (finished := recover(model, lost, backup, in_step=True)) is not None:
        model._trainer.iteration += 1
        totals: StepTotals = finished.value
        return totals
    if model._hot.going_back is None:
        return None
    for weight in model._weights:
        weight.grad = None
    return NOT_TRAINED


def iterate_batches(
    model: "Varuna", fetch: Fetch, order: SampleOrder | None, *, steps: int | None
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield (step, inputs of this rank); after a loss, from the step on to which all ranks go back."""
    model._hot.in_batches, trained = True, -1
    model._hot.passed_end = None
    model._metrics.ends_at(steps)
    try:
        while True:
            model._hot.fetches = not model._hot.replaces_inputs
            go_back(model)
            # At the end, an order waits for the call after `batches`, because a joiner enters there.
            run_requests(model, can_fetch=True, morphs=steps is None or model.iteration < steps)
            if steps is not None and model.iteration >= steps:
                if model._hot.has_joined and not model._num_trained and model.iteration > steps:
                    model._hot.passed_end = steps
                return
            if model._num_trained == trained:
                raise RuntimeError(
                    f"the batch of step {model.iteration} was not trained (call model.step(inputs) for "
                    "each batch, or use a loop of your own with model.step(fetch))"
                )
            step, trained = model.iteration, model._num_trained
            with model._report_errors("fetching the inputs"):
                inputs = _fetched(model, fetch, order)
            model._hot.batch_share = model.rank_within_stage, model.data_depth
            yield step, inputs
    finally:
        model._hot.in_batches = False


def _fetched(
    model: "Varuna", inputs: Mapping[str, object] | Fetch, order: SampleOrder | None
) -> Mapping[str, object]:
    if isinstance(inputs, FetchedInputs):
        return inputs.at(model)
    if callable(inputs):
        return FetchedInputs(inputs, order, model.plan.batch_size, model)
    if model._hot.in_batches:
        check_same_share(model)
    return inputs


def check_same_share(model: "Varuna") -> None:
    """Check that the script's tensors, made from what `batches` yields, are still this rank's share."""
    before, now = model._hot.batch_share, (model.rank_within_stage, model.data_depth)
    if before != now:
        raise RuntimeError(
            f"the inputs of step {model.iteration} are those of replica {before[0]} of {before[1]}, but a "
            f"morph has made this rank replica {now[0]} of {now[1]} since they were fetched (pass the inputs "
            "of model.batches to step as they are: it moves them to the device; or change them inside the "
            "function)"
        )


def join_if_new(model: "Varuna") -> bool:
    """Enter the running job, if this worker has been started to join it. Return whether it has."""
    if not model._session.provisional:
        return False
    join(model)
    return True


def enter_next(model: "Varuna") -> None:
    """Join the job, or carry out an order that waits for the next call of all ranks."""
    join_if_new(model)
    refuse_past_calls(model)
    refuse_while_going_back(model)
    enter_pending(model)


def run_requests(model: "Varuna", *, can_fetch: bool, morphs: bool = True) -> None:
    """Run the requests that all ranks have seen in the last step. All ranks call this between steps.

    `morphs` False: leave an order for the next call of this function.
    """
    enter_next(model)
    usr1.hold()
    if not model._trainer.reducer.request_seen:
        return
    survives = can_fetch and survives_losses(model)
    with (
        expecting_losses(model) if survives else nullcontext(),
        model._session.call("step", announce=False),
        model._report_errors("step"),
    ):
        model._trainer.reducer.request_seen = not morphs
        optimizer = None if not can_fetch or why_not_hot(model) else model._optimizer
        lost: PeerLost | None = None
        enters = False
        try:
            enters = model._saver.run_requests(
                has_order=morphs and model._orders.is_pending,
                groups=hash_groups(optimizer),
            )
        except PeerLost as error:
            if not (survives and can_go_on(model, error)):
                raise
            lost = error
    if lost is not None:
        recover(model, lost)
    elif enters:
        follow_order(model)
    model._reporter.pace.enter(time.perf_counter())  # requests do not count as step time


def repeat_after_losses(model: "Varuna", call: Callable[[], T]) -> T:
    """Run a call that all ranks make between two steps; run it again in place if a rank is lost meanwhile."""
    enter_next(model)
    while True:
        if not model._hot.fetches or not (commits_calls(model) and survives_losses(model)):
            return call()
        model._hot.repeats = True
        try:
            with expecting_losses(model):
                check_for_order(model)
                return Commit(model).finish(call())
        except PeerLost as error:
            if not can_go_on(model, error):
                raise
            lost = error
        finally:
            model._hot.repeats = False
        if (finished := recover(model, lost)) is not None:
            value: T = finished.value
            return value


def evaluate_once(model: "Varuna", inputs: Mapping[str, object], batch_size: int | None) -> float:
    """Return the loss of this replica's inputs and those of all others, in evaluation mode."""
    with model._session.call("evaluate"), model._report_errors("evaluate"):
        model._programs.follow_changes(model._session)
        batch = model._programs.batch(inputs)
        check_evaluated(batch.size, batch_size)
        return model._trainer.evaluate(inputs, num_samples=batch.size, dims=batch.dims)


def evaluate(model: "Varuna", inputs: Mapping[str, object] | Fetch, batch_size: int | None) -> float:
    """Run `Varuna.evaluate`, and run it again after a loss if the library can fetch other shares."""
    if callable(inputs):
        if batch_size is None:
            raise ValueError("evaluate with a function needs the number of samples: batch_size=...")
        fetch, count = inputs, batch_size
        return repeat_after_losses(
            model, lambda: evaluate_once(model, evaluated_share(fetch, count, model), count)
        )
    enter_next(model)
    try:
        return evaluate_once(model, inputs, batch_size)
    except PeerLost as error:
        if not survives_losses(model) or why_not_hot(model):
            raise
        raise PeerLost(
            f"{error}\nThis loss restarts the job: evaluate was given the tensors of one layout (pass a "
            "function: model.evaluate(fetch, batch_size=number_of_samples))"
        ) from error


def follow_losses(norm: ModelNorm, reference: "weakref.ref[Varuna]") -> None:
    """Let torch's clipping go on after a loss. The norm must not keep the model alive."""

    def repeat(measure: NormMeasurement, local: NormMeasurement) -> ListedNorm:
        model = reference()
        return measure() if model is None else measure_after_losses(model, measure, local)

    def is_interrupted() -> bool:
        model = reference()
        return model is not None and model._hot.pending_order is not None

    norm.repeat, norm.is_interrupted = repeat, is_interrupted


def measure_after_losses(model: "Varuna", measure: Callable[[], T], local: Callable[[], T]) -> T:
    """Measure a norm between a step and its update; measure it again in the next generation after a loss.

    If the ranks go back to copies of an earlier step, the next step raises the loss: `local` stands for the
    norm until then, and nothing of this step stays.
    """
    if commits_calls(model) or not (model._hot.fetches and survives_losses(model)):
        return repeat_after_losses(model, measure)
    waiter = model._session.waiter
    assert waiter is not None, "a job that survives losses has several ranks"
    try:
        with expecting_losses(model):
            return measure()
    except PeerLost as error:
        waiter.fail(error)
        return local()
