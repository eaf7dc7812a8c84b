"""GPU memory that two processes of one machine share, so that a message is one copy on the device.

The receiver offers slots of its own memory. The sender copies into a slot on a separate stream, and the
socket carries only control messages:

    sender    REQUEST_SLOT, with a size ───► OFFER_SLOT         (until then messages go through host memory)
              ACCEPT_SLOT, with `filled` ──►
              copy, then `filled` ─────────► its stream waits for `filled` and computes on the slot itself
              `emptied`, then the next ◄──── RETURN_SLOTS, when nothing refers to the message any more

No host waits for a device: `filled` and `emptied` are events that both processes see, and work queued on one
device waits for work queued on the other. A wait is only for events that are already recorded, so there is
no deadlock.

Two processes on the same GPU run by turns, even if the queue of one only waits. So on a shared GPU a message
counts as arrived only once it is filled (`is_filled`).
"""

import contextlib
import functools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from varuna.codec import UNDECODABLE
from varuna.execute.comm.frames import InvalidFrame, TensorMeta

log = logging.getLogger("varuna")
cuda: Any = torch.cuda  # only partly typed

ALIGNMENT = 256
SLOT_BYTES = 2 << 20
"""Slots are multiples of this size, so that a slightly larger message fits too."""
MAX_SLOTS = 256


def padded(num_bytes: int, to: int = ALIGNMENT) -> int:
    return -(-num_bytes // to) * to


def message_bytes(sizes: Sequence[int]) -> int:
    """Return the size of a message with tensors of these sizes, one after the other."""
    return sum(map(padded, sizes))


class SharedStorage(NamedTuple):
    """GPU memory as torch shares it: the result of `_share_cuda_`, without the sender's device index."""

    handle: bytes
    num_bytes: int
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


class SlotHandle(NamedTuple):
    """Everything the other process needs to use a slot."""

    number: int
    num_bytes: int
    device_uuid: str
    memory: SharedStorage
    emptied: bytes  # IPC handle of an event


class SlotAcceptance(NamedTuple):
    """The event that the other process waits for before it reads a slot."""

    device_uuid: str
    filled: bytes  # IPC handle


Message = TypeVar("Message")


def _decode(packed: bytes, kind: type[Message]) -> Message:
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except UNDECODABLE as error:
        raise InvalidFrame(f"expected a {kind.__name__}: {error}") from None


class OwnSlot:
    """A slot in this process's memory that the other process writes."""

    def __init__(self, number: int, num_bytes: int, device: torch.device) -> None:
        self.number = number
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.filled: Any = None  # event of the other process
        self.emptied = cuda.Event(interprocess=True)
        # Queued work may still use this memory for a tensor that was freed.
        self.emptied.record(cuda.current_stream(device))

    def handle(self) -> SlotHandle:
        storage: Any = self.memory.untyped_storage()
        return SlotHandle(
            self.number,
            self.memory.nbytes,
            device_uuid(self.memory.device),
            SharedStorage(*storage._share_cuda_()[1:]),
            self.emptied.ipc_handle(),
        )


class SlotMemory:
    """Keeps a slot in use while any tensor refers to it: torch keeps this object with the memory."""

    def __init__(self, slot: OwnSlot, num_bytes: int, freed: "deque[OwnSlot]") -> None:
        self._slot = slot
        self._freed = freed
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (slot.memory.data_ptr(), False),
            "version": 2,
        }

    def __del__(self) -> None:
        self._freed.append(self._slot)  # from any thread; the computing thread does the rest


class SlotReceiver:
    """Receiving end: offers slots, makes tensors of their content, and returns them to the sender."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shares_gpu = False  # the other process runs on the same GPU
        self._slots: list[OwnSlot] = []
        self._freed: deque[OwnSlot] = deque()

    def offer(self, num_bytes: int, to: str) -> bytes | None:
        """Return a new slot for GPU `to`; None if there are too many or the memory cannot be shared."""
        if len(self._slots) >= MAX_SLOTS or find_reachable(self.device, to) is None:
            return None
        slot = OwnSlot(len(self._slots), padded(num_bytes, SLOT_BYTES), self.device)
        try:
            handle = slot.handle()
        except RuntimeError as error:
            log.warning("stages do not share GPU memory: %s", error)
            return None
        self.shares_gpu = to == device_uuid(self.device)
        self._slots.append(slot)
        return msgspec.msgpack.encode(handle)

    def accepted(self, number: int, packed: bytes) -> None:
        """Store the event that the other process records when it has filled the slot."""
        sender, handle = _decode(packed, SlotAcceptance)
        self._slots[number].filled = cuda.Event.from_ipc_handle(find_reachable(self.device, sender), handle)

    def is_filled(self, number: int) -> bool:
        """Return False while a process on the same GPU fills the slot: it should get the GPU until then."""
        filled = self._slots[number].filled
        return not self.shares_gpu or (filled is not None and bool(filled.query()))

    def tensors(self, number: int, metas: Sequence[TensorMeta]) -> list[Tensor]:
        """Return the tensors of a slot that `is_filled`; queued work waits for the copy."""
        slot = self._slots[number]
        assert slot.filled is not None, "a message in a slot before its acceptance"
        if not self.shares_gpu:  # else it is filled, and a wait would cost a turn on the GPU
            slot.filled.wait(cuda.current_stream(self.device))
        total = message_bytes([meta.num_bytes for meta in metas])
        storage = torch.as_tensor(SlotMemory(slot, total, self._freed), device=self.device).untyped_storage()
        return tensors_in(storage, metas, self.device)

    def take_freed(self) -> list[int]:
        """Return the numbers of slots that are no longer used; all work on them is queued."""
        numbers: list[int] = []
        if not self._freed:
            return numbers
        stream = cuda.current_stream(self.device)
        busy = not stream.query()  # else everything is done, and a record would cost a turn on the GPU
        while self._freed:
            slot = self._freed.popleft()
            if busy:
                slot.emptied.record(stream)
            numbers.append(slot.number)
        return numbers


class RemoteSlot:
    """A slot in the other process's memory that this process writes."""

    def __init__(self, handle: SlotHandle, *, own: torch.device, device: torch.device) -> None:
        self.number = handle.number
        self.num_bytes = handle.num_bytes
        storage: Any = torch.UntypedStorage._new_shared_cuda(device.index, *handle.memory)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        with cuda.device(own):
            self.filled = cuda.Event(interprocess=True)
        self.emptied = cuda.Event.from_ipc_handle(device, handle.emptied)
        self._views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def view(self, place: int, like: Tensor) -> Tensor:
        """Return the memory at `place` as a tensor like the given one. Cached, as messages repeat."""
        key = place, like.dtype, like.shape
        if key not in self._views:
            self._views[key] = self.memory[place : place + like.nbytes].view(like.dtype).view(like.shape)
        return self._views[key]


