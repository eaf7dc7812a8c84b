"""Takes a wrapped model from one generation of its job to the next, in place.

    leave the links and groups ──► enter those of the next generation ──► plan ──► tensors for the new stage
        ──► take what other ranks hold ──► give the optimizer its parameters ──► build what trains and saves

The model object, its parameters that stay, the optimizer with its groups, and registered objects are the same
objects before and after.
"""

import logging
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from varuna.capture.model.state import StageState, moved_state
from varuna.environment import VarunaEnvironment
from varuna.errors import PeerLost, WorkerError
from varuna.execute.comm.address import machine_identity
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.session import Session
from varuna.execute.device.profiled import profiled_as
from varuna.execute.rebuild.generation import enter_generation, is_interruption, leave_generation
from varuna.execute.rebuild.handover import Unit
from varuna.execute.step.trainer import Trainer
from varuna.morph.run.order_page import apply_environment
from varuna.morph.state import MorphParts
from varuna.train import build
from varuna.train.hot.copies import StateCopies
from varuna.train.hot.hot_state import CompleteMove
from varuna.train.hot.moving import (
    MovingState,
    OptimizerBackup,
    group_options,
    hash_groups,
    set_group_options,
)
from varuna.train.layout import Prediction
from varuna.train.programs import CapturedModel, StagePrograms
from varuna.train.report import Reporter
from varuna.train.saving.autosave import AutosaveTimer, parse_rhythm
from varuna.train.saving.frozen_base import FrozenBase
from varuna.train.validate import WrapOptions
from varuna.types import MorphOrder, Plan

if TYPE_CHECKING:
    from varuna.train.varuna import Varuna

log = logging.getLogger("varuna")


COMPARED_STEPS = 4096
"""Compare the optimizers of all ranks for this many steps after a join: in steps 1, 2, 4, 8, ..."""


@profiled_as("morph")
def morph(
    model: "Varuna",
    order: MorphOrder,
    parts: MorphParts | None = None,
    *,
    copied: Mapping[str, Unit] | None = None,
) -> None:
    """Carry out an order. All ranks of the old generation that live, and all joiners, call this.

    `parts`: seconds since the notice of a loss. `copied`: state before an earlier step, to which all ranks go
    back. Raises SystemExit(0) on a rank that leaves, once it has handed its tensors over.
    """
    parts = parts or MorphParts()
    started = time.perf_counter() - parts.rebuild
    model._programs.tensors.follow()  # values that the script has assigned
    if not order.lost or order.old_rank is None:  # else this rank has abandoned it
        leave_generation(model._session)
    apply_environment(order, os.environ)
    os.environ.update(MASTER_ADDR=order.master_addr, MASTER_PORT=str(order.master_port))
    if order.rank is not None:
        os.environ.update(RANK=str(order.rank), WORLD_SIZE=str(order.layout.num_ranks))
    seconds = model._options.timeout_seconds
    group = enter_generation(order, timeout_seconds=seconds)
    if order.rank is None:
        _leave_job(model, group, order, copied)
        raise SystemExit(0)
    size = order.layout.microbatch_size if model._follows_launcher else model._options.microbatch_size
    options = replace(model._options, stage_map=order.layout.stage_map, microbatch_size=size)
    orders = model._orders
    session = build.connect(options, order.rank, has_order=lambda: orders.abandons)
    parts.rebuild = time.perf_counter() - started
    if session.waiter is not None:
        session.waiter.survives = True  # the manager knows who is lost
    try:
        num_bytes = _rebuild(model, session, options, group, order, parts, copied)
    except Exception as error:
        if is_interruption(error) or order.old_rank is None:  # the others go on without a joiner that fails
            session.abandon()
        else:
            session.report_error(error, f"stage {session.stage}, entering generation {order.generation}")
        raise
    finally:
        if session.waiter is not None:
            session.waiter.survives = False
    seconds = parts.waited + time.perf_counter() - started
    model._tracer.note("morph", time.perf_counter() - seconds)
    step = model._trainer.iteration
    model._progress.morphed(order.generation, parts, seconds=seconds, num_bytes=num_bytes, iteration=step)
    log.info(
        "generation %d: rank %d in %.3f s (%s), %d bytes arrived (%s)",
        order.generation,
        session.rank,
        seconds,
        parts,
        num_bytes,
        order.why,
    )


def moving_state(model: "Varuna", state: StageState | None) -> MovingState:
    """Return the state of this rank on its way to a next layout; None: it gives its state only."""
    training, is_joiner = model._checkpoints.training, model._session.provisional
    job = partial(_job_values, model)
    return MovingState(training, state, is_joiner, job, note_progress=model._progress.alive)


