"""What to say when a device has no room left: who takes it, and the nearest layout that would fit."""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor

from varuna.errors import OutOfDeviceMemory
from varuna.execute.step.stage import Stage
from varuna.units import memory

USABLE = 0.92
"""Of a device: the rest goes to fragments and to what libraries take for themselves."""
ASKED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class Layout:
    """What of a plan decides the memory of one of its stages."""

    stages: int
    microbatch_size: int
    held: Callable[[int], int]  # micro-batches of a size that the schedule lets this stage hold
    recompute: bool

    @property
    def nearest(self) -> Iterator[tuple[int, bool]]:
        """Other sizes of micro-batches, each with or without recompute: the least change first."""
        sizes = [self.microbatch_size]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        if not self.recompute and self.held(sizes[0]) > 1:
            yield sizes[0], True
        for recompute in sorted({self.recompute, True}):
            for size in sizes[1:]:
                yield size, recompute


@dataclass(frozen=True)
class Remedies:
    """By what names a user sets another layout."""

    recompute: str
    microbatches: Callable[[int], str]  # of so many samples
    stages: Callable[[int], str]


@dataclass(frozen=True)
class Use:
    """Bytes on a device at the moment when one more was asked for."""

    steady: Mapping[str, int]  # what stays from step to step, by name
    activations: int  # of `held` micro-batches and, where it is a forward, the one at work
    begun: int  # how many these are
    spare: int  # in torch's cache, in pieces too small
    elsewhere: int  # other processes on the device, and its own libraries
    capacity: int
    coming: int = 0  # gradients that the first backward will make

    @property
    def consumers(self) -> dict[str, int]:
        of = f"activations of {self.begun} micro-batch{'es' if self.begun > 1 else ''}"
        others = {of: self.activations, "fragments": self.spare, "other processes": self.elsewhere}
        return {**self.steady, **others}


def explain(use: Use, layout: Layout, asked: int, remedies: Remedies) -> str:
    largest = sorted(use.consumers.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {memory(num_bytes)}" for name, num_bytes in largest)
    return (
        f"the device's {memory(use.capacity)} are full: {memory(asked)} more were asked for beside {listed} "
        f"({propose(use, layout, asked, remedies)})"
    )


def propose(use: Use, layout: Layout, asked: int, remedies: Remedies) -> str:
    """The least change that fits, as far as what was seen so far tells: activations may yet have grown."""
    if use.elsewhere > use.capacity / 2:
        return "other processes have most of it: give this rank a device of its own, or end them"
    steady = sum(use.steady.values()) + use.coming
    room = USABLE * use.capacity - use.elsewhere - steady
    each = (use.activations + asked) / max(use.begun, 1)
    for size, recompute in layout.nearest:
        if room > each * size / layout.microbatch_size * (1 if recompute else layout.held(size)):
            holds_one = f"{remedies.recompute}: this stage then holds one micro-batch whole"
            smaller = f"micro-batches of {size}: {remedies.microbatches(size)}"
            if size == layout.microbatch_size:
                return f"try {holds_one}"
            return f"try {smaller}" + ("" if recompute == layout.recompute else f", and {remedies.recompute}")
    needed = steady + each / layout.microbatch_size
    stages = max(layout.stages + 1, ceil(layout.stages * needed / (USABLE * use.capacity)))
    return f"try {remedies.stages(stages)}"


def explained(
    error: torch.OutOfMemoryError,
    *,
    device: torch.device,
    parameters: Iterable[Tensor],
    buffers: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None,
    stage: Stage,
    layout: Layout,
    remedies: Remedies,
) -> OutOfDeviceMemory:
    """The error that tells who has the memory; what the failed step has of it is free by then, for the error
    of torch, and the model, may live on, in cycles too."""
    weights = list(parameters)
    steady = {
        "parameters": _bytes(weights, device) + _bytes(buffers, device),
        "gradients": _bytes((p.grad for p in weights), device),
        "optimizer state": 0 if optimizer is None else _bytes(_state(optimizer), device),
    }
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = min(1.0, torch.cuda.get_per_process_memory_fraction(device)) * total
    use = Use(
        steady,
        activations=max(0, allocated - sum(steady.values())),
        begun=len(stage.held) + 1,
        spare=reserved - allocated,
        elsewhere=0 if allowed < total else max(0, total - free - reserved),
        capacity=int(allowed),
        coming=_bytes((p for p in weights if p.requires_grad and p.grad is None), device),
    )
    found = ASKED.search(str(error))
    asked = 0 if found is None else int(float(found[1]) * UNITS[found[2]])
    stage.clear()
    traceback.clear_frames(error.__traceback__)
    return OutOfDeviceMemory(explain(use, layout, asked, remedies))


@contextmanager
def telling(tell: Callable[[torch.OutOfMemoryError], Exception | None]) -> Iterator[None]:
    """Where a device has no room, raises what is told of it; None: nothing is known but torch's own error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        told = tell(error)
        if told is None:
            raise
        try:
            raise told from error
        finally:
            del told  # else it holds itself by this frame, and with it what the callers have


def _bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.device == device)


def _state(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    values: Iterable[Any] = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, Tensor))