class SlotSender:
    """Sending end of the slots."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.unreachable = False  # this process cannot write the other's memory
        self.num_slots = 0
        self._free: list[RemoteSlot] = []
        self._used: dict[int, RemoteSlot] = {}
        self._stream = cuda.Stream(device)
        self._computed = cuda.Event()
        self._sources: deque[tuple[RemoteSlot, list[Tensor]]] = deque()  # kept until they are copied

    def accept(self, packed: bytes) -> tuple[int, bytes] | None:
        """Open an offered slot. Return its number and the acceptance to send; None if it is out of reach."""
        handle = _decode(packed, SlotHandle)
        device = find_reachable(self.device, handle.device_uuid)
        try:
            if device is None:
                raise RuntimeError(f"{self.device} cannot reach the memory of GPU {handle.device_uuid}")
            slot = RemoteSlot(handle, own=self.device, device=device)
            acceptance = SlotAcceptance(device_uuid(self.device), slot.filled.ipc_handle())
        except RuntimeError as error:
            self.unreachable = True
            log.warning("stages exchange tensors through host memory: %s", error)
            return None
        self._free.append(slot)
        self.num_slots += 1
        return slot.number, msgspec.msgpack.encode(acceptance)

    def returned(self, numbers: Sequence[int]) -> None:
        self._free.extend(self._used.pop(number) for number in numbers)

    def put(self, tensors: Sequence[Tensor]) -> int | None:
        """Queue the copy and return the slot's number; None if no slot is free and large enough."""
        needed = message_bytes([tensor.nbytes for tensor in tensors])
        fitting = [slot for slot in self._free if slot.num_bytes >= needed]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.num_bytes)
        self._free.remove(slot)
        self._used[slot.number] = slot
        self._computed.record(cuda.current_stream(self.device))
        self._computed.wait(self._stream)
        slot.emptied.wait(self._stream)
        place = 0
        with cuda.stream(self._stream):
            for tensor in tensors:
                if tensor.numel():
                    slot.view(place, tensor).copy_(tensor, non_blocking=True)
                place += padded(tensor.nbytes)
        slot.filled.record(self._stream)
        self._sources.append((slot, list(tensors)))
        return slot.number

    def release_copied(self) -> None:
        while self._sources and self._sources[0][0].filled.query():
            self._sources.popleft()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that has failed
            self._stream.synchronize()  # before the other's memory is unmapped
        self._sources.clear()
        self._free.clear()
        self._used.clear()


def tensors_in(
    storage: torch.UntypedStorage, metas: Sequence[TensorMeta], device: torch.device
) -> list[Tensor]:
    """Return the tensors of a message, which lie one after the other in the storage."""
    found, place = [], 0
    for dtype, shape, num_bytes in metas:
        tensor = torch.empty(0, dtype=dtype, device=device)
        found.append(tensor.set_(storage, place // dtype.itemsize, shape, _contiguous_strides(shape)))
        place += padded(num_bytes)
    return found


@functools.lru_cache(maxsize=1024)
def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def device_uuid(device: torch.device) -> str:
    return str(cuda.get_device_properties(device).uuid)


def find_reachable(own: torch.device, uuid: str) -> torch.device | None:
    """Return the GPU with this UUID, if this process's GPU can write its memory."""
    for index in range(cuda.device_count()):
        device = torch.device("cuda", index)
        if device_uuid(device) == uuid and (
            index == own.index or bool(cuda.can_device_access_peer(own, device))
        ):
            return device
    return None


def reachable_gpus(own: torch.device) -> tuple[str, ...]:
    """Return the UUIDs of all GPUs whose memory `own` can write, itself included."""
    uuids = [device_uuid(torch.device("cuda", index)) for index in range(cuda.device_count())]
    return tuple(uuid for uuid in uuids if find_reachable(own, uuid) is not None)
