"""Deciding how a model is wrapped, before anything is done: this rank, its device, the cut, the check."""

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from varuna.capture import Captured, StageState, check_capture
from varuna.errors import CaptureError, list_some
from varuna.plan import balance, balance_over
from varuna.train.cache import read_spans, write_spans
from varuna.types import Plan, StageMap, StagePlan, format_stage_map

log = logging.getLogger("varuna")

CHECKED_PARAMETERS = 200_000_000
"""Up to this size the captured model is compared with the user's before it is trusted."""


def check_sizes(batch_size: int, chunk_size: int) -> None:
    for name, value, meaning in (
        ("batch_size", batch_size, "the samples of the whole job in one step"),
        ("chunk_size", chunk_size, "the samples of one micro-batch"),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive whole number ({meaning}), not {value!r}")


WRAPPERS = "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "RaNNCModule", "Varuna"


def check_model(model: object) -> None:
    """A plain module: what others have wrapped around it comes after, or is an option here."""
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"model must be a torch.nn.Module, not {found} (give the model that you have built)")
    around = type(model).__name__
    if around in WRAPPERS:
        raise TypeError(f"the model is wrapped already, in {around} (give the plain model)")
    if around == "OptimizedModule":
        raise TypeError(
            "the model went through torch.compile (give the plain model; Varuna takes compile=True)"
        )


def call_for_sample(get_batch: Callable[..., Mapping[str, object]]) -> Mapping[str, object]:
    """`get_batch(size, device=None)`, or one that knows of no device."""
    takes_device = "device" in inspect.signature(get_batch).parameters
    return get_batch(2, device="cpu") if takes_device else get_batch(2)


def join_job(stage_map: StageMap) -> int:
    """This process's rank; joins torch.distributed where the script has not."""
    ranks = sorted(rank for row in stage_map for rank in row)
    if not dist.is_initialized():
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks == [0] and world == 1:
            return 0
        missing = [
            name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
        ]
        if missing and ranks != [0]:
            raise RuntimeError(
                f"the map {format_stage_map(stage_map)!r} needs {len(ranks)} processes, but this one was not "
                f"started as one of several: {', '.join(missing)} not set (start it with `python -m "
                "varuna.run_varuna` or torchrun, or call torch.distributed.init_process_group)"
            )
        _check_fit(stage_map, world)
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    _check_fit(stage_map, dist.get_world_size())
    return dist.get_rank()


def _check_fit(stage_map: StageMap, world: int) -> None:
    ranks = sorted(rank for row in stage_map for rank in row)
    if ranks != list(range(world)):
        lacking, idle = sorted(set(ranks) - set(range(world))), sorted(set(range(world)) - set(ranks))
        found = [f"it names {lacking}, which are not there"] if lacking else []
        found += [f"it leaves out {idle}"] if idle else []
        raise ValueError(
            f"the map {format_stage_map(stage_map)!r} does not fit the job's {world} ranks: "
            f"{' and '.join(found)} "
            "(start as many workers as the map has ranks, or pass the launcher's own map; under torchrun "
            f"you write it: {format_stage_map([range(world)])!r} for replicas alone, "
            f"{format_stage_map([rank] for rank in range(world))!r} for a pipeline)"
        )


def refuse_inseparable(plan: Plan, captured: Captured) -> None:
    """Between stages that differ in their number of replicas all values are parted by sample."""
    for one, (stage, following) in enumerate(pairwise(plan.stages)):
        reasons = captured.inseparable(stage.stop) if plan.uneven else []
        if reasons:
            raise CaptureError(
                f"stages {one} and {one + 1} have {len(stage.ranks)} and {len(following.ranks)} replicas, "
                f"but what crosses the cut between them cannot be parted by sample: {list_some(reasons)} "
                "(give all stages as many replicas, or cut elsewhere: spans=..., CutPoints)"
            )


def refuse_detached(captured: Captured, model: nn.Module) -> None:
    """A model whose weights are all frozen can be evaluated; one that means to learn has to be able to."""
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if trains and captured.untouched() == frozenset(captured.parameters):
        raise CaptureError(
            "nothing leads from the model's weights to its loss, so none of them would learn (is the loss "
            "detached, made under no_grad, or by way of item() or argmax?)"
        )


def refuse_unforeseen(
    captured: Captured, sampled: Captured, state: StageState, plan: Plan, stage: int
) -> None:
    """What a stage holds, and what replicas tell each other, follows from the sample inputs."""
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
            "sample inputs that turn on all that may be on: dropout, layers, BatchNorm)"
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
            f"spans must part the segments 0 to {captured.num_segments} into {depth} runs without gap or "
            f"overlap, each at least one long, but are {list(spans)}"
        )
    if len(spans) != depth or any(first >= stop for first, stop in spans):
        raise ValueError(
            f"spans must give each of the {depth} stages at least one segment, but are {list(spans)}"
        )
    flags = [recompute] * depth if isinstance(recompute, bool) else list(recompute)
    if len(flags) != depth:
        raise ValueError(
            f"recompute must be a bool (for all), or one for each of the {depth} stages, not {flags}"
        )
    return tuple(
        StagePlan(first, stop, ranks, bool(flag))
        for (first, stop), ranks, flag in zip(spans, stage_map, flags, strict=True)
    )


def estimated_spans(captured: Captured, depth: int) -> tuple[tuple[int, int], ...]:
    """Stages of equal work, as far as shapes tell, before anything is measured."""
    return balance(
        [segment.flops_per_sample for segment in captured.graph.segments],
        stages=depth,
        crossing=captured.crossing_bytes,
    )


def check_once(
    model: nn.Module, captured: Captured, inputs: Mapping[str, object], plan: Plan, *, from_cache: bool
) -> None:
    """Compares captured and original, unless this very graph was compared before, or it is too large."""
    if from_cache and read_spans(plan.fingerprint, plan.depth):
        return
    parameters = list(model.parameters())
    if any(p.is_meta for p in parameters) or sum(p.numel() for p in parameters) > CHECKED_PARAMETERS:
        log.info("the captured model is not compared with the original: it is on meta, or large")
    else:
        check_capture(model, captured, inputs)
    # A cut that was given, or follows from a profile, is for this run alone.
    write_spans(plan.fingerprint, estimated_spans(captured, plan.depth))


def all_names(model: nn.Module) -> frozenset[str]:
    return frozenset(model.state_dict()) | {
        name
        for name, _ in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
