"""Plans a model's layout without its devices, and without its values: what `RaNNCModule` would choose."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyrannc import deployment
from pyrannc.calls import agree, look_at, sample_of
from pyrannc.configuration import read_configuration
from varuna.capture import Source
from varuna.capture.model.call_convention import StructuredCall
from varuna.observe.progress_bar import capture_progress
from varuna.plan.cost.estimate import Speed
from varuna.plan.cut.blocks import partition
from varuna.plan.plan_file import PinnedPlan, read_plan
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
    """The deployment of a model, on `meta` if need be, that is called with `args` and `kwargs` by each rank.

    `device` is the kind of the devices, `memory_gb` what each has, `speed` how fast they are: that of a
    deployment that was measured on such a device, or a `Speed`; without, what such devices reach, about.
    `batch_size` is that of all ranks, if not as many samples as were given for each. `out` is where to
    write it, for `load_deployment`. The options are those of RaNNCModule.
    """
    configuration = read_configuration(os.environ, Path.home(), options)
    if speed is not None and not isinstance(speed, Speed):
        speed = read_speed(speed)
    measured = read_profile(configuration.graph_profile_file) if configuration.load_graph_profile else None
    if memory_gb is None and speed is None and measured is None:
        raise ValueError(
            "nothing says how much memory a device has (give memory_gb, or the speed of a deployment)"
        )
    calling, leaves = StructuredCall.of(model, args, kwargs or {}, grad_enabled=True)
    dims = dict(batch_dims or {})
    draft, sizes = look_at(
        leaves,
        str(calling.key),
        batch_dims=dims,
        gradients=calling.gradients,
        training=True,
        keeps=True,
        precision=precision,
    )
    agreed = agree([draft], [sizes], dims)
    # A torch without CUDA knows no tensors there, not even such as have no values.
    kind = "cpu" if device == "cuda" and not torch.cuda.is_available() else device
    source = Source(
        model, precision=precision, device_type=kind, partition=partition, watch=capture_progress(shown=True)
    )
    inputs, batch = sample_of(agreed.draft, agreed.dims, dict(agreed.shared), 2)
    ordered = {name: inputs[name] for name in calling.names}
    captured = source.capture(ordered, training=True, batch=batch, convention=calling)
    memory = speed.memory_bytes if speed is not None else 0
    memory = measured.device_memory_bytes if measured is not None else memory
    subject = deployment.Subject(
        source,
        captured,
        batch_size or ranks * (agreed.num_samples(draft, sizes) or 1),
        sum(inputs[name].nbytes for name in agreed.dims) // 2,
        [f"machine{rank // ranks_per_machine}" for rank in range(ranks)],
        torch.device(device),
        memory_bytes=memory if memory_gb is None else int(memory_gb * (1 << 30)),
        speed=speed,
    )
    pinned = deployment.choose(subject, configuration, deployment.known_costs(subject, configuration, ""))
    if out is not None:
        deployment.save(out, pinned)
    return pinned


def read_speed(file: str | os.PathLike[str]) -> Speed:
    """Of the devices of a saved deployment."""
    speed = read_plan(file).speed
    if speed is None or not speed.measured_on:
        raise ValueError(
            f"the deployment {os.fspath(file)} tells no speed, for nothing was measured for it "
            "(save one that RaNNCModule has measured, or give a Speed)"
        )
    return speed
