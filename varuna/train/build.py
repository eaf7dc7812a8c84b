"""The steps that wrap a model, in the order in which `Varuna` runs them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from varuna.capture import Captured, Source, StageState, stage_state
from varuna.capture.model.batch import Batch
from varuna.environment import VarunaEnvironment
from varuna.errors import check_name
from varuna.execute.comm.address import machine_identity, own_address
from varuna.execute.comm.session import Session, open_session
from varuna.execute.device.facts import device_name
from varuna.execute.step.scatter import WeightFunction
from varuna.execute.step.trainer import Programs, Trainer
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cut.blocks import partition
from varuna.train.assemble import assemble
from varuna.train.checkpoints import Checkpoints
from varuna.train.layout import (
    Prediction,
    ScriptLayout,
    WrappedModel,
    choose_layout,
    find_profile,
    parse_plan,
    plan_stages_by_time,
    predict,
)
from varuna.train.programs import StagePrograms, batch_of
from varuna.train.report import Reporter
from varuna.train.training_state import TrainingState
from varuna.train.validate import (
    all_names,
    call_for_sample,
    check_model,
    check_once,
    check_sizes,
    plan_stages,
    refuse_detached,
    refuse_inseparable,
)
from varuna.types import ChannelName, Op, Plan, PrecisionName, ScheduleName, StageMap

FIRST_RUN_PATIENCE = 15.0
"""Other ranks wait this many times the timeout for a step that compiles."""


@dataclass(frozen=True)
class WrapOptions:
    """The arguments of `Varuna`, without the model and its sample inputs."""

    stage_map: StageMap
    batch_size: int
    microbatch_size: int
    precision: PrecisionName
    shared_weights: Sequence[tuple[str, str]] | None
    from_cache: bool
    schedule: ScheduleName | None
    recompute: bool | Sequence[bool] | None
    spans: Sequence[tuple[int, int]] | None
    profile_folder: str | os.PathLike[str] | None
    batch_dims: Mapping[str, int | None]
    loss_weight: WeightFunction | None
    initialize: Mapping[str, Tensor] | Callable[[str, Tensor], object] | None
    shard_optimizer: bool
    offload_optimizer: bool
    compile: bool
    cuda_graphs: bool
    channel: ChannelName | None
    seed: int | None
    timeout_seconds: float
    link_delay: Callable[[int], float] | None
    compute_delay: Callable[[Op, int], float] | None


class CapturedModel(NamedTuple):
    """The model as captured with the sample inputs, and what the ranks have agreed on."""

    model: nn.Module
    source: Source
    captured: Captured
    inputs: Mapping[str, object]
    batch: Batch
    seed: int
    machines: list[str]  # of each rank


class ChosenPlan(NamedTuple):
    plan: Plan
    prediction: Prediction | None  # on the first rank, if a profile or plan allows one


def validate(model: object, options: WrapOptions) -> None:
    """Check the arguments that need no other rank."""
    check_model(model)
    check_sizes(options.batch_size, options.microbatch_size)
    check_name("schedule", options.schedule or "varuna", get_args(ScheduleName))
    check_name("precision", options.precision, get_args(PrecisionName))
    if options.channel is not None:
        check_name("channel", options.channel, get_args(ChannelName))


def join(options: WrapOptions, rank: int, device: torch.device) -> Session:
    """Connect this rank with the other ranks."""
    return open_session(
        options.stage_map,
        rank=rank,
        device=device,
        timeout_seconds=options.timeout_seconds,
        host=own_address(),
        link_delay=options.link_delay,
        channel=options.channel,
    )


def capture(
    model: nn.Module,
    dummy_inputs: Mapping[str, object] | Callable[..., Mapping[str, object]],
    options: WrapOptions,
    session: Session,
    device: torch.device,
) -> CapturedModel:
    """Capture the model with the sample inputs; check that all ranks have captured the same model."""
    inputs = call_for_sample(dummy_inputs) if callable(dummy_inputs) else dummy_inputs
    batch = batch_of(inputs, options.batch_dims)
    source = Source(
        model,
        batch_dims=options.batch_dims,
        shared_weights=options.shared_weights,
        precision=options.precision,
        device_type=device.type,
        partition=partition,
        watch=capture_progress(shown=session.rank == session.ranks[0]),
    )
    captured = source.capture(inputs, training=True)
    refuse_detached(captured, model)
    seed, machines = agree_on_model(session, captured.graph.fingerprint, options.seed)
    return CapturedModel(model, source, captured, inputs, batch, seed, machines)


def agree_on_model(session: Session, fingerprint: str, seed: int | None) -> tuple[int, list[str]]:
    """Return one seed for all ranks, and the machine of each rank. Refuses different models."""
    own = (fingerprint, torch.initial_seed() if seed is None else seed, machine_identity())
    everyone = session.gather(own)
    differing = [r for r, other in zip(session.ranks, everyone, strict=True) if other[0] != own[0]]
    if differing:
        raise ValueError(
            f"ranks {differing} have wrapped another model than rank {session.rank} "
            "(build the same model, with the same CutPoints and sample inputs, on every rank)"
        )
    return everyone[0][1] % 2**63, [machine for _, _, machine in everyone]


def choose_plan(
    sampled: CapturedModel,
    options: WrapOptions,
    session: Session,
    device: torch.device,
    environment: VarunaEnvironment,
) -> ChosenPlan:
    """Choose the stages: from the script's arguments, the launcher's plan, a profile, or estimated work."""
    captured = sampled.captured
    wrapped = WrappedModel(
        captured.graph.fingerprint,
        options.precision,
        device_name(device),
        options.stage_map,
        sampled.machines,
        options.shard_optimizer,
    )
    request = ScriptLayout(
        options.batch_size, options.microbatch_size, options.schedule, options.recompute, options.spans
    )
    given = parse_plan(environment.plan, wrapped)
    is_first = session.rank == session.ranks[0]
    profile = None
    if is_first:  # the other ranks may not be able to read the folder
        folder = options.profile_folder or environment.profile
        profile = find_profile(folder, wrapped, required=given is None)
    by_time = (
        plan_stages_by_time(profile, wrapped, request) if profile is not None and given is None else None
    )
    by_time = session.gather(by_time)[0]
    layout = choose_layout(request, by_time if given is None else given.plan)
    plan = Plan(
        stages=plan_stages(
            options.stage_map, captured, layout.spans, layout.recompute, from_cache=options.from_cache
        ),
        batch_size=options.batch_size,
        microbatch_size=options.microbatch_size,
        schedule=layout.schedule,
        precision=options.precision,
        fingerprint=captured.graph.fingerprint,
    )
    refuse_inseparable(plan, captured)
    prediction = predict(plan, profile, given, wrapped) if is_first else None
    if is_first:
        check_once(sampled.model, captured, sampled.inputs, plan, from_cache=options.from_cache)
    return ChosenPlan(plan, prediction)


def build_stage(
    sampled: CapturedModel, plan: Plan, stage: int, options: WrapOptions, device: torch.device
) -> StageState:
    """Create the parameters and buffers of this rank's stage."""
    own = plan.stages[stage]
    return stage_state(
        sampled.source,
        sampled.captured,
        own.first,
        own.stop,
        device=device,
        initialize=options.initialize,
        seed=sampled.seed,
    )


