"""Explains an out-of-memory error: the largest users of the memory, and the nearest layout that fits."""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from varuna.errors import OutOfDeviceMemory
from varuna.execute.step.stage import Stage
from varuna.units import memory

USABLE = 0.92
"""Share of a device's memory that a layout may use; the rest is for fragments and libraries."""
REQUESTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True)
class StageLayout:
    """The parts of a plan that determine the memory of one of its stages."""

    stages: int
    microbatch_size: int
    held: Callable[[int], int]  # number of micro-batches of a given size that this stage holds at once
    recompute: bool

    @property
    def nearest(self) -> Iterator[tuple[int, bool]]:
        """Other micro-batch sizes, with or without recompute; the smallest change first."""
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
    """The settings with which a user chooses another layout."""

    recompute: str
    microbatches: Callable[[int], str]  # for a given micro-batch size
    stages: Callable[[int], str]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on a device at the moment of a failed allocation."""

    steady: Mapping[str, int]  # kept from step to step, by name
    activations: int
    begun: int  # micro-batches that these activations belong to
    spare: int  # in torch's cache, in blocks that are too small
    elsewhere: int  # other processes on the device, and its libraries
    capacity: int
    coming: int = 0  # gradients that the first backward will allocate


def explain(use: MemoryUse, layout: StageLayout, requested: int, remedies: Remedies) -> str:
    of = f"activations of {use.begun} micro-batch{'es' if use.begun > 1 else ''}"
    others = {of: use.activations, "fragments": use.spare, "other processes": use.elsewhere}
    largest = sorted({**use.steady, **others}.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {memory(num_bytes)}" for name, num_bytes in largest)
    return (
        f"the device's memory of {memory(use.capacity)} is full: could not allocate {memory(requested)} more "
        f"beside {listed} ({propose(use, layout, requested, remedies)})"
    )


def propose(use: MemoryUse, layout: StageLayout, requested: int, remedies: Remedies) -> str:
    """Return the smallest change that fits. An estimate: activations might have grown further."""
    if use.elsewhere > use.capacity / 2:
        return "other processes use most of it: give this rank its own device, or end them"
    steady = sum(use.steady.values()) + use.coming
    available = USABLE * use.capacity - use.elsewhere - steady
    each = (use.activations + requested) / max(use.begun, 1)
    for size, recompute in layout.nearest:
        if available > each * size / layout.microbatch_size * (1 if recompute else layout.held(size)):
            if size == layout.microbatch_size:
                return f"try {remedies.recompute}: this stage then holds one complete micro-batch"
            smaller = f"try micro-batches of {size}: {remedies.microbatches(size)}"
            return smaller + ("" if recompute == layout.recompute else f", and {remedies.recompute}")
    needed = steady + each / layout.microbatch_size
    stages = max(layout.stages + 1, ceil(layout.stages * needed / (USABLE * use.capacity)))
    return f"try {remedies.stages(stages)}"


def describe_out_of_memory(
    error: torch.OutOfMemoryError,
    *,
    device: torch.device,
    parameters: Iterable[Tensor],
    buffers: Iterable[Tensor],
    optimizer: torch.optim.Optimizer | None,
    stage: Stage,
    layout: StageLayout,
    remedies: Remedies,
) -> OutOfDeviceMemory:
    """Return an error that names the users of the memory, and free the memory of the failed step.

    Torch's error, the model and reference cycles may live on, so the step's memory is freed here.
    """
    weights = list(parameters)
    states = () if optimizer is None else (v for state in optimizer.state.values() for v in state.values())
    steady = {
        "parameters": _bytes(weights, device) + _bytes(buffers, device),
        "gradients": _bytes((p.grad for p in weights), device),
        "optimizer state": _bytes((v for v in states if isinstance(v, Tensor)), device),
    }
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    allowed = min(1.0, torch.cuda.get_per_process_memory_fraction(device)) * total
    use = MemoryUse(
        steady,
        activations=max(0, allocated - sum(steady.values())),
        begun=len(stage.held) + 1,
        spare=reserved - allocated,
        elsewhere=0 if allowed < total else max(0, total - free - reserved),
        capacity=int(allowed),
        coming=_bytes((p for p in weights if p.requires_grad and p.grad is None), device),
    )
    found = REQUESTED.search(str(error))
    requested = 0 if found is None else int(float(found[1]) * UNITS[found[2]])
    stage.clear()
    traceback.clear_frames(error.__traceback__)
    return OutOfDeviceMemory(explain(use, layout, requested, remedies))


@contextmanager
def replace_out_of_memory(describe: Callable[[torch.OutOfMemoryError], Exception | None]) -> Iterator[None]:
    """Replace torch's out-of-memory error in this block by `describe(error)`; None keeps it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        described = describe(error)
        if described is None:
            raise
        try:
            raise described from error
        finally:
            del described  # else this frame keeps the error, and with it the callers' tensors, alive


def _bytes(tensors: Iterable[Tensor | None], device: torch.device) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None and tensor.device == device)
