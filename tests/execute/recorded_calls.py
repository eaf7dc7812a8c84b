"""A CUDA graph simulated with CPU operations: recorded without effect, replayed on the same memory.

Values that the host reads again, or tensors that move between micro-batches, fail here as they do on a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import varuna.train.assemble
from tests.tasks import train
from varuna.execute.step.cuda_graphs import Record

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # all: BatchNorm does not declare what it changes
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            found = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def record(function: Callable[[], None]) -> Callable[[], None]:
    recorder = CallRecorder()
    with recorder:
        function()
    recorder.undo()
    return recorder.replay


@contextmanager
def recorders(recorder: Record | None = record) -> Iterator[list[Record]]:
    """Give every device such recorders, or its own, inside the block. Yields those that were made."""
    made: list[Record] = []
    before = varuna.train.assemble.make_recorders

    def make_recorders(device: torch.device) -> Callable[[], Record]:
        own = before(device)

        def make_recorder() -> Record:
            made.append(recorder or own())  # type: ignore[misc]
            return made[-1]

        return make_recorder

    varuna.train.assemble.make_recorders = make_recorders
    try:
        yield made
    finally:
        varuna.train.assemble.make_recorders = before


def train_replayed(*args: Any, device: str = "cpu", **options: Any) -> tuple[dict[str, Any], int]:
    """Train with CUDA graphs on a GPU, else with the recorders above; return how many were made."""
    with recorders(record if device == "cpu" else None) as made:
        return train(*args, cuda_graphs=True, device=device, **options), len(made)