def build_programs(
    sampled: CapturedModel,
    plan: Plan,
    stage: int,
    state: StageState,
    options: WrapOptions,
    device: torch.device,
) -> StagePrograms:
    return StagePrograms(
        sampled.source,
        sampled.captured,
        sampled.batch,
        batch_dims=options.batch_dims,
        plan=plan,
        stage=stage,
        state=state,
        device=device,
        compile=options.compile,
    )


def build_trainer(
    sampled: CapturedModel,
    plan: Plan,
    session: Session,
    state: StageState,
    programs: Programs,
    options: WrapOptions,
    *,
    device: torch.device,
    has_request: Callable[[], bool],
) -> Trainer:
    return assemble(
        plan,
        session,
        sampled.captured,
        state,
        programs,
        device=device,
        seed=sampled.seed,
        timeout_seconds=options.timeout_seconds,
        split_backward=not options.compile,
        cuda_graphs=options.cuda_graphs,
        weigh=options.loss_weight,
        delay=options.compute_delay,
        has_request=has_request,
        first_run_patience=FIRST_RUN_PATIENCE if options.compile else 1.0,
    )


def build_checkpoints(
    sampled: CapturedModel, trainer: Trainer, state: StageState, options: WrapOptions
) -> Checkpoints:
    return Checkpoints(
        trainer.session,
        trainer.plan,
        TrainingState(state, trainer, options.shard_optimizer),
        ties=sampled.captured.graph.ties,
        names=all_names(sampled.model),
        timeout_seconds=options.timeout_seconds,
    )


def build_reporter(
    session: Session, machines: list[str], prediction: Prediction | None, folder: str | None
) -> Reporter:
    """Create the reporter. The gather also keeps all ranks together until each has built its stage."""
    predicted = session.gather(prediction is not None)[0]
    return Reporter(session, machines, reports=predicted, prediction=prediction, folder=folder)