def _leave_job(
    model: "Varuna", group: Collective, order: MorphOrder, copied: Mapping[str, Unit] | None
) -> None:
    """Give everything that other ranks lack, and disconnect."""
    moving = moving_state(model, None)
    moving.copied = copied
    moving.hand_over(group, None)
    step = model._trainer.iteration  # from now on, the others do not need this rank
    model._progress.morphed(order.generation, MorphParts(), seconds=0.0, num_bytes=0, iteration=step)
    model._saver.close()


def _rebuild(
    model: "Varuna",
    session: Session,
    options: WrapOptions,
    group: Collective,
    order: MorphOrder,
    parts: MorphParts,
    copied: Mapping[str, Unit] | None,
) -> int:
    """Build this rank's part of the next layout; return the bytes that arrived from other ranks."""
    environment = VarunaEnvironment.read(os.environ)
    is_joiner = model._session.provisional
    # Ranks that go back to copies may be at different steps of their schedules; the copies have the options.
    groups = "" if is_joiner or copied is not None else hash_groups(model._optimizer) or ""
    sampled = _same_model(model._programs.sampled, session, groups, joins=is_joiner)
    plan, prediction = build.choose_plan(sampled, options, session, environment)
    own = plan.stages[session.stage]
    state = moved_state(
        sampled.source, sampled.captured, own.first, own.stop, held=model._state, device=options.device
    )
    training = model._checkpoints.training
    moving = moving_state(model, state)
    moving.copied = copied
    if not is_joiner:
        moving.base = {name for name in state.canonical if name in training.base}
    started, backup = time.perf_counter(), OptimizerBackup(training)
    try:
        num_bytes = moving.hand_over(group, session)
        parts.move = time.perf_counter() - started
        has_request = model._trainer.reducer.has_request
        built = build.build_trainer(sampled, plan, session, options, state, has_request)
    except Exception:
        backup.restore()
        raise

    def use() -> None:
        _use(model, session, options, plan, sampled, moving, *built)
        model._hot.generation = order.generation

    model._hot.move = CompleteMove(order.generation, use, backup.restore)
    session.gather_numbers([1.0])  # if it ends on any rank, the next state is complete on all ranks
    end_move(model, counts=True)
    _use_reports(model, session, sampled, prediction, environment)
    model._hot.joins = False
    return num_bytes


def end_move(model: "Varuna", *, counts: bool) -> None:
    """Use the next state of this rank if it is complete on all ranks; keep the last one if not."""
    move, model._hot.move = model._hot.move, None
    if move is not None:
        (move.use if counts else move.undo)()


def _same_model(sampled: CapturedModel, session: Session, groups: str, *, joins: bool) -> CapturedModel:
    """Check that joiners have the same model; return it with the machines of the next generation.

    `groups`: hash of the optimizer's groups; "" on a joiner, which takes the options of the others. Raises
    PeerLost on the others if a joiner has another model: they go on without it.
    """
    own = sampled.captured.graph.fingerprint
    everyone = session.gather((own, machine_identity(), groups, joins), tuple[str, str, str, bool])
    differing = [rank for rank, (other, *_) in zip(session.ranks, everyone, strict=True) if other != own]
    if differing:
        joiners = {rank for rank, (*_, is_new) in zip(session.ranks, everyone, strict=True) if is_new}
        kind = WorkerError if joins or not joiners.issuperset(differing) else PeerLost
        raise kind(
            f"ranks {differing} have wrapped another model than rank {session.rank} (run the same version of "
            "the script on all machines)"
        )
    if len({found for _, _, found, _ in everyone if found}) > 1:
        raise WorkerError(
            "the optimizers of the ranks have different parameter groups, so their parameters cannot move in "
            "place (make the same groups, with the same options, on all ranks)"
        )
    return sampled._replace(machines=[machine for _, machine, _, _ in everyone])


def compare_groups(model: "Varuna") -> None:
    """Check in some steps after a join that the optimizers of all ranks have the same hyper-parameters.

    A learning rate scheduler that is not registered starts from step 0 on a joiner.
    """
    if model._hot.joined_at is None:
        return
    since = model._trainer.iteration - model._hot.joined_at
    if since < 1 or since & (since - 1):
        return
    if since >= COMPARED_STEPS:
        model._hot.joined_at = None
    found = model._session.gather(hash_groups(model._optimizer) or "", str)
    if len(set(found)) > 1:
        raise WorkerError(
            "since a worker has joined, the ranks have different learning rates or other options of the "
            "optimizer (register the learning rate scheduler: model.register('schedule', scheduler))"
        )


