"""A CUDA graph made of operations on the CPU: recorded without effect, replayed on the very same memory.

So what is read anew by the host, or lies elsewhere at the next micro-batch, is as wrong here as it is there.
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
from varuna.execute.step.cuda_graphs import Tape

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tree_leaves((args, kwargs)):  # whatever it says of itself: BatchNorm tells no one
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
    recorder = Recorder()
    with recorder:
        function()
    recorder.undo()
    return recorder.replay


@contextmanager
def tapes(tape: Tape | None = record) -> Iterator[list[Tape]]:
    """Within, any device has such tapes, or its own; those that were asked for."""
    made: list[Tape] = []
    before = varuna.train.assemble.tapes_on

    def tapes_on(device: torch.device) -> Callable[[], Tape]:
        own = before(device)

        def new_tape() -> Tape:
            made.append(tape or own())  # type: ignore[misc]
            return made[-1]

        return new_tape

    varuna.train.assemble.tapes_on = tapes_on
    try:
        yield made
    finally:
        varuna.train.assemble.tapes_on = before


def train_replayed(*args: Any, device: str = "cpu", **options: Any) -> tuple[dict[str, Any], int]:
    """Trains with recordings: by a GPU's own, or the tapes above; how many were made."""
    with tapes(record if device == "cpu" else None) as made:
        return train(*args, cuda_graphs=True, device=device, **options), len(made)
