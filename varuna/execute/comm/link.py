"""A duplex connection to one peer rank: lists of tensors, in order in each direction.

Varuna uses its own sockets instead of torch.distributed's point-to-point calls over gloo, because with gloo
- a message costs about half a millisecond of CPU time,
- an arrival cannot be detected without waiting for it (`is_completed()` is false until `wait()`),
- a call that waits for a silent peer cannot be cancelled,
- shapes must be known in advance, and a wrong dtype is silently reinterpreted.

GPU tensors travel through pinned host memory; or, within one machine, in a slot of the receiver's GPU memory
(`slots.py`); or over an NCCL lane (`lanes.py`). In the last two cases the frame carries only a description.
"""

import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varuna.errors import PeerLost
from varuna.execute.comm.frame_socket import FrameSocket
from varuna.execute.comm.frames import (
    ACCEPT_SLOT,
    BY_LANE,
    BYE,
    DATA,
    FROZEN,
    HEADER,
    IN_SLOT,
    MAGIC,
    OFFER_SLOT,
    REQUEST_SLOT,
    RETURN_SLOTS,
    InvalidFrame,
    OutgoingFrame,
    describe,
    memory_of,
    to_contiguous,
    to_host,
)
from varuna.execute.comm.lanes import GroupLane, LaneReceiver, LaneSender
from varuna.execute.comm.slots import SlotReceiver, SlotSender, device_uuid, message_bytes

LANE_SECONDS = 5.0
"""A closing link waits at most this long for what is still on its lane."""

Delay = Callable[[int], float]
"""Seconds to hold back an outgoing message, by its index: simulates slow links."""


