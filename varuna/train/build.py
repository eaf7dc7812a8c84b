"""The steps that wrap a model, in the order in which `Varuna` runs them."""

import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn

from varuna.capture import Source, StageState, stage_state
from varuna.capture.model.adapters import base_names
from varuna.capture.model.state import ModelTensors, model_values
from varuna.environment import VarunaEnvironment
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.session import Session, open_session, provisional_session
from varuna.execute.step.trainer import Trainer
from varuna.execute.update.initial_values import share_initial_values
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cut.blocks import partition
from varuna.train.assemble import assemble
from varuna.train.layout import (
    Prediction,
    choose_layout,
    find_profile,
    parse_plan,
    plan_stages_by_time,
    predict,
)
from varuna.train.programs import CapturedModel, StagePrograms, batch_of
from varuna.train.saving.checkpoints import Checkpoints
from varuna.train.saving.frozen_base import FrozenBase
from varuna.train.saving.training_state import TrainingState
from varuna.train.validate import (
    WrapOptions,
    all_names,
    check_once,
    plan_stages,
    refuse_coupled_losses,
    refuse_detached,
    refuse_inseparable,
    trained_names,
)
from varuna.types import Plan

log = logging.getLogger("varuna")

FIRST_RUN_PATIENCE = 15.0
"""Other ranks wait this many times the timeout for a step that compiles."""


def connect(
    options: WrapOptions, rank: int, *, joins: bool = False, has_order: Callable[[], bool] | None = None
) -> Session:
    """Join this rank to all others. `joins`: not yet, it waits for an order to join a running job.

    `has_order`: the manager has lost ranks, so that no rank may wait for others any more.
    """
    if joins:
        return provisional_session(options.stage_map, rank)
    return open_session(
        options.stage_map,
        rank=rank,
        device=options.device,
        timeout_seconds=options.timeout_seconds,
        host=own_address(),
        link_delay=options.link_delay,
        channel=options.channel,
        has_order=has_order,
    )


def capture(
    model: nn.Module, inputs: Mapping[str, object], options: WrapOptions, session: Session
) -> CapturedModel:
    """Capture the model with the sample inputs; check that all ranks have captured the same model."""
    batch = batch_of(inputs, options.batch_dims)
    source = Source(
        model,
        batch_dims=options.batch_dims,
        dynamic_dims=options.dynamic_dims,
        shared_weights=options.shared_weights,
        precision=options.precision,
        device_type=options.device.type,
        partition=partition,
        loss=options.loss,
        watch=capture_progress(shown=session.rank == session.ranks[0]),
    )
    captured = source.capture(inputs, training=True)
    refuse_detached(captured, model)
    seed = torch.initial_seed() if options.seed is None else options.seed
    own = (captured.graph.fingerprint, seed, machine_identity())
    everyone = session.gather(own, tuple[str, int, str])
    differing = [r for r, other in zip(session.ranks, everyone, strict=True) if other[0] != own[0]]
    if differing:
        raise ValueError(
            f"ranks {differing} have wrapped another model than rank {session.rank} "
            "(build the same model, with the same CutPoints and sample inputs, on every rank; if its forward "
            "loops over a set of strings, start all ranks with PYTHONHASHSEED=0)"
        )
    machines = [machine for _, _, machine in everyone]
    if session.provisional:
        machines *= sum(map(len, session.stage_map))
    return CapturedModel(source, captured, batch, everyone[0][1] % 2**63, machines)


def check(
    model: nn.Module, sampled: CapturedModel, inputs: Mapping[str, object], plan: Plan, options: WrapOptions
) -> None:
    """Compare the captured model with the original, unless it is too large or was compared before."""
    check_once(
        model,
        sampled.captured,
        inputs,
        plan,
        device=options.device,
        convention=sampled.source.convention,
        from_cache=options.from_cache,
    )
    if options.loss_weight is None:
        refuse_coupled_losses(model, sampled.captured, inputs, plan, device=options.device)


def flops(model: nn.Module, sampled: CapturedModel) -> float:
    """Return the operations of a forward and a backward of one sample."""
    return sampled.captured.step_flops(trained_names(model))


