"""A socket that sends and receives frames without blocking.

Bytes go from the sender's tensors into the kernel and from there into new tensors. Only bytes that arrive
together with a header (at most `SCRATCH_BYTES`) are copied once more.
"""

import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from varuna.errors import PeerLost
from varuna.execute.comm.frames import (
    BY_LANE,
    BYE,
    DATA,
    FROZEN,
    HEADER,
    IN_SLOT,
    MAGIC,
    MAX_DESCRIPTOR_BYTES,
    ControlFrame,
    IncomingFrame,
    InvalidFrame,
    OutgoingFrame,
    drop_front,
    memory_of,
    parse_descriptor,
)

SCRATCH_BYTES = 16 << 10
"""Read size where a header is expected, so that a small message needs one system call."""
BULK_BYTES = 128 << 10
"""A message of this size may not fit the kernel's buffers: the pump reads it in the background."""
BULK_PAUSE_SECONDS = 50e-6
"""Pause between two reads of a large message; else reader and writer wake each other for every few pages."""
MAX_BUFFERS = 1000
"""Linux accepts 1024 buffers in one sendmsg."""


def describe_end(name: str) -> str:
    """Return the error of a rank that needs another one, which has ended."""
    return (
        f"{name} has ended, although this rank expects more from it (look for its own error; if it has none, "
        "its script made fewer calls: all ranks must make the same steps and evaluations)"
    )


