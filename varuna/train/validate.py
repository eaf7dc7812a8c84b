"""The arguments of `Varuna`, checks of them and of the model, and the division into stages."""

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ParamSpec, get_args

import torch
import torch.distributed as dist
from torch import nn

from varuna.capture import Captured, StageState, check_capture, explain_parts
from varuna.capture.model.call_convention import CallConvention, LossChoice
from varuna.capture.model.lengths import DynamicDims
from varuna.capture.model.state import Initialize
from varuna.environment import VarunaEnvironment
from varuna.errors import CaptureError, check_name, list_some
from varuna.execute.comm.session import Session
from varuna.execute.rebuild.generation import start_world
from varuna.execute.step.scatter import WeightFunction
from varuna.plan import balance, balance_over
from varuna.train.cache import read_spans, write_spans
from varuna.types import (
    ChannelName,
    OnNan,
    Op,
    Plan,
    PrecisionName,
    ScheduleName,
    StageMap,
    StagePlan,
    format_stage_map,
    spread_evenly,
)

log = logging.getLogger("varuna")

CHECKED_PARAMETERS = 200_000_000
"""Largest number of parameters for which the captured model is compared with the original."""


@dataclass(frozen=True)
class WrapOptions:
    """The arguments of `Varuna`, without the model and its sample inputs."""

    stage_map: StageMap
    batch_size: int
    microbatch_size: int
    precision: PrecisionName
    device: torch.device
    shared_weights: Sequence[tuple[str, str]] | None
    from_cache: bool
    schedule: ScheduleName | None
    recompute: bool | Sequence[bool] | None
    spans: Sequence[tuple[int, int]] | None
    profile_folder: str | os.PathLike[str] | None
    batch_dims: Mapping[str, int | None]
    dynamic_dims: DynamicDims
    loss: LossChoice
    loss_weight: WeightFunction | None
    initialize: Initialize | None
    shard_optimizer: bool
    offload_optimizer: bool
    compile: bool
    cuda_graphs: bool
    channel: ChannelName | None
    seed: int | None
    on_nan: OnNan
    timeout_seconds: float
    link_delay: Callable[[int], float] | None
    compute_delay: Callable[[Op, int], float] | None


