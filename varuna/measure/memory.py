"""Counts the bytes that a segment holds between its forward and its backward, and needs besides.

On CUDA the allocator knows. Elsewhere nobody does, so every tensor that an operation gives back is
watched: its memory counts once, however many views look at it, for as long as anything refers to it. What
an operation takes and gives back within itself is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(NamedTuple):
    """Of one segment at one micro-batch size."""

    activation: int  # held from its forward to its backward
    working: int  # the most in use besides
    split: int  # held more, between the two parts of a backward


class Runnable(Protocol):
    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]: ...
    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_weights(self) -> None: ...


class Meter(AbstractContextManager["Meter"]):
    """How many bytes are in use now, and the most since `restart`; of CUDA's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def most(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Memory:
    """A tensor's memory, referred to without keeping it; its address is nobody else's as long as this is."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_there(self) -> bool:
        return not self._reference.expired()  # type: ignore[no-untyped-call]


def address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class CountingMeter(Meter):
    """Counts the tensors that operations make while it is entered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._seen: dict[int, Memory] = {}
        self._most = 0
        self._watch = _Watch(self._see)

    def now(self) -> int:
        self._seen = {key: memory for key, memory in self._seen.items() if memory.is_there}
        return sum(memory.num_bytes for memory in self._seen.values())

    def restart(self) -> None:
        self._most = self.now()

    def most(self) -> int:
        return self._most

    def __enter__(self) -> CountingMeter:
        self._watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _see(self, made: Iterable[Tensor]) -> None:
        for tensor in made:
            if address(tensor) not in self._seen:
                self._seen[address(tensor)] = Memory(tensor)
        self._most = max(self._most, self.now())


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that what a backward makes is seen as well."""

    def __init__(self, see: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        leaves = (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self._see(leaf for leaf in leaves if address(leaf) not in known)
        return made


def meter_for(device: torch.device) -> Meter:
    return Meter(device) if device.type == "cuda" else CountingMeter(device)


def count_bytes(
    piece: Runnable,
    given: Sequence[Tensor],
    gradients: Sequence[Tensor],
    relayed: Sequence[bool],
    meter: Meter,
) -> Bytes:
    """Runs a segment twice, its weights' gradients being there already.

    What it sends on is not counted, for the next segment is given it; nor what it was only handed
    through, which an earlier one counts.
    """
    with meter:
        before = meter.now()
        held, counted_elsewhere, in_forward = _forward(piece, given, relayed, meter)
        meter.restart()
        piece.backward([gradient.clone() for gradient in gradients])
        in_backward = meter.most() - before - held
        left = meter.now() - before  # nothing, but for gradients that were not there before
        held_again, _, _ = _forward(piece, given, relayed, meter)
        piece.backward_inputs([gradient.clone() for gradient in gradients])
        between = meter.now() - before - left - held_again
        piece.backward_weights()
    return Bytes(held - counted_elsewhere, max(in_forward, in_backward, 0), max(between, 0))


def _forward(
    piece: Runnable, given: Sequence[Tensor], relayed: Sequence[bool], meter: Meter
) -> tuple[int, int, int]:
    """What it holds, what of that is counted elsewhere, and what it needed besides."""
    before = meter.now()
    meter.restart()
    received = [tensor.clone() for tensor in given]  # its own, as if they had just arrived
    own = set(map(address, received))
    handed_through = sum(
        tensor.untyped_storage().nbytes() for tensor, was in zip(received, relayed, strict=True) if was
    )
    outputs = piece.forward(received)
    del received
    sent = {address(output): Memory(output) for output in outputs if address(output) not in own}
    del outputs
    most = meter.most() - before
    held = meter.now() - before
    kept = sum(memory.num_bytes for memory in sent.values() if memory.is_there)
    return held, handed_through + kept, most - held
