"""Device memory that two processes of one machine share, so that a message is one copy on the device.

The receiver lends slots of its own memory; the sender copies straight into one, on a stream of its own,
and the socket carries only a word about it:

    sender    ASK for bytes ──────────────► LEND a slot          (until then messages go through the host)
              THANKS, with `filled` ──────►
              copy into it, `filled` ─────► its stream waits for `filled`, and computes on the slot itself
              `emptied`, then the next ◄─── RETURN, when nothing refers to the message any more

Neither host waits for either device: `filled` and `emptied` are events that both processes see, and what
is queued on one device waits for what is queued on the other. Each waits only for events that were recorded
before, so no circle can close.

Where both processes have the same GPU, they take turns on it, and one whose queue only waits for the other
is given its turns all the same. So there a message counts as arrived once it is filled (`is_there`).
"""

import contextlib
import functools
import logging
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("varuna")
cuda: Any = torch.cuda  # which is typed in part only

ALIGNMENT = 256
SLOT_BYTES = 2 << 20
"""Slots are multiples of it, so that a somewhat larger message fits too."""
MOST_SLOTS = 256

Form = tuple[torch.dtype, tuple[int, ...], int]
"""Of a tensor in a message: its dtype, its shape, its bytes."""


def padded(num_bytes: int, to: int = ALIGNMENT) -> int:
    return -(-num_bytes // to) * to


def message_bytes(sizes: Sequence[int]) -> int:
    """Of tensors of so many bytes, laid out one after the other."""
    return sum(map(padded, sizes))


class Loan(NamedTuple):
    """What the other process needs to use a slot."""

    number: int
    num_bytes: int
    device_uuid: str
    memory: Any  # as torch shares a storage
    emptied: bytes  # an event


class Lent:
    """A slot of this process, written by the other."""

    def __init__(self, number: int, num_bytes: int, device: torch.device) -> None:
        self.number = number
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.filled: Any = None  # the other's
        self.emptied = cuda.Event(interprocess=True)
        # Whoever had this memory before may still be computing on it.
        self.emptied.record(cuda.current_stream(device))

    def loan(self) -> Loan:
        storage: Any = self.memory.untyped_storage()
        return Loan(
            self.number,
            self.memory.nbytes,
            device_uuid(self.memory.device),
            storage._share_cuda_(),
            self.emptied.ipc_handle(),
        )


class Message:
    """A slot as long as anything refers to what it holds; torch keeps this object with the memory."""

    def __init__(self, slot: Lent, num_bytes: int, returned: "deque[Lent]") -> None:
        self._slot = slot
        self._returned = returned
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (slot.memory.data_ptr(), False),
            "version": 2,
        }

    def __del__(self) -> None:
        self._returned.append(self._slot)  # in any thread: whoever computes sees to the rest