def check_arguments(model: object, options: WrapOptions) -> None:
    """Check the arguments of `Varuna` that need no other rank."""
    check_model(model)
    for name, value, meaning in (
        ("batch_size", options.batch_size, "samples per step of the whole job"),
        ("chunk_size", options.microbatch_size, "samples per micro-batch"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive whole number ({meaning}), not {value!r}")
    check_name("schedule", options.schedule or "varuna", get_args(ScheduleName))
    check_name("precision", options.precision, get_args(PrecisionName))
    check_name("on_nan", options.on_nan, get_args(OnNan))
    if options.channel is not None:
        check_name("channel", options.channel, get_args(ChannelName))


WRAPPERS = "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "RaNNCModule", "Varuna"


def check_model(model: object) -> None:
    """Check that the model is a plain module, not wrapped or compiled."""
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model must be a torch.nn.Module, not {found} (pass the model object)")
    around = type(model).__name__
    if around in WRAPPERS:
        raise TypeError(f"the model is already wrapped in {around} (pass the plain model)")
    if around == "OptimizedModule":
        raise TypeError(
            "the model is compiled by torch.compile (pass the plain model, and compile=True to Varuna)"
        )


def check_optimizer(optimizer: object, parameters: Iterable[nn.Parameter]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"set_optimizer takes one torch.optim.Optimizer, not a {type(optimizer).__name__} "
            "(for different settings, use its parameter groups)"
        )
    own = set(parameters)
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's parameters do not belong to this stage "
            "(create the optimizer after wrapping: Optimizer(model.parameters()))"
        )


def check_share(num_samples: int, session: Session, plan: Plan) -> None:
    """Check that this replica has no more samples than its share of the global batch."""
    share = spread_evenly(plan.batch_size, parts=session.width)[session.replica]
    if num_samples > share:
        raise ValueError(
            f"step was given {num_samples} samples, but replica {session.replica} of {session.width} takes "
            f"{share} of the global batch's {plan.batch_size} (give each replica its own share, for example "
            "with varuna.SampleOrder)"
        )


def check_evaluated(num_samples: int, batch_size: int | None) -> None:
    """Refuse a batch size below the number of samples, since all samples are evaluated."""
    if batch_size is not None and batch_size < num_samples:
        raise ValueError(
            f"evaluate was given {num_samples} samples and batch_size={batch_size}, but it evaluates all of "
            "them (pass only the samples that you mean, and leave batch_size out)"
        )


Arguments = ParamSpec("Arguments")


def takes_get_batch_fn(init: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Accept `get_batch_fn=`, the name of `dummy_inputs=` in some versions of the original."""

    @functools.wraps(init)
    def wrapped(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        if "get_batch_fn" in kwargs:
            if len(args) > 3 or "dummy_inputs" in kwargs:  # the first one is the new object
                raise TypeError("Varuna was given both sample inputs and get_batch_fn= (pass one of them)")
            kwargs["dummy_inputs"] = kwargs.pop("get_batch_fn")
        init(*args, **kwargs)

    return wrapped


def call_for_sample(get_batch: Callable[..., Mapping[str, object]]) -> Mapping[str, object]:
    """Call `get_batch(size, device=...)`, or `get_batch(size)` if it takes no device."""
    takes_device = "device" in inspect.signature(get_batch).parameters
    return get_batch(2, device="cpu") if takes_device else get_batch(2)


def join_job(stage_map: StageMap) -> int:
    """Return this process's rank; initialize torch.distributed if the script has not."""
    ranks = sorted(rank for row in stage_map for rank in row)
    if VarunaEnvironment.read(os.environ).joins:
        return int(os.environ["RANK"])  # until the order comes
    if not dist.is_initialized():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks == [0] and world == 1:
            return 0
        missing = [
            name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
        ]
        if missing and ranks != [0]:
            raise RuntimeError(
                f"the map {format_stage_map(stage_map)!r} needs {len(ranks)} processes, but this one was "
                f"started alone: {', '.join(missing)} not set (start it with `python -m varuna.run_varuna` "
                "or torchrun, or call torch.distributed.init_process_group)"
            )
        _check_fit(stage_map, world)
        start_process_group()
    _check_fit(stage_map, dist.get_world_size())
    return dist.get_rank()


def start_process_group() -> None:
    """Initialize torch.distributed as the launcher's variables say."""
    start_world()


def _check_fit(stage_map: StageMap, world: int) -> None:
    ranks = sorted(rank for row in stage_map for rank in row)
    if ranks != list(range(world)):
        lacking, idle = sorted(set(ranks) - set(range(world))), sorted(set(range(world)) - set(ranks))
        found = [f"it names ranks {lacking}, which do not exist"] if lacking else []
        found += [f"it does not name ranks {idle}"] if idle else []
        raise ValueError(
            f"the map {format_stage_map(stage_map)!r} does not fit the job's {world} ranks: "
            f"{' and '.join(found)} "
            "(start as many workers as the map has ranks, or pass the launcher's map; with torchrun "
            f"write it yourself: {format_stage_map([range(world)])!r} for data parallelism, "
            f"{format_stage_map([rank] for rank in range(world))!r} for a pipeline)"
        )


def refuse_inseparable(plan: Plan, captured: Captured) -> None:
    """Check that values between stages with different numbers of replicas can be split by sample."""
    for one, (stage, following) in enumerate(pairwise(plan.stages)):
        reasons = captured.inseparable(stage.stop) if plan.uneven else []
        if reasons:
            raise CaptureError(
                f"stages {one} and {one + 1} have {len(stage.ranks)} and {len(following.ranks)} replicas, "
                f"but the values between them cannot be split by sample: {list_some(reasons)} "
                "(use the same number of replicas for all stages, or other cuts: spans=..., CutPoints)"
            )


def refuse_detached(captured: Captured, model: nn.Module) -> None:
    """Refuse a model with trainable weights that its loss does not depend on."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and captured.untouched() == frozenset(captured.parameters):
        raise CaptureError(
            "the loss does not depend on any trainable weight, so nothing would be trained (is the loss "
            "detached, computed under no_grad, or through item() or argmax?)"
        )


def refuse_unforeseen(
    captured: Captured, sampled: Captured, state: StageState, plan: Plan, stage: int
) -> None:
    """Refuse inputs that need state or communication that the sample inputs did not need."""
    own = plan.stages[stage]
    program, of_sample = captured.carve(own.first, own.stop), sampled.carve(own.first, own.stop)
    lacking = [name for name in program.state if name not in state.canonical]
    found = [f"stage uses {list_some(lacking)}"] if lacking else []
    if len(own.ranks) > 1:
        changed = sorted(set(program.mutated) - set(of_sample.mutated))
        found += [f"stage changes {list_some(changed)}"] if changed else []
        draws = captured.random and not sampled.random and not plan.uneven
        found += ["model draws random numbers"] if draws else []
    if found:
        raise ValueError(
            f"with these inputs the {found[0]}, with the sample inputs it did not (wrap the model with "
            "sample inputs that use all optional parts: dropout, layers, BatchNorm)"
        )


def plan_stages(
    stage_map: StageMap,
    captured: Captured,
    spans: Sequence[tuple[int, int]] | None,
    recompute: bool | Sequence[bool],
    *,
    from_cache: bool,
) -> tuple[StagePlan, ...]:
    depth = len(stage_map)
    if spans is None:
        widths = [len(ranks) for ranks in stage_map]
        if len(set(widths)) > 1:
            spans = balance_over([segment.flops_per_sample for segment in captured.graph.segments], widths)
        else:
            cached = read_spans(captured.graph.fingerprint, depth) if from_cache else None
            spans = cached or estimated_spans(captured, depth)
    bounds = [first for first, _ in spans] + [captured.num_segments]
    if [tuple(span) for span in spans] != list(pairwise(bounds)) or bounds[0] != 0:
        raise ValueError(
            f"spans must be {depth} contiguous, non-empty ranges that cover segments 0 to "
            f"{captured.num_segments - 1}, but are {list(spans)}"
        )
    if len(spans) != depth or any(first >= stop for first, stop in spans):
        raise ValueError(
            f"spans must have at least one segment for each of the {depth} stages, but are {list(spans)}"
        )
    flags = [recompute] * depth if isinstance(recompute, bool) else list(recompute)
    if len(flags) != depth:
        raise ValueError(
            f"recompute must be a bool (for all stages), or one for each of the {depth} stages, not {flags}"
        )
    return tuple(
        StagePlan(first, stop, ranks, bool(flag))
        for (first, stop), ranks, flag in zip(spans, stage_map, flags, strict=True)
    )


def estimated_spans(captured: Captured, depth: int) -> tuple[tuple[int, int], ...]:
    """Balance the stages by work estimated from shapes."""
    return balance(
        [segment.flops_per_sample for segment in captured.graph.segments],
        stages=depth,
        crossing=captured.crossing_bytes,
    )


def refuse_coupled_losses(
    model: nn.Module,
    captured: Captured,
    inputs: Mapping[str, object],
    plan: Plan,
    *,
    device: torch.device,
    ways_out: str = (
        "use one micro-batch and one replica (chunk_size = batch_size); or, if a mean over micro-batches is "
        "what you want, say how to weigh them: loss_weight=lambda batch: len(batch[name])"
    ),
) -> None:
    """Refuse a loss whose parts do not add up, if a step has several micro-batches or replicas."""
    if plan.batch_size <= plan.microbatch_size and all(len(stage.ranks) == 1 for stage in plan.stages):
        return
    found = explain_parts(model, captured, inputs, device=device, limit=CHECKED_PARAMETERS)
    if found is not None:
        raise CaptureError(
            f"{found}. So its gradients may change with the number of micro-batches and replicas. Return a "
            f"mean or a sum over samples or tokens; or {ways_out}."
        )


def check_once(
    model: nn.Module,
    captured: Captured,
    inputs: Mapping[str, object],
    plan: Plan,
    *,
    device: torch.device,
    convention: CallConvention | None = None,
    from_cache: bool = True,
) -> None:
    """Compare the captured model with the original, unless it is too large or was compared before."""
    if from_cache and read_spans(plan.fingerprint, plan.depth):
        return
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters) or sum(p.numel() for p in parameters) > CHECKED_PARAMETERS:
        log.info("the captured model was not compared with the original, because it is on meta or too large")
    else:
        check_capture(model, captured, inputs, device=device, convention=convention)
    # Not the plan's spans: those of the script or a profile are for this run only.
    write_spans(plan.fingerprint, estimated_spans(captured, plan.depth))


def trained_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters that are not frozen, with aliases of shared ones."""
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if parameter.requires_grad)


def all_names(model: nn.Module) -> frozenset[str]:
    """Return all names of parameters and buffers, with aliases of shared ones."""
    parameters, buffers = model.named_parameters, model.named_buffers
    named = *parameters(remove_duplicate=False), *buffers(remove_duplicate=False)
    return frozenset(model.state_dict()).union(name for name, _ in named)
