"""The arguments of `Varuna`, as the steps that wrap a model receive them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.execute.step.scatter import WeightFunction
from varuna.types import ChannelName, Op, PrecisionName, ScheduleName, StageMap


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
