"""Sends tensors between two ranks with NCCL, if each rank has its own GPU.

A link has a lane in each direction: a group of two ranks in which the sender broadcasts. The socket carries
a description of each message. The receiver makes its call of the broadcast when the description arrives:

    sender    description ──────► receiver allocates memory and makes its call
              its own call ─────► the computing stream waits for the broadcast when the message is taken

NCCL matches calls by their order only. A lane has one direction, and its calls follow the descriptions, which
arrive in order. Each lane has its own stream, so no host waits, and activations never queue behind gradients
(given enough hardware queues: the launchers set CUDA_DEVICE_MAX_CONNECTIONS).

Lanes use broadcast because NCCL connects send and receive at their first call, where each host would wait
for the other. A broadcast is connected once the lane has been tested.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import ProcessGroupGloo

from varuna.execute.comm.frames import TensorMeta
from varuna.execute.comm.slots import (
    SLOT_BYTES,
    OwnSlot,
    SlotMemory,
    cuda,
    message_bytes,
    padded,
    tensors_in,
)

TEST_VALUE = 86


class GroupLane:
    """One direction between two ranks, over a torch.distributed backend. The sender is its first rank."""

    def __init__(self, name: str, backend: Any, *, sends: bool, device: torch.device) -> None:
        self.name = name
        self.backend = backend
        self._options: Any = distributed_c10d.BroadcastOptions()
        self._options.rootRank = 0
        self._options.asyncOp = True
        self._test(sends, device)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Make this end's call and return at once. The sender's bytes are read, the receiver's written."""
        work: dist.Work = self.backend.broadcast([tensor], self._options)
        return work

    def _test(self, sends: bool, device: torch.device) -> None:
        """Connect both ends, so that no later call waits for the other host."""
        value = torch.full((1,), TEST_VALUE if sends else 0, dtype=torch.uint8, device=device)
        with cuda.device(device) if device.type == "cuda" else nullcontext():
            self.broadcast(value).wait()
        if int(value) != TEST_VALUE:
            raise RuntimeError(
                f"a test value over {self.name} arrived as {int(value)}, not {TEST_VALUE} "
                "(use channel='host' instead)"
            )


def open_lanes(
    rank: int,
    peer: int,
    store: distributed_c10d.Store,
    *,
    device: torch.device,
    nccl: bool,
    timeout_seconds: float,
) -> tuple[GroupLane, GroupLane]:
    """Return the lanes to and from the peer. Both ends call it and open the lower rank's lane first."""
    lanes = {}
    for source in sorted((rank, peer)):
        key = distributed_c10d.PrefixStore(f"lane/{min(rank, peer)}-{max(rank, peer)}/from {source}", store)
        place, timeout = int(source != rank), timedelta(seconds=timeout_seconds)
        lanes[source] = GroupLane(
            "NCCL" if nccl else "gloo",
            make_nccl_group(key, place, 2, timeout) if nccl else ProcessGroupGloo(key, place, 2, timeout),
            sends=source == rank,
            device=device,
        )
    return lanes[rank], lanes[peer]


def make_nccl_group(store: distributed_c10d.Store, place: int, size: int, timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, place, size, options)


class LaneSender:
    """Sending end of a lane."""

    def __init__(self, lane: GroupLane) -> None:
        self.lane = lane
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()  # tensors that are still read

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Queue contiguous tensors, behind the work that computes them."""
        for tensor in tensors:
            if tensor.numel():
                self._pending.append((self.lane.broadcast(tensor.reshape(-1).view(torch.uint8)), tensor))

    def release_sent(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until everything has arrived, so that this process may exit."""
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            self.release_sent()
            time.sleep(1e-3)


class LaneReceiver:
    """Receiving end of a lane. A GPU reuses memory and fills it on a stream of its own."""

    def __init__(self, lane: GroupLane, device: torch.device) -> None:
        self.lane = lane
        self.device = device
        self._expected: deque[tuple[OwnSlot | Tensor, Sequence[TensorMeta], list[dist.Work]]] = deque()
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None
        self._num_slots = 0
        self._free: list[OwnSlot] = []
        self._freed: deque[OwnSlot] = deque()

    def expect(self, metas: Sequence[TensorMeta]) -> None:
        """Make the calls for a message that the sender has announced."""
        num_bytes = message_bytes([meta.num_bytes for meta in metas])
        slot: OwnSlot | Tensor
        if self._stream is None:
            slot = memory = torch.empty(num_bytes, dtype=torch.uint8)
        else:
            slot = self._allocate(num_bytes)
            slot.emptied.wait(self._stream)
            memory = slot.memory
        works, place = [], 0
        with nullcontext() if self._stream is None else cuda.stream(self._stream):
            for _, _, num_bytes in metas:
                if num_bytes:
                    works.append(self.lane.broadcast(memory[place : place + num_bytes]))
                place += padded(num_bytes)
        self._expected.append((slot, metas, works))

    def tensors(self) -> list[Tensor]:
        """Return the oldest expected message. On a GPU, work that is queued later waits for it."""
        slot, metas, works = self._expected.popleft()
        for work in works:
            work.wait()
        if isinstance(slot, OwnSlot):
            total = message_bytes([meta.num_bytes for meta in metas])
            slot = torch.as_tensor(SlotMemory(slot, total, self._freed), device=self.device)
        return tensors_in(slot.untyped_storage(), metas, self.device)

    def take_freed(self) -> None:
        """Collect memory that is no longer used."""
        while self._freed:
            slot = self._freed.popleft()
            slot.emptied.record(cuda.current_stream(self.device))
            self._free.append(slot)

    def _allocate(self, num_bytes: int) -> OwnSlot:
        self.take_freed()
        fitting = [slot for slot in self._free if slot.memory.nbytes >= num_bytes]
        if fitting:
            slot = min(fitting, key=lambda slot: slot.memory.nbytes)
            self._free.remove(slot)
        else:
            slot = OwnSlot(self._num_slots, padded(num_bytes, SLOT_BYTES), self.device)
            self._num_slots += 1
        return slot
