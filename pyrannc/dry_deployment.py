"""`dry_run`: the layout that `RaNNCModule` would choose, planned without devices and without values.

The module must not be called dry_run: it would hide the function `pyrannc.dry_run`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyrannc import deployment
from pyrannc.calls import agree_on_call, describe_call
from pyrannc.configuration import Configuration, read_configuration
from pyrannc.layouts import DeploymentTask
from pyrannc.model_costs import read_known_costs
from varuna.capture import Source
from varuna.capture.model.call_convention import StructuredCall
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cost.estimate import Speed
from varuna.plan.cut.blocks import partition
from varuna.plan.plan_file import PinnedPlan, read_plan, write_plan
from varuna.plan.profile_file import read_profile
from varuna.types import PrecisionName


def dry_run(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int,
    ranks_per_machine: int = 8,
    device: str = "cuda",
    memory_gb: float | None = None,
    speed: Speed | str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    precision: PrecisionName = "fp32",
    batch_dims: Mapping[str, int | None] | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: object,
) -> PinnedPlan:
    """Return the deployment of a model that each of `ranks` calls with `args` and `kwargs`.

    The model may be on the `meta` device. `device` is the type of the devices and `memory_gb` the memory
    of each. `speed` is a `Speed`, or the file of a deployment measured on such a device; without it,
    typical speeds are assumed. `batch_size` is the global one; without it, every rank calls with as many
    samples as given here. `out` is a file to write, for `load_deployment`. `options` are those of
    RaNNCModule.
    """
    configuration = read_configuration(os.environ, Path.home(), options)
    if speed is not None and not isinstance(speed, Speed):
        speed = read_speed(speed)
    memory = _memory_bytes(memory_gb, speed, configuration)
    convention, leaves = StructuredCall.of(model, args, kwargs or {}, grad_enabled=True)
    dims = dict(batch_dims or {})
    with torch.enable_grad():
        signature, sizes = describe_call(
            leaves, convention, batch_dims=dims, training=True, precision=precision
        )
    call = agree_on_call([signature], [sizes], dims, convention)
    # A torch without CUDA has no CUDA tensors, not even without values.
    device_type = "cpu" if device == "cuda" and not torch.cuda.is_available() else device
    source = Source(
        model,
        precision=precision,
        device_type=device_type,
        partition=partition,
        watch=capture_progress(shown=True),
    )
    task = DeploymentTask(
        source,
        call.capture(source),
        batch_size or ranks * (call.num_samples(signature, sizes) or 1),
        call.sample_bytes,
        [f"machine{rank // ranks_per_machine}" for rank in range(ranks)],
        torch.device(device),
        memory_bytes=memory,
        speed=speed,
    )
    pinned = deployment.choose(task, configuration, read_known_costs(task, configuration, ""))
    if out is not None:
        write_plan(Path(out), pinned)
    return pinned


def _memory_bytes(memory_gb: float | None, speed: Speed | None, configuration: Configuration) -> int:
    """Return the memory of a device: as given, or that of the measured device."""
    if memory_gb is not None:
        return int(memory_gb * (1 << 30))
    if configuration.load_graph_profile:
        return read_profile(configuration.graph_profile_file).device_memory_bytes
    if speed is None:
        raise ValueError(
            "the memory of a device is unknown (pass memory_gb, or the speed of a measured deployment)"
        )
    return speed.memory_bytes


def read_speed(file: str | os.PathLike[str]) -> Speed:
    """Return the speed of the devices on which a saved deployment was measured."""
    speed = read_plan(file).speed
    if speed is None or not speed.measured_on:
        raise ValueError(
            f"the deployment {os.fspath(file)} has no speed, because nothing was measured for it (pass a "
            "deployment that RaNNCModule has measured, or a Speed)"
        )
    return speed