class PeerLink(FrameSocket):
    """Tensors to and from one peer. Only the computing thread may call these methods."""

    def __init__(
        self,
        link: socket.socket,
        peer: int,
        name: str,
        *,
        device: torch.device,
        delay: Delay | None,
        on_backlog: Callable[["PeerLink"], None],
    ) -> None:
        super().__init__(link, peer, name, device=device, on_backlog=on_backlog)
        self.sent = 0
        self.took_frozen = False  # the last message taken: its sender wants no gradients
        self._delay = delay
        can_share = device.type == "cuda" and link.family == socket.AF_UNIX
        self._slots_in = SlotReceiver(device) if can_share else None
        self._slots_out = SlotSender(device) if can_share else None
        self._lane_out: LaneSender | None = None
        self._lane_in: LaneReceiver | None = None
        self._num_filled = 0  # leading messages of the inbox whose slots are filled

    def use_host(self) -> None:
        """Use host memory only. Call it at both ends before the first message."""
        self._slots_in = self._slots_out = None

    def use_lanes(self, out: GroupLane, back: GroupLane) -> None:
        """Use lanes. Call it at both ends before the first message."""
        self.use_host()
        self._lane_out, self._lane_in = LaneSender(out), LaneReceiver(back, self.device)

    @property
    def lane_backends(self) -> list[Any]:
        """Backends of the lanes; none if there are no lanes."""
        return [end.lane.backend for end in (self._lane_out, self._lane_in) if end is not None]

    @property
    def transport(self) -> str:
        """Description of how tensors reach the peer."""
        if self._lane_out is not None:
            return self._lane_out.lane.name
        if self._slots_out is not None and self._slots_out.num_slots:
            return "shared device memory (CUDA IPC)"
        over = "a Unix socket" if self.socket.family == socket.AF_UNIX else "TCP"
        return f"pinned host memory over {over}" if self.device.type == "cuda" else over

    def send(self, tensors: Sequence[Tensor], *, frozen: bool = False) -> None:
        """Queue a message and return. The tensors must not change until it has arrived.

        `frozen`: they depend on no trained weight, so the peer returns no gradients.
        """
        mark = FROZEN if frozen else 0
        if self.over:
            raise self.error()
        self.process_control()
        if self._lane_out is not None and tensors:
            ready = [to_contiguous(tensor.detach()) for tensor in tensors]
            due = self._release_time()
            self._send_header(BY_LANE, describe(ready), len(ready), number=mark, release_seconds=due)
            self._lane_out.put(ready)
            return
        if tensors and self._send_in_slot(tensors, mark):
            return
        ready = [to_host(tensor) for tensor in tensors]
        descriptor = describe(ready)
        payload = [memory_of(tensor) for tensor in ready if tensor.numel()]
        header = HEADER.pack(MAGIC, DATA, len(ready), len(descriptor), sum(map(len, payload)), mark)
        self._enqueue(OutgoingFrame([memoryview(header + descriptor), *payload], ready, self._release_time()))

    def _send_in_slot(self, tensors: Sequence[Tensor], mark: int) -> bool:
        """Send in a slot if one is free and return True; else request one for the next time."""
        slots = self._slots_out
        if slots is None or slots.unreachable or any(tensor.device != self.device for tensor in tensors):
            return False
        sizes = [tensor.nbytes for tensor in tensors]
        if not sum(sizes):
            return False
        slot = slots.put(tensors)
        if slot is None:
            self._send_header(REQUEST_SLOT, device_uuid(self.device).encode(), number=message_bytes(sizes))
            return False
        descriptor = struct.pack("<I", slot) + describe(tensors)
        due = self._release_time()
        self._send_header(IN_SLOT, descriptor, len(tensors), number=mark, release_seconds=due)
        return True

    def _release_time(self) -> float:
        """Count one more message and return when it may be sent."""
        self.sent += 1
        return 0.0 if self._delay is None else time.monotonic() + self._delay(self.sent - 1)

    def _send_header(
        self, kind: int, text: bytes, num_tensors: int = 0, *, number: int = 0, release_seconds: float = 0.0
    ) -> None:
        header = HEADER.pack(MAGIC, kind, num_tensors, len(text), 0, number)
        self._enqueue(OutgoingFrame([memoryview(header + text)], [], release_seconds))

    def process_control(self) -> None:
        """Handle messages about slots and lanes, and release memory that is no longer used."""
        if self._lane_out is not None and self._lane_in is not None and self.lost is None:
            self._lane_out.release_sent()
            self._lane_in.take_freed()
            while self._announced:
                self._lane_in.expect(self._announced.popleft().metas)
        slots_in, slots_out = self._slots_in, self._slots_out
        if slots_in is None or slots_out is None or self.over:
            return
        slots_out.release_copied()
        try:
            self._exchange_slots(slots_in, slots_out)
        except InvalidFrame as error:
            self.lost = f"it sent something that is not a message: {error}"
            return
        numbers = slots_in.take_freed()
        if numbers:
            packed = struct.pack(f"<{len(numbers)}I", *numbers)
            self._send_header(RETURN_SLOTS, packed, number=len(numbers))

    def _exchange_slots(self, slots_in: SlotReceiver, slots_out: SlotSender) -> None:
        """Answer the peer's messages about slots."""
        while self._control:
            kind, number, text = self._control.popleft()
            if kind == REQUEST_SLOT:
                offer = slots_in.offer(number, text.decode())
                if offer is not None:
                    self._send_header(OFFER_SLOT, offer)
            elif kind == OFFER_SLOT:
                acceptance = slots_out.accept(text)
                if acceptance is not None:
                    self._send_header(ACCEPT_SLOT, acceptance[1], number=acceptance[0])
            elif kind == ACCEPT_SLOT:
                slots_in.accepted(number, text)
            else:
                slots_out.returned(struct.unpack(f"<{number}I", text))

    def take(self) -> list[Tensor]:
        """Return the oldest message that has arrived."""
        if not self.ready:
            if self.over:
                raise self.error()
            raise LookupError(f"no message from {self.name} has arrived (wait until `ready` is above 0)")
        message = self._inbox.popleft()
        self.took_frozen = message.frozen
        if self._slots_in is not None:
            self._num_filled -= 1
        self.process_control()  # the acceptance of a slot comes before the first message in it
        if message.slot >= 0:
            assert self._slots_in is not None
            return self._slots_in.tensors(message.slot, message.metas)
        if message.by_lane:
            assert self._lane_in is not None, "only one end of the link uses lanes"
            if self.lost is not None:
                raise self.error()  # the peer may never make its call of the broadcast
            try:
                return self._lane_in.tensors()
            except RuntimeError as error:
                raise PeerLost(f"{self.name} is lost in the middle of a message: {error}") from error
        if self.device.type == "cpu":
            return message.tensors
        # Without waiting: the allocator keeps pinned memory until its copies are done.
        return [tensor.to(self.device, non_blocking=True) for tensor in message.tensors]

    @property
    def ready(self) -> int:
        """Number of messages that have arrived and are not taken yet."""
        if self._slots_in is None:
            return len(self._inbox)
        while self._num_filled < len(self._inbox):
            slot = self._inbox[self._num_filled].slot
            if slot >= 0 and not self._slots_in.is_filled(slot):
                break
            self._num_filled += 1
        return self._num_filled

    @property
    def num_unfilled(self) -> int:
        """Number of announced messages whose slot is not filled yet. Poll it: filling wakes no thread."""
        if self._slots_in is None or not self._slots_in.shares_gpu:
            return 0
        return len(self._inbox) - self.ready

    def say_goodbye(self) -> None:
        if self._slots_out is not None:
            self._slots_out.close()
        if self._lane_out is not None and not self.over:
            self._lane_out.finish(LANE_SECONDS)
        if not self.over:
            self._send_header(BYE, b"")
