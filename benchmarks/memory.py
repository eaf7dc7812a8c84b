"""Number of micro-batches that a stage holds at once, and the bytes that autograd keeps for them."""

from collections.abc import Collection
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.models import Size
from benchmarks.sides import Ours
from varuna.schedule import held as most_held
from varuna.types import ScheduleName


class Kept:
    """A tensor that autograd saved; it counts for as long as autograd keeps it."""

    def __init__(self, tensor: Tensor, counter: "SavedBytes") -> None:
        # Detached: an output would hold the very node that holds it, and neither would go.
        self.tensor, self.counter = tensor.detach(), counter
        counter.add(tensor.untyped_storage(), +1)

    def __del__(self) -> None:
        self.counter.add(self.tensor.untyped_storage(), -1)


class SavedBytes:
    """Bytes of all memory that autograd keeps from forwards for backwards, but for what is there anyway."""

    def __init__(self, left_out: Collection[Tensor]) -> None:
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        self._uses: dict[int, int] = {}
        self.now = self.most = 0

    def add(self, storage: torch.UntypedStorage, change: int) -> None:
        place = storage.data_ptr()
        if place in self._left_out:
            return
        before = self._uses.get(place, 0)
        self._uses[place] = before + change
        if not before or not self._uses[place]:
            self.now += storage.nbytes() * change
            self.most = max(self.most, self.now)

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, self), lambda k: k.tensor)


class Held(msgspec.Struct, frozen=True):
    """One stage: what it held at most, and what its schedule allows."""

    stage: int
    microbatches: int
    most_microbatches: int
    num_bytes: int
    most_bytes: int


def held(size: Size, depth: int, microbatches: int, schedule: ScheduleName, recompute: bool) -> Held:
    """Count what this rank's stage holds in a step; a step of one micro-batch gives the unit of bytes."""
    found: list[tuple[int, int]] = []
    for count in (1, microbatches):
        side = Ours(size, depth=depth, microbatches=count, schedule=schedule, recompute=recompute)
        side.step()
        saved = SavedBytes([*side.model.parameters(), *side.inputs.values()])
        with saved.watch():
            side.step()
        found.append((side.model._trainer.engine.stage.most_held, saved.most))
        stage = side.model.stage
        side.close()
    (_, unit), (most, num_bytes) = found
    place: dict[str, Any] = {"stage": stage, "stages": depth, "microbatches": microbatches}
    allowed = most_held(schedule, **place)
    graphs = 1 if recompute else allowed  # a recomputing stage has one graph at a time
    return Held(stage, most, allowed, num_bytes, graphs * unit)