def choose_plan(
    sampled: CapturedModel, options: WrapOptions, session: Session, environment: VarunaEnvironment
) -> tuple[Plan, Prediction | None]:
    """Choose the stages: from the script's arguments, the launcher's plan, a profile, or estimated work.

    Returns the plan and, on the first rank, the predicted step if a profile or plan allows one.
    """
    captured = sampled.captured
    given = parse_plan(environment.plan, sampled, options)
    is_first = session.rank == session.ranks[0]
    profile = by_time = None
    if is_first:  # the other ranks may not be able to read the folder
        folder = options.profile_folder or environment.profile
        profile = find_profile(folder, sampled, options, required=given is None)
    if profile is not None and given is None:
        by_time = plan_stages_by_time(profile, sampled, options)
    by_time = session.gather(by_time, Plan | None)[0]
    schedule, recompute, spans = choose_layout(options, by_time if given is None else given.plan)
    plan = Plan(
        stages=plan_stages(options.stage_map, captured, spans, recompute, from_cache=options.from_cache),
        batch_size=options.batch_size,
        microbatch_size=options.microbatch_size,
        schedule=schedule,
        precision=options.precision,
        fingerprint=captured.graph.fingerprint,
    )
    refuse_inseparable(plan, captured)
    return plan, predict(plan, profile, given, sampled, options) if is_first else None


def build_stage(
    model: nn.Module,
    sampled: CapturedModel,
    plan: Plan,
    session: Session,
    options: WrapOptions,
    has_request: Callable[[], bool],
) -> tuple[StageState, StagePrograms, Trainer, Checkpoints]:
    """Create the parameters and buffers of this rank's stage, and the objects that train and save it."""
    own = plan.stages[session.stage]
    state = stage_state(
        sampled.source,
        sampled.captured,
        own.first,
        own.stop,
        device=options.device,
        initialize=options.initialize,
        seed=sampled.seed,
        shares=True,
    )
    is_first = session.rank == session.ranks[0]
    whole = model_values(sampled.source, options.initialize) if is_first and session.num_ranks > 1 else {}
    share_initial_values(session, state.by_name(), whole, log)
    programs, trainer = build_trainer(sampled, plan, session, options, state, has_request)
    checkpoints = Checkpoints(
        session,
        plan,
        TrainingState(state, trainer, frozen_base(sampled.source, state), options.shard_optimizer),
        ties=sampled.captured.graph.ties,
        names=all_names(model),
        timeout_seconds=options.timeout_seconds,
    )
    return state, programs, trainer, checkpoints


def build_trainer(
    sampled: CapturedModel,
    plan: Plan,
    session: Session,
    options: WrapOptions,
    state: StageState,
    has_request: Callable[[], bool],
) -> tuple[StagePrograms, Trainer]:
    """Create the objects that train a stage, given its parameters and buffers."""
    own = plan.stages[session.stage]
    tensors = ModelTensors(sampled.source, state)
    programs = StagePrograms(sampled, options, plan, session.stage, state, tensors)
    trainer = assemble(
        plan,
        session,
        sampled.captured,
        state,
        programs,
        device=options.device,
        seed=sampled.seed,
        timeout_seconds=options.timeout_seconds,
        split_backward=not options.compile,
        cuda_graphs=options.cuda_graphs,
        weigh=options.loss_weight,
        delay=options.compute_delay,
        has_request=has_request,
        first_run_patience=FIRST_RUN_PATIENCE if options.compile else 1.0,
    )
    trainer.losses.mode = options.on_nan
    if options.loss_weight is None:
        trainer.sums_losses = sampled.captured.loss.sums[0]
        totals = sampled.captured.carve(own.first, own.stop).totals
        trainer.num_totals = 0 if totals is None else sampled.captured.num_totals
    return programs, trainer


def frozen_base(source: Source, state: StageState) -> FrozenBase:
    """Return the tensors of a stage that adapters leave as they are; none of a model without adapters."""
    base = base_names(source.meta_model)
    return FrozenBase(state, [name for name in state.canonical if name in base])