class Lender:
    """The receiving end: lends slots, makes tensors of what was put into them, and gives slots back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.takes_turns = False  # with the other process, on one GPU
        self._slots: list[Lent] = []
        self._returned: deque[Lent] = deque()

    def lend(self, num_bytes: int, to: str) -> bytes | None:
        """A loan for GPU `to`; None where there are too many, or that GPU or this memory cannot be shared."""
        if len(self._slots) >= MOST_SLOTS or reachable(self.device, to) is None:
            return None
        slot = Lent(len(self._slots), padded(num_bytes, SLOT_BYTES), self.device)
        try:
            loan = slot.loan()
        except RuntimeError as error:
            log.warning("no device memory is shared between stages: %s", error)
            return None
        self.takes_turns = to == device_uuid(self.device)
        self._slots.append(slot)
        return pickle.dumps(tuple(loan))

    def thanked(self, number: int, packed: bytes) -> None:
        """The other has the slot, and will say with this event that it is filled."""
        uuid, handle = pickle.loads(packed)
        self._slots[number].filled = cuda.Event.from_ipc_handle(reachable(self.device, uuid), handle)

    def is_there(self, number: int) -> bool:
        """Whether to compute on what the other puts into a slot, or to leave the GPU to it until then."""
        filled = self._slots[number].filled
        return not self.takes_turns or (filled is not None and bool(filled.query()))

    def tensors(self, number: int, forms: Sequence[Form]) -> list[Tensor]:
        """What the other process has put, or will have put, into a slot; that `is_there`."""
        slot = self._slots[number]
        assert slot.filled is not None, "a message before the thanks"
        if not self.takes_turns:  # else it is there, and a wait would be given a turn of its own
            slot.filled.wait(cuda.current_stream(self.device))
        total = message_bytes([num_bytes for _, _, num_bytes in forms])
        storage = torch.as_tensor(Message(slot, total, self._returned), device=self.device).untyped_storage()
        return tensors_in(storage, forms, self.device)

    def take_back(self) -> list[int]:
        """Slots that nobody refers to any more; all that uses them is queued by now."""
        numbers: list[int] = []
        if not self._returned:
            return numbers
        stream = cuda.current_stream(self.device)
        busy = not stream.query()  # else all is done, and a record would be given a turn of its own
        while self._returned:
            slot = self._returned.popleft()
            if busy:
                slot.emptied.record(stream)
            numbers.append(slot.number)
        return numbers


class Borrowed:
    """A slot of the other process, as this one sees it."""

    def __init__(self, loan: Loan, *, own: torch.device, device: torch.device) -> None:
        self.number = loan.number
        self.num_bytes = loan.num_bytes
        _, *rest = loan.memory
        storage: Any = torch.UntypedStorage._new_shared_cuda(device.index, *rest)
        self.memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
        with cuda.device(own):
            self.filled = cuda.Event(interprocess=True)
        self.emptied = cuda.Event.from_ipc_handle(device, loan.emptied)
        self._rooms: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}

    def room(self, place: int, like: Tensor) -> Tensor:
        """Where a tensor goes that begins at a place; messages come in few forms, so these are kept."""
        key = place, like.dtype, like.shape
        if key not in self._rooms:
            self._rooms[key] = self.memory[place : place + like.nbytes].view(like.dtype).view(like.shape)
        return self._rooms[key]


class Borrower:
    """The sending end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refused = False  # this process cannot reach the other's memory
        self.borrowed = 0
        self._free: list[Borrowed] = []
        self._used: dict[int, Borrowed] = {}
        self._stream = cuda.Stream(device)
        self._made = cuda.Event()  # what is to be copied
        self._sources: deque[tuple[Borrowed, list[Tensor]]] = deque()  # until they are copied

    def accept(self, packed: bytes) -> tuple[int, bytes] | None:
        """Takes a loan, and gives thanks for it: the slot's number, and what to send.

        Where the other's memory is out of reach, messages go on through the host.
        """
        loan = Loan(*pickle.loads(packed))
        device = reachable(self.device, loan.device_uuid)
        try:
            if device is None:
                raise RuntimeError(f"{self.device} cannot reach the memory of GPU {loan.device_uuid}")
            slot = Borrowed(loan, own=self.device, device=device)
            thanks = pickle.dumps((device_uuid(self.device), slot.filled.ipc_handle()))
        except RuntimeError as error:
            self.refused = True
            log.warning("stages exchange tensors through the host's memory: %s", error)
            return None
        self._free.append(slot)
        self.borrowed += 1
        return slot.number, thanks

    def returned(self, numbers: Sequence[int]) -> None:
        self._free.extend(self._used.pop(number) for number in numbers)

    def put(self, tensors: Sequence[Tensor]) -> int | None:
        """Queues the copy; the slot's number, None where no slot is free that is large enough."""
        needed = message_bytes([tensor.nbytes for tensor in tensors])
        fitting = [slot for slot in self._free if slot.num_bytes >= needed]
        if not fitting:
            return None
        slot = min(fitting, key=lambda slot: slot.num_bytes)
        self._free.remove(slot)
        self._used[slot.number] = slot
        self._made.record(cuda.current_stream(self.device))
        self._made.wait(self._stream)
        slot.emptied.wait(self._stream)
        place = 0
        with cuda.stream(self._stream):
            for tensor in tensors:
                if tensor.numel():
                    slot.room(place, tensor).copy_(tensor, non_blocking=True)
                place += padded(tensor.nbytes)
        slot.filled.record(self._stream)
        self._sources.append((slot, list(tensors)))
        return slot.number

    def let_go(self) -> None:
        """Of what has been copied."""
        while self._sources and self._sources[0][0].filled.query():
            self._sources.popleft()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # of a device that has failed: nothing is under way there
            self._stream.synchronize()  # before the other's memory is out of sight
        self._sources.clear()
        self._free.clear()
        self._used.clear()


def tensors_in(storage: torch.UntypedStorage, forms: Sequence[Form], device: torch.device) -> list[Tensor]:
    """A message's tensors, which lie one after the other."""
    found, place = [], 0
    for dtype, shape, num_bytes in forms:
        tensor = torch.empty(0, dtype=dtype, device=device)
        found.append(tensor.set_(storage, place // dtype.itemsize, shape, contiguous_strides(shape)))
        place += padded(num_bytes)
    return found


@functools.lru_cache(maxsize=1024)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def device_uuid(device: torch.device) -> str:
    return str(cuda.get_device_properties(device).uuid)


def reachable(own: torch.device, uuid: str) -> torch.device | None:
    """The GPU of that name as this process sees it, where its memory can be written from our own."""
    for index in range(cuda.device_count()):
        device = torch.device("cuda", index)
        if device_uuid(device) == uuid and (index == own.index or _are_peers(own, device)):
            return device
    return None


def gpus_in_reach(own: torch.device) -> tuple[str, ...]:
    """The names of those whose memory can be written from our own, itself among them."""
    uuids = [device_uuid(torch.device("cuda", index)) for index in range(cuda.device_count())]
    return tuple(uuid for uuid in uuids if reachable(own, uuid) is not None)


def _are_peers(one: torch.device, other: torch.device) -> bool:
    return bool(cuda.can_device_access_peer(one, other))
