"""The short form of wrapping a model: the layout comes from the launcher, or is chosen here."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from varuna.environment import VarunaEnvironment
from varuna.execute.comm.collective import Collective
from varuna.execute.device.facts import available_bytes, device_memory_bytes, find_device
from varuna.execute.rebuild.generation import start_world
from varuna.execute.update.optimizers import keep_parameters
from varuna.train.process_rank import find_local_rank, find_local_size, find_rank
from varuna.train.validate import start_process_group
from varuna.train.varuna import Varuna
from varuna.types import format_stage_map, parse_stage_map
from varuna.units import format_bytes

log = logging.getLogger("varuna")

STATE_SHARE = 0.6
"""Share of the memory that weights, gradients and optimizer state may take; activations need the rest."""
MICROBATCHES_PER_STAGE = 4
"""With so many micro-batches per stage, a pipeline waits for at most a fifth of the time."""
ACCUMULATION_TOKENS = 32
"""On a CPU, adding a micro-batch's gradients of the weights takes as long as computing so many tokens."""

OptimizerOrFactory = torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def wrap(
    model: nn.Module,
    optimizer: OptimizerOrFactory,
    *,
    batch_size: int,
    sample: Mapping[str, object] | Callable[..., Mapping[str, object]],
    stages: int | None = None,
    microbatch_size: int | None = None,
    device: int | str | torch.device = -1,
    **options: Any,
) -> Varuna:
    """Wrap a model and its optimizer for the processes of this job, however they were started.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model = varuna.wrap(model, optimizer, batch_size=64, sample={"x": x[:2], "y": y[:2]})
        loss, overflow = model.step(inputs)

    `varuna run` decides the layout of its jobs. Under torchrun, mpirun or srun, or in one process, the number
    of stages is `stages`, or the smallest with which the training state fits into memory; the other processes
    are replicas. `optimizer` was made with the parameters of `model`, and then updates this rank's part of
    them; or it is a function that makes one, given parameters. `options` are those of `Varuna`.
    """
    environment = VarunaEnvironment.read(os.environ)
    names: dict[Tensor, str] = {value: name for name, value in model.named_parameters()}
    if isinstance(optimizer, torch.optim.Optimizer):
        _check_optimizer(optimizer, names)
    stage_map, given = environment.stage_to_rank_map, environment.chunk_size
    if stage_map is None:
        stage_map = choose_map(model, stages, device)
    elif stages is not None and stages != len(parse_stage_map(stage_map)):
        raise ValueError(
            f"stages={stages}, but the launcher has chosen the map {stage_map!r} (set --nstages there)"
        )
    size = given or microbatch_size or default_microbatch_size(stage_map, batch_size)
    options = {"local_rank": find_local_rank(os.environ), **options}
    wrapped = Varuna(model, stage_map, sample, batch_size, size, device=device, **options)
    if isinstance(optimizer, torch.optim.Optimizer):
        hand_over(optimizer, names, wrapped)
    else:
        optimizer = optimizer(wrapped.parameters())
    wrapped.set_optimizer(optimizer)
    return wrapped


def default_microbatch_size(stage_map: str, batch_size: int, tokens: int | None = None) -> int:
    """Return the whole share of a replica without a pipeline; else a size that keeps the stages busy.

    `tokens` of a sample, on a CPU: long samples get smaller micro-batches. A share of N tokens in
    micro-batches of t tokens waits for (P - 1) t / N of the time, and accumulates gradients for
    ACCUMULATION_TOKENS / t of it.
    """
    rows = parse_stage_map(stage_map)
    share = -(-batch_size // max(len(row) for row in rows))
    if len(rows) == 1:
        return share
    size = share // (MICROBATCHES_PER_STAGE * len(rows))
    if tokens is not None:
        best = math.sqrt(ACCUMULATION_TOKENS * share * tokens / (len(rows) - 1))
        size = min(size, round(best / tokens))
    return max(1, size)


def choose_map(model: nn.Module, stages: int | None, device: int | str | torch.device) -> str:
    """Return the map of a job whose launcher has chosen none."""
    world = _join()
    if stages is None:
        stages = _fewest_stages(model, join_ranks(), device)
    elif isinstance(stages, bool) or not isinstance(stages, int) or stages < 1 or world % stages:
        raise ValueError(f"stages must be a number that divides the {world} processes, not {stages!r}")
    # The stages of one replica are neighbours: on machines with several devices their links stay inside.
    return format_stage_map([range(stage, world, stages) for stage in range(stages)])


def join_ranks() -> Collective:
    """Return all ranks of the job; initialize torch.distributed if a launcher has started several.

    They exchange values over gloo: the script may have initialized NCCL alone, which sends no CPU tensors.
    """
    world = _join()
    if world == 1:
        return Collective(0, [0])
    return Collective(dist.get_rank(), range(world), dist.new_group(backend="gloo"))


def _join() -> int:
    """Return the number of processes; initialize torch.distributed if a launcher has started several."""
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            start_process_group()
        elif (process := find_rank(os.environ)).world > 1:  # of mpirun or srun
            address = f"tcp://{process.address}:{process.port}"
            start_world(init_method=address, rank=process.rank, world_size=process.world)
    return dist.get_world_size() if dist.is_initialized() else 1


def _fewest_stages(model: nn.Module, ranks: Collective, device: int | str | torch.device) -> int:
    """Return the smallest number of stages with which every rank's part of the training state fits."""
    need, world = training_state_bytes(model), len(ranks.ranks)
    own = int(STATE_SHARE * _space(find_device(device, find_local_rank(os.environ), ranks.rank)))
    limit = min(ranks.gather(own, int))  # all ranks must choose the same
    for stages in (count for count in range(1, world + 1) if world % count == 0):
        if need <= stages * limit:
            if stages > 1:
                log.info("the training state takes %s: %d stages", format_bytes(need), stages)
            return stages
    raise MemoryError(
        f"weights, gradients and optimizer state take about {format_bytes(need)}, but {world} "
        f"process{'es have' if world > 1 else ' has'} space for {format_bytes(world * limit)} of them (start "
        "more processes, or pass stages= and options such as shard_optimizer=True to try it all the same)"
    )


def training_state_bytes(model: nn.Module) -> int:
    """Return the bytes of weights, buffers, gradients, and of an optimizer with two values per weight."""
    total = sum(buffer.nbytes for buffer in model.buffers())
    for parameter in model.parameters():
        total += parameter.nbytes * (4 if parameter.requires_grad else 1)
    return total


def _space(device: torch.device) -> int:
    free = available_bytes(device)
    if free is None:
        return device_memory_bytes(device)
    return min(free, device_memory_bytes(device)) // find_local_size(os.environ)


def _check_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    if optimizer.state:
        raise ValueError(
            "the optimizer has made steps before the model was wrapped (wrap first; `model.resume(store)` or "
            "`load_checkpoint` continue a run)"
        )
    _refuse_foreign(optimizer, names)


def _refuse_foreign(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
    foreign = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"{foreign} of the optimizer's parameters do not belong to the model (make the optimizer with "
            "this model's parameters, or pass a function that makes it; a model that was evaluated over "
            "several stages has other parameters than before)"
        )


def hand_over(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], wrapped: Varuna) -> None:
    """Replace the model's parameters by those of this stage, in the groups that they were in, with state."""
    _refuse_foreign(optimizer, names)
    held = dict(wrapped.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        pairs = [(parameter, held.get(names[parameter])) for parameter in group["params"]]
        keep_parameters(optimizer, group, [own for _, own in pairs])
        for parameter, own in pairs:
            if own is not parameter and parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                if own is not None:
                    optimizer.state[own] = state
