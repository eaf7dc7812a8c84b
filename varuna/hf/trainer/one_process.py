"""Lets transformers and accelerate run on every rank as in one process: Varuna distributes the work."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from varuna.execute.device.facts import choose_gpu
from varuna.train.process_rank import find_local_rank, find_rank
from varuna.types import PrecisionName

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "CCL_WORLD_SIZE",
)
"""Variables from which accelerate concludes that it has to distribute the work itself."""
PRECISIONS: dict[str, PrecisionName] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
"""The precision of `Varuna` for accelerate's names of mixed precisions."""
HIDDEN_FIELDS = ("gradient_checkpointing", "torch_compile", "average_tokens_across_devices")
"""Fields that Varuna honours instead of transformers: it sees False."""


def own_rank() -> int:
    """Return this process's rank in the job."""
    return dist.get_rank() if dist.is_initialized() else find_rank(os.environ).rank


def set_one_process(args: Any) -> None:
    """Change the class of TrainingArguments: they describe one process, whose rank is this one's."""
    if not getattr(args, "varuna_one_process", False):
        kind: Any = type(args)
        args.__class__ = _one_process_class(kind)
        device = own_device(args.device, os.environ, num_devices=torch.cuda.device_count())
        if device != args.device:
            args.__dict__["varuna_device"] = device
            torch.cuda.set_device(device)


def own_device(device: torch.device, environment: Mapping[str, str], *, num_devices: int) -> torch.device:
    """Return the device of this rank. `device` is that of transformers, the first GPU without LOCAL_RANK.

    mpirun and srun set other variables. srun may also show each process its own GPU only.
    """
    local_rank = find_local_rank(environment)
    if device.type != "cuda" or "LOCAL_RANK" in environment or local_rank < 0 or num_devices == 1:
        return device
    return choose_gpu(-1, local_rank, find_rank(environment).rank, count=num_devices)


def restored(kind: Any, values: dict[str, Any]) -> Any:
    """Return TrainingArguments of their original class, from a pickle."""
    args = kind.__new__(kind)
    args.__dict__.update(values)
    return args


@cache
def _one_process_class(kind: type) -> type:
    from transformers.training_args import ParallelMode

    def is_given(name: str) -> property:
        """Hide the value of a field from transformers. `given` returns it."""
        return property(lambda _self: False, lambda self, value: self.__dict__.__setitem__(name, value))

    def to_dict(self: Any) -> dict[str, Any]:
        """Return the values that the script gave: loggers show them, and trl makes an SFTConfig of them."""
        values: dict[str, Any] = kind.to_dict(self)  # type: ignore[attr-defined]
        return values | {name: given(self, name) for name in HIDDEN_FIELDS if name in values}

    members = {
        "__doc__": kind.__doc__,
        "__reduce_ex__": lambda self, _protocol: (restored, (kind, dict(self.__dict__))),
        "varuna_one_process": True,
        "device": property(
            lambda self: self.__dict__.get("varuna_device") or kind.device.fget(self)  # type: ignore[attr-defined]
        ),
        "world_size": property(lambda _self: 1),
        "n_gpu": property(lambda _self: 1),
        "parallel_mode": property(lambda _self: ParallelMode.NOT_PARALLEL),
        "process_index": property(lambda _self: own_rank()),
        "local_process_index": property(
            lambda _self: max(0, find_local_rank(os.environ)) if dist.is_initialized() else 0
        ),
        "mixed_precision": property(
            lambda _self: "no", lambda self, value: self.__dict__.__setitem__("mixed_precision", value)
        ),
        "to_dict": to_dict,
        **{name: is_given(name) for name in HIDDEN_FIELDS},
    }
    return type(kind.__name__, (kind,), members)


def given(args: Any, name: str) -> Any:
    """Return the value that the script gave to a field that is hidden from transformers."""
    return args.__dict__.get(name)


@contextmanager
def alone(*, cpu: bool) -> Iterator[None]:
    """Make accelerate's state that of one process. The process group of the job stays."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    hidden = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        PartialState(cpu=cpu)
        yield
    finally:
        os.environ.update(hidden)