class FrameSocket:
    """Frames to and from one peer. `receive` and `flush` may be called by any thread."""

    def __init__(
        self,
        link: socket.socket,
        peer: int,
        name: str,
        *,
        device: torch.device,
        on_backlog: Callable[[Any], None],
    ) -> None:
        self.socket = link
        self.peer = peer
        self.name = name
        self.device = device
        self.received = 0
        self.ended = False  # the peer said goodbye
        self.lost: str | None = None  # why the peer is gone without a goodbye
        self.bulky = False  # has carried a large message
        self._on_backlog = on_backlog  # called with this object if a frame could not be sent at once
        self._inbox: deque[IncomingFrame] = deque()
        self._control: deque[ControlFrame] = deque()
        self._announced: deque[IncomingFrame] = deque()  # tensors that come by lane and are not received yet
        self._outbox: deque[OutgoingFrame] = deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._stop = 0  # unused range of the scratch
        self._partial: IncomingFrame | None = None  # frame whose payload is incomplete
        self._missing: list[memoryview] = []  # where the rest of that payload goes

    @property
    def over(self) -> bool:
        """True if nothing more will arrive, because the peer has ended or is lost."""
        return self.ended or self.lost is not None

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def due_seconds(self) -> float:
        """Time, on the monotonic clock, at which the oldest unsent frame may be sent."""
        try:
            return self._outbox[0].release_seconds
        except IndexError:
            return math.inf

    def error(self) -> PeerLost:
        """Return the reason why nothing more can be sent or received."""
        if self.lost is None:
            return PeerLost(describe_end(self.name))
        return PeerLost(f"{self.name} is lost: {self.lost} (was its process or machine killed?)")

    def flush(self) -> None:
        """Send what is due and fits the kernel's buffers, unless another thread does; then check `unsent`."""
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                if not self._send_some():
                    return
            finally:
                self._writing.release()

    def receive(self) -> None:
        """Read everything that has arrived."""
        with self._reading:
            try:
                while not self.over and self._receive_some():
                    pass
            except BlockingIOError:
                pass
            except InvalidFrame as error:
                self.lost = f"it sent something that is not a message: {error}"
            except OSError as error:
                self.lost = error.strerror or str(error)

    def _enqueue(self, frame: OutgoingFrame) -> None:
        self._outbox.append(frame)
        self.flush()
        if self._outbox:
            self._on_backlog(self)

    def _send_some(self) -> bool:
        """Return True if everything that was due has been sent."""
        while self._outbox:
            if self.lost is not None:
                self._outbox.clear()
                return True
            buffers, _, release = self._outbox[0]
            if release and release > time.monotonic():
                return False
            try:
                count = self.socket.sendmsg(buffers[:MAX_BUFFERS])
            except BlockingIOError:
                return False
            except OSError:
                # The peer's last frames, perhaps a goodbye, may still be in our kernel: the reader finds
                # out how the peer ended. Drop what can no longer be sent.
                self._outbox.clear()
                return True
            drop_front(buffers, count)
            if not buffers:
                self._outbox.popleft()
        return True

    def _receive_some(self) -> bool:
        """Read once. Return True if there may be more."""
        if self._missing:
            count = self.socket.recvmsg_into(self._missing[:MAX_BUFFERS])[0]
            if not count:
                self.lost = "its connection closed in the middle of a message"
                return False
            drop_front(self._missing, count)
            if not self._missing:
                assert self._partial is not None
                self._deliver(self._partial)
            elif count < BULK_BYTES <= sum(map(len, self._missing)):
                time.sleep(BULK_PAUSE_SECONDS)
            return True
        space = len(self._scratch) - self._stop
        count = self.socket.recv_into(self._scratch[self._stop :])
        if not count:
            self.lost = "its connection closed without a goodbye"
            return False
        self._stop += count
        while self._parse_frame():
            pass
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start:  # an incomplete header: move it to the front
            rest = bytes(self._scratch[self._start : self._stop])
            self._scratch[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        return count == space or bool(self._missing)

    def _parse_frame(self) -> bool:
        """Parse one frame from the scratch. Return False if there is no complete header left."""
        available = self._stop - self._start
        if self.ended or available < HEADER.size:
            return False
        magic, kind, num_tensors, num_described, num_bytes, number = HEADER.unpack_from(
            self._scratch, self._start
        )
        if magic != MAGIC or kind > BY_LANE:
            raise InvalidFrame(f"expected a frame of this version ({MAGIC!r}), found {magic!r}")
        if num_described > MAX_DESCRIPTOR_BYTES:
            raise InvalidFrame(f"a descriptor of {num_described} bytes, above {MAX_DESCRIPTOR_BYTES}")
        if available < HEADER.size + num_described:
            if HEADER.size + num_described > len(self._scratch):
                grown = memoryview(bytearray(HEADER.size + num_described))
                grown[: self._stop] = self._scratch[: self._stop]
                self._scratch = grown
            return False
        self._start += HEADER.size
        descriptor = bytes(self._scratch[self._start : self._start + num_described])
        self._start += num_described
        if kind == DATA:
            return self._begin_payload(num_tensors, descriptor, num_bytes, frozen=number == FROZEN)
        if kind == BYE:
            self.ended = True
            return False
        if kind == IN_SLOT:
            (slot,) = struct.unpack_from("<I", descriptor)
            metas = parse_descriptor(descriptor[4:], num_tensors)
            self._deliver(IncomingFrame([], slot, metas=metas, frozen=number == FROZEN))
        elif kind == BY_LANE:
            metas = parse_descriptor(descriptor, num_tensors)
            frame = IncomingFrame([], by_lane=True, metas=metas, frozen=number == FROZEN)
            self._announced.append(frame)
            self._deliver(frame)
        else:
            self._control.append(ControlFrame(kind, number, descriptor))
        return True

    def _begin_payload(self, num_tensors: int, descriptor: bytes, num_bytes: int, *, frozen: bool) -> bool:
        """Allocate the tensors of a frame and copy what is in the scratch. Return True if it is complete."""
        metas = parse_descriptor(descriptor, num_tensors)
        if sum(meta.num_bytes for meta in metas) != num_bytes:
            raise InvalidFrame(f"the tensors do not have the {num_bytes} bytes of the header")
        pinned = self.device.type == "cuda"
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, pin_memory=pinned) for meta in metas]
        frame = IncomingFrame(tensors, frozen=frozen)
        self._missing = [memory_of(tensor) for tensor in tensors if tensor.numel()]
        self.bulky = self.bulky or num_bytes >= BULK_BYTES
        while self._missing and self._start < self._stop:
            target = self._missing[0]
            count = min(len(target), self._stop - self._start)
            target[:count] = self._scratch[self._start : self._start + count]
            self._start += count
            drop_front(self._missing, count)
        if self._missing:
            self._partial = frame
            return False
        self._deliver(frame)
        return True

    def _deliver(self, frame: IncomingFrame) -> None:
        self._inbox.append(frame)
        self.received += 1
        self._partial = None
