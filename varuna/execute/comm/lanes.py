"""Tensors between two ranks by a library that moves them itself: NCCL, where each rank has a GPU of its own.

A link has a lane in each direction: a group of two, in which the sender broadcasts. The socket carries a word
about each message, as it does about shared memory, and on that word the receiver joins in:

    sender    the word ─────────► memory for it, and the receiver's half of the broadcast
              its own half ─────► the stream that computes waits for it, when the message is taken

NCCL pairs calls by their order alone. A lane goes one way, and its calls follow the words, which come in
order. Each lane has a stream of its own, so no host waits, and what goes up never stands behind what comes
down (with as many queues of the device: CUDA_DEVICE_MAX_CONNECTIONS, which the launchers set).

A broadcast rather than send and receive, for these two are connected at their first call only, where each
host would wait for the other; a broadcast's ring is there once the lane has been tried.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from varuna.execute.comm.slots import SLOT_BYTES, Form, Lent, Message, cuda, message_bytes, padded, tensors_in

GREETING = 86


class Work(Protocol):
    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class Lane(Protocol):
    """One direction between two ranks."""

    name: str  # of what carries it

    def broadcast(self, tensor: Tensor) -> Work:
        """This end's half: the sender's bytes go out, the receiver's are filled. Returns at once."""


class GroupLane:
    """A lane of one of torch's own backends; the sender is the first of its group."""

    def __init__(self, name: str, backend: Any, *, sends: bool, device: torch.device) -> None:
        self.name = name
        self._backend = backend
        self._options: Any = distributed_c10d.BroadcastOptions()
        self._options.rootRank = 0
        self._options.asyncOp = True
        self._try(sends, device)

    def broadcast(self, tensor: Tensor) -> Work:
        work: Work = self._backend.broadcast([tensor], self._options)
        return work

    def _try(self, sends: bool, device: torch.device) -> None:
        """Both ends are connected when this returns: no later call waits for the other host."""
        word = torch.full((1,), GREETING if sends else 0, dtype=torch.uint8, device=device)
        with cuda.device(device) if device.type == "cuda" else nullcontext():
            self.broadcast(word).wait()
        if int(word) != GREETING:
            raise RuntimeError(
                f"a first word over {self.name} arrived as {int(word)}, not {GREETING} "
                "(channel='host' does without it)"
            )


def open_lanes(
    rank: int,
    peer: int,
    store: distributed_c10d.Store,
    *,
    device: torch.device,
    nccl: bool,
    timeout_seconds: float,
) -> tuple[Lane, Lane]:
    """To the peer, and from it. Both ends call it, and both open the lane of the lower rank first."""
    lanes = {}
    for source in sorted((rank, peer)):
        key = distributed_c10d.PrefixStore(f"lane/{min(rank, peer)}-{max(rank, peer)}/from {source}", store)
        place, timeout = int(source != rank), timedelta(seconds=timeout_seconds)
        lanes[source] = GroupLane(
            "NCCL" if nccl else "gloo",
            nccl_of(key, place, 2, timeout) if nccl else ProcessGroupGloo(key, place, 2, timeout),
            sends=source == rank,
            device=device,
        )
    return lanes[rank], lanes[peer]


def nccl_of(store: distributed_c10d.Store, place: int, size: int, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, size, options)


class Outlet:
    """The sending end."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._under_way: deque[tuple[Work, Tensor]] = deque()  # which are read until they have arrived

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Dense ones. Queued behind what makes them."""
        for tensor in tensors:
            if tensor.numel():
                self._under_way.append((self.lane.broadcast(tensor.reshape(-1).view(torch.uint8)), tensor))

    def let_go(self) -> None:
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def finish(self, seconds: float) -> None:
        """Waits for a while until all has arrived: after it, this process may end."""
        deadline = time.monotonic() + seconds
        while self._under_way and time.monotonic() < deadline:
            self.let_go()
            time.sleep(1e-3)


class Inlet:
    """The receiving end. On a processor, every message has fresh memory."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self.lane = lane
        self.device = device
        self._expected: deque[tuple[Any, Sequence[Form], list[Work]]] = deque()

    def expect(self, forms: Sequence[Form]) -> None:
        """Joins in with the sender of a message in these forms."""
        room, memory = self._room(message_bytes([num_bytes for _, _, num_bytes in forms]))
        works, place = [], 0
        with self._aside(room):
            for _, _, num_bytes in forms:
                if num_bytes:
                    works.append(self.lane.broadcast(memory[place : place + num_bytes]))
                place += padded(num_bytes)
        self._expected.append((room, forms, works))

    def tensors(self) -> list[Tensor]:
        """The oldest message that is expected; on a device, what is queued from now on waits for it."""
        room, forms, works = self._expected.popleft()
        for work in works:
            work.wait()
        return tensors_in(self._storage(room, forms), forms, self.device)

    def take_back(self) -> None:
        """Memory that nobody refers to any more."""

    def _room(self, num_bytes: int) -> tuple[Any, Tensor]:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory, memory

    def _aside(self, room: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def _storage(self, room: Any, forms: Sequence[Form]) -> torch.UntypedStorage:
        memory: Tensor = room
        return memory.untyped_storage()


class DeviceInlet(Inlet):
    """On a GPU, memory is kept for the next message, and filled on a stream of its own."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        super().__init__(lane, device)
        self._stream = cuda.Stream(device)
        self._slots = 0
        self._free: list[Lent] = []
        self._returned: deque[Lent] = deque()

    def take_back(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            slot.emptied.record(cuda.current_stream(self.device))
            self._free.append(slot)

    def _room(self, num_bytes: int) -> tuple[Lent, Tensor]:
        self.take_back()
        fitting = [slot for slot in self._free if slot.memory.nbytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.memory.nbytes)
            self._free.remove(slot)
        else:
            slot = Lent(self._slots, padded(num_bytes, SLOT_BYTES), self.device)
            self._slots += 1
        return slot, slot.memory

    def _aside(self, room: Lent) -> AbstractContextManager[Any]:
        room.emptied.wait(self._stream)
        found: AbstractContextManager[Any] = cuda.stream(self._stream)
        return found

    def _storage(self, room: Lent, forms: Sequence[Form]) -> torch.UntypedStorage:
        total = message_bytes([num_bytes for _, _, num_bytes in forms])
        return torch.as_tensor(Message(room, total, self._returned), device=self.device).untyped_storage()


def inlet_for(lane: Lane, device: torch.device) -> Inlet:
    return DeviceInlet(lane, device) if device.type == "cuda" else Inlet(lane, device)