def _use(
    model: "Varuna",
    session: Session,
    options: WrapOptions,
    plan: Plan,
    sampled: CapturedModel,
    moving: MovingState,
    programs: StagePrograms,
    trainer: Trainer,
) -> None:
    """Replace the parts of the model that belong to a layout."""
    state, last = moving.state, model._trainer
    assert state is not None
    before, after = last.plan.stages[model._session.stage], plan.stages[session.stage]
    if (before.first, before.stop) == (after.first, after.stop):
        programs.adopt(model._programs)
    trainer.iteration, trainer.seed = last.iteration, last.seed
    if moving.training.shards is not None:
        trainer.reducer.owned = moving.training.shards.counted(trainer.reducer.weights)
    base = FrozenBase(state, [name for name in state.canonical if name in moving.base])
    training = replace(moving.training, stage=state, trainer=trainer, base=base, _first_stage={})
    first = session.rank == session.stage_map[0][0]
    if not first:
        model._checkpoints.resources.release()
    checkpoints = model._checkpoints.moved(session, plan, training)
    if trainer.norm is not None:
        trainer.norm.add([model._placeholder])
        if last.norm is not None:
            trainer.norm.follow(last.norm)
    vars(model).update(
        plan=plan,
        _options=options,
        _session=session,
        _state=state,
        _programs=programs,
        _trainer=trainer,
        _checkpoints=checkpoints,
        _saver=model._saver.moved(checkpoints, trainer),
        _weights=list(state.parameters()),
    )
    vars(model).pop("_stage_module", None)
    for finalizer in model._finalizers:
        finalizer.detach()
    closed = session.close, model._tracer.close, checkpoints.resources.close
    model._finalizers = [weakref.finalize(model, close) for close in closed]
    if moving.taken_job is not None:
        _take_job_values(model, moving.taken_job)


def _use_reports(
    model: "Varuna",
    session: Session,
    sampled: CapturedModel,
    prediction: Prediction | None,
    environment: VarunaEnvironment,
) -> None:
    # The gather also keeps all ranks together until each has built its stage.
    reports = prediction is not None or environment.log_dir is not None
    joined_at = model._trainer.iteration if model._hot.joins else model._hot.joined_at
    everyone = session.gather((reports, -1 if joined_at is None else joined_at), tuple[bool, int])
    reports = everyone[0][0]
    newest = max(joined for _, joined in everyone)  # ranks may have been interrupted in an earlier morph
    model._hot.joined_at = None if newest < 0 else newest
    reporter = Reporter(session, sampled.machines, prediction, reports=reports, folder=environment.log_dir)
    vars(model).update(_reporter=reporter, _state_copies=StateCopies(session, sampled.machines))
    timer = model._requests.autosave
    if session.rank != session.stage_map[0][0]:
        model._requests.autosave = AutosaveTimer(None, timer.store)
    elif not timer.is_on:
        rhythm = None if timer.off else parse_rhythm(environment.saves)
        model._requests.autosave = AutosaveTimer(rhythm, timer.store)
    model._requests.autosave.off = timer.off


def _job_values(model: "Varuna") -> dict[str, Any]:
    """Return what is the same on all ranks: joiners take it."""
    training, checkpoints = model._checkpoints.training, model._checkpoints
    optimizer = training.optimizer
    return {
        "iteration": model._trainer.iteration,
        "seed": model._trainer.seed,
        "loss_scale": training.loss_scale.state_dict(),
        "groups": None if optimizer is None else group_options(optimizer),
        "registered": training.registered_state(),
        "store": checkpoints.store,
        "job": checkpoints.job,
        "autosave_off": model._requests.autosave.off,
    }


def _take_job_values(model: "Varuna", values: dict[str, Any]) -> None:
    training, checkpoints = model._checkpoints.training, model._checkpoints
    model._trainer.iteration, model._trainer.seed = values["iteration"], values["seed"]
    if training.loss_scale.checks_overflow:
        training.loss_scale.load_state_dict(values["loss_scale"])
    if training.optimizer is not None and values["groups"] is not None:
        set_group_options(training.optimizer, values["groups"])
    training.load_registered(values["registered"])
    checkpoints.store, checkpoints.job = values["store"], values["job"]
    model._requests.autosave.store = values["store"]
    model._requests.autosave.off = values["autosave_off"]
    model._progress.uses(values["store"])
