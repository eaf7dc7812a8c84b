"""Bytes that a segment holds between its forward and its backward, and its other memory needs.

On CUDA the allocator counts. On other devices every tensor that an operation returns is watched: its memory
counts once, for any number of views, as long as something refers to it. Memory that an operation allocates
and frees internally is not counted.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class SegmentBytes(NamedTuple):
    """Memory of one segment at one micro-batch size."""

    activation: int  # held from its forward to its backward
    working: int  # the most in use besides
    split: int  # held in addition between the two parts of a backward


class RunnableSegment(Protocol):
    """One segment at one micro-batch size; backwards run in the order of their forwards."""

    def forward(self, given: Sequence[Tensor], *, keep_graph: bool = True) -> list[Tensor]: ...
    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_inputs(self, gradients: Sequence[Tensor]) -> list[Tensor]: ...
    def backward_weights(self) -> None: ...


class Meter:
    """Bytes in use now, and the peak since `restart`, by CUDA's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def counting(self) -> AbstractContextManager[object]:
        """Count inside the `with` block."""
        return nullcontext()

    def now(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)


class WeakStorage:
    """Weak reference to a tensor's memory; while it exists, no other memory has the same address."""

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    @property
    def is_alive(self) -> bool:
        return not self._reference.expired()  # type: ignore[no-untyped-call]


def storage_address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class CountingMeter(Meter):
    """Meter that counts the tensors that operations return."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._seen: dict[int, WeakStorage] = {}
        self._peak = 0

    def counting(self) -> AbstractContextManager[object]:
        return _OperationWatch(self._add)

    def now(self) -> int:
        self._seen = {key: memory for key, memory in self._seen.items() if memory.is_alive}
        return sum(memory.num_bytes for memory in self._seen.values())

    def restart(self) -> None:
        self._peak = self.now()

    def peak(self) -> int:
        return self._peak

    def _add(self, made: Iterable[Tensor]) -> None:
        for tensor in made:
            if storage_address(tensor) not in self._seen:
                self._seen[storage_address(tensor)] = WeakStorage(tensor)
        self._peak = max(self._peak, self.now())


class _OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports the new tensors of each operation; it runs below autograd, so backwards are seen, too."""

    def __init__(self, report: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = {storage_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        leaves = (leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        self._report(leaf for leaf in leaves if storage_address(leaf) not in known)
        return made


def meter_for(device: torch.device) -> Meter:
    return Meter(device) if device.type == "cuda" else CountingMeter(device)


def count_bytes(
    segment: RunnableSegment,
    given: Sequence[Tensor],
    gradients: Sequence[Tensor],
    relayed: Sequence[bool],
    meter: Meter,
) -> SegmentBytes:
    """Run a segment twice and count its bytes; gradients of its weights must exist already.

    Its outputs are not counted: the next segment counts them as its inputs. Inputs that it only relays
    are not counted either: an earlier segment counts them.
    """
    with meter.counting():
        before = meter.now()
        held, counted_elsewhere, in_forward = _count_forward(segment, given, relayed, meter)
        meter.restart()
        segment.backward([gradient.clone() for gradient in gradients])
        in_backward = meter.peak() - before - held
        left = meter.now() - before  # zero, unless a gradient did not exist before
        held_again, _, _ = _count_forward(segment, given, relayed, meter)
        segment.backward_inputs([gradient.clone() for gradient in gradients])
        between = meter.now() - before - left - held_again
        segment.backward_weights()
    return SegmentBytes(max(held - counted_elsewhere, 0), max(in_forward, in_backward, 0), max(between, 0))


def _count_forward(
    segment: RunnableSegment, given: Sequence[Tensor], relayed: Sequence[bool], meter: Meter
) -> tuple[int, int, int]:
    """Return the bytes held after a forward, those of them counted elsewhere, and the peak beyond them."""
    before = meter.now()
    meter.restart()
    received = [tensor.clone() for tensor in given]  # new memory, as if just received
    own = set(map(storage_address, received))
    relayed_bytes = sum(
        tensor.untyped_storage().nbytes()
        for tensor, is_relayed in zip(received, relayed, strict=True)
        if is_relayed
    )
    outputs = segment.forward(received)
    del received
    sent = {
        storage_address(output): WeakStorage(output)
        for output in outputs
        if storage_address(output) not in own
    }
    del outputs
    peak = meter.peak() - before
    held = meter.now() - before
    kept_outputs = sum(memory.num_bytes for memory in sent.values() if memory.is_alive)
    return held, relayed_bytes + kept_outputs, peak - held
