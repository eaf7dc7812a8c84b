"""A duplex connection to one neighbouring rank: lists of tensors, one FIFO each way.

Our own sockets rather than torch.distributed's point-to-point over gloo, because there
- a message costs about half a millisecond of CPU,
- an arrival cannot be seen without waiting for it (`is_completed()` is false until `wait()`),
- an operation that waits for a silent peer cannot be freed again,
- shapes must be known beforehand, and a wrong dtype is silently reinterpreted.

A frame says what it carries, so a mismatch is an error and never garbage:

    header      magic, kind, number of tensors, descriptor bytes, payload bytes, tag
    descriptor  for each tensor: dtype code, number of dimensions, sizes
    payload     the elements of each tensor, one after the other; none where they go another way

Tensors of a GPU go through pinned memory of the host, or, to another process of the same machine, into
a slot of its GPU's memory (`slots.py`), or over a lane of NCCL (`lanes.py`); the frame then says so. Words
about slots are frames too.

Bytes go from the sender's tensors into the kernel and from there into fresh tensors; only what
arrives together with a header (at most `SCRATCH_BYTES`) is copied once more.
"""

import ctypes
import functools
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from varuna.errors import PeerLost
from varuna.execute.comm.lanes import Inlet, Lane, Outlet, inlet_for
from varuna.execute.comm.slots import Borrower, Lender, device_uuid, message_bytes

SCRATCH_BYTES = 16 << 10
"""Read at one go where a header is expected: small messages cost a single system call."""
BULK_BYTES = 128 << 10
"""From this size on a message may not fit the kernel's buffers: the pump takes it in meanwhile."""
NAP_SECONDS = 50e-6
"""Between two reads of a big message: else reader and writer wake each other for every few pages."""
MAX_DESCRIPTOR_BYTES = 16 << 20
"""Some hundred thousand tensors in one message: what claims more is no message of ours."""
MAX_BUFFERS = 1000
"""Linux takes 1024 buffers in one sendmsg."""
LANE_SECONDS = 5.0
"""How long a link that ends waits for what is on its lane."""

Delay = Callable[[int], float]
"""For the index of an outgoing message, the seconds it is held back: makes links slow on purpose."""

HEADER = struct.Struct("<4sB3xIIQq")
MAGIC = b"VRN1"
DATA, BYE, ASK, LEND, THANKS, IN_SLOT, RETURN, BY_LANE = range(8)

# A dtype's code is its place here: new ones go to the end.
# fmt: off
DTYPE_NAMES = (
    "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int16", "int32", "int64",
    "complex64", "complex128", "complex32", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)
# fmt: on
DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, name) for code, name in enumerate(DTYPE_NAMES) if hasattr(torch, name)
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}

Shape = tuple[int, ...]


class TensorForm(NamedTuple):
    dtype: torch.dtype
    shape: Shape
    num_bytes: int


class BrokenFrame(Exception):
    """What arrived is not what a rank of this version sends."""


@functools.lru_cache(maxsize=1024)
def encode_forms(forms: tuple[tuple[torch.dtype, Shape], ...]) -> bytes:
    parts = []
    for dtype, shape in forms:
        if dtype not in DTYPE_CODES:
            names = ", ".join(DTYPE_NAMES)
            raise TypeError(f"a tensor of {dtype} cannot be sent to another stage (one of {names} can)")
        parts.append(struct.pack(f"<BB{len(shape)}q", DTYPE_CODES[dtype], len(shape), *shape))
    return b"".join(parts)


@functools.lru_cache(maxsize=1024)
def decode_forms(descriptor: bytes, num_tensors: int) -> tuple[TensorForm, ...]:
    forms, place = [], 0
    try:
        for _ in range(num_tensors):
            code, num_dims = struct.unpack_from("<BB", descriptor, place)
            shape = struct.unpack_from(f"<{num_dims}q", descriptor, place + 2)
            place += 2 + 8 * num_dims
            dtype = DTYPES[code]
            forms.append(TensorForm(dtype, shape, math.prod(shape) * dtype.itemsize))
    except (struct.error, KeyError) as error:
        raise BrokenFrame(f"the descriptor of {num_tensors} tensors does not parse: {error!r}") from None
    if place != len(descriptor) or any(size < 0 for form in forms for size in form.shape):
        raise BrokenFrame(f"the descriptor of {num_tensors} tensors has a wrong length or a negative size")
    return tuple(forms)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype; the caller keeps the tensor alive."""
    num_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")


def dense(tensor: Tensor) -> Tensor:
    """The same elements one after the other; the very same tensor where they lie so already."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent to another stage "
            "(make it dense before the cut)"
        )
    if tensor.is_conj() or tensor.is_neg():  # lazy views: their memory does not hold their values
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def to_wire(tensor: Tensor) -> Tensor:
    """A dense CPU tensor with the same elements.

    From a device through pinned memory, waiting for the copy (and so for the work that it follows).
    """
    if tensor.device.type == "cpu":
        return dense(tensor)
    tensor = dense(tensor.detach())
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


def from_wire(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device that computes. The allocator keeps pinned memory until its copies are done."""
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


class Outgoing(NamedTuple):
    buffers: list[memoryview]
    tensors: list[Tensor]  # kept alive until their memory has been read
    release_seconds: float  # on the monotonic clock; neither it nor what follows it is sent before


class Incoming(NamedTuple):
    tag: int
    tensors: list[Tensor]
    num_bytes: int
    slot: int = -1  # where it lies in one
    by_lane: bool = False
    forms: tuple[TensorForm, ...] = ()  # of what lies in a slot, or comes by lane


class Word(NamedTuple):
    """About slots: seen to by the thread that computes, for it is that one's device."""

    kind: int
    tag: int  # bytes that are asked for, the slot's number, or how many slots
    text: bytes


class Link:
    """One neighbour. `send` and `take` are for the thread that computes; `receive` and `flush` for any."""

    def __init__(
        self,
        link: socket.socket,
        peer: int,
        name: str,
        *,
        device: torch.device,
        delay: Delay | None,
        backlog: Callable[["Link"], None],
    ) -> None:
        self.socket = link
        self.peer = peer
        self.name = name
        self.device = device
        shares = device.type == "cuda" and link.family == socket.AF_UNIX
        self._lender = Lender(device) if shares else None
        self._borrower = Borrower(device) if shares else None
        self._words: deque[Word] = deque()
        self._outlet: Outlet | None = None
        self._inlet: Inlet | None = None
        self._by_lane: deque[Incoming] = deque()  # of which the word is there, and no more yet
        self.sent = self.sent_bytes = self.received = self.received_bytes = 0
        self.ended = False  # the peer said goodbye
        self.lost: str | None = None  # why the peer is gone without a word
        self.bulky = False
        self._delay = delay
        self._backlog = backlog
        self._inbox: deque[Incoming] = deque()
        self._ripe = 0  # of the inbox: how many of its first are there, where a device has to fill them
        self._outbox: deque[Outgoing] = deque()
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._start = self._stop = 0  # what of the scratch is not yet used
        self._frame: Incoming | None = None  # whose payload is on its way ...
        self._missing: list[memoryview] = []  # ... and where the rest of it goes

    # ------------------------------------------------------------ for the thread that computes

    def use_host(self) -> None:
        """From the first message on, whatever memory could be shared; both ends say so."""
        self._lender = self._borrower = None

    def use_lanes(self, out: Lane, back: Lane) -> None:
        """From the first message on; both ends say so."""
        self.use_host()
        self._outlet, self._inlet = Outlet(out), inlet_for(back, self.device)

    def send(self, tensors: Sequence[Tensor], *, tag: int = 0) -> None:
        """Hands over a message and returns; the tensors must not change until it has arrived."""
        if self.over:
            raise self.error()
        self.tidy()
        if self._outlet is not None and tensors:
            self._send_by_lane(self._outlet, tensors, tag)
            return
        if tensors and self._send_in_slot(tensors, tag):
            return
        ready = [to_wire(tensor) for tensor in tensors]
        descriptor = encode_forms(tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in ready]))
        payload = [memory_of(tensor) for tensor in ready if tensor.numel()]
        num_bytes = sum(map(len, payload))
        header = HEADER.pack(MAGIC, DATA, len(ready), len(descriptor), num_bytes, tag)
        self._put(Outgoing([memoryview(header + descriptor), *payload], ready, self._count(num_bytes)))

    def _send_by_lane(self, outlet: Outlet, tensors: Sequence[Tensor], tag: int) -> None:
        ready = [dense(tensor.detach()) for tensor in tensors]
        descriptor = encode_forms(tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in ready]))
        header = HEADER.pack(MAGIC, BY_LANE, len(ready), len(descriptor), 0, tag)
        num_bytes = sum(tensor.nbytes for tensor in ready)
        self._put(Outgoing([memoryview(header + descriptor)], [], self._count(num_bytes)))
        outlet.put(ready)

    def _send_in_slot(self, tensors: Sequence[Tensor], tag: int) -> bool:
        """Whether a slot was there; else one is asked for, for the next time."""
        borrower = self._borrower
        if borrower is None or borrower.refused or any(tensor.device != self.device for tensor in tensors):
            return False
        sizes = [tensor.nbytes for tensor in tensors]
        if not sum(sizes):
            return False
        slot = borrower.put(tensors)
        if slot is None:
            self._say(ASK, message_bytes(sizes), device_uuid(self.device).encode())
            return False
        forms = encode_forms(tuple([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]))
        descriptor = struct.pack("<I", slot) + forms
        header = HEADER.pack(MAGIC, IN_SLOT, len(tensors), len(descriptor), 0, tag)
        self._put(Outgoing([memoryview(header + descriptor)], [], self._count(sum(sizes))))
        return True

    def _count(self, num_bytes: int) -> float:
        """One more message; when it may leave."""
        release = 0.0 if self._delay is None else time.monotonic() + self._delay(self.sent)
        self.sent += 1
        self.sent_bytes += num_bytes
        return release

    def _say(self, kind: int, tag: int, text: bytes = b"") -> None:
        header = HEADER.pack(MAGIC, kind, 0, len(text), 0, tag)
        self._put(Outgoing([memoryview(header + text)], [], 0.0))

    def tidy(self) -> None:
        """Sees to the words about slots and lanes, and gives back memory that is free."""
        if self._outlet is not None and self._inlet is not None and self.lost is None:
            self._outlet.let_go()
            self._inlet.take_back()
            while self._by_lane:
                self._inlet.expect(self._by_lane.popleft().forms)
        lender, borrower = self._lender, self._borrower
        if lender is None or borrower is None or self.over:
            return
        borrower.let_go()
        while self._words:
            kind, tag, text = self._words.popleft()
            if kind == ASK:
                loan = lender.lend(tag, text.decode())
                if loan is not None:
                    self._say(LEND, 0, loan)
            elif kind == LEND:
                thanks = borrower.accept(text)
                if thanks is not None:
                    self._say(THANKS, *thanks)
            elif kind == THANKS:
                lender.thanked(tag, text)
            else:
                borrower.returned(struct.unpack(f"<{tag}I", text))
        numbers = lender.take_back()
        if numbers:
            self._say(RETURN, len(numbers), struct.pack(f"<{len(numbers)}I", *numbers))

    @property
    def way(self) -> str:
        """How tensors reach the peer, in words."""
        if self._outlet is not None:
            return self._outlet.lane.name
        if self._borrower is not None and self._borrower.borrowed:
            return "shared device memory (CUDA IPC)"
        over = "a Unix socket" if self.socket.family == socket.AF_UNIX else "TCP"
        return f"pinned host memory over {over}" if self.device.type == "cuda" else over

    def take(self, *, tag: int = 0) -> list[Tensor]:
        """The oldest message that has arrived and was not taken yet."""
        if not self.ready:
            if self.over:
                raise self.error()
            raise LookupError(f"no message of {self.name} has arrived (wait until `ready` is above 0)")
        message = self._inbox.popleft()
        if self._lender is not None:
            self._ripe -= 1
        if message.tag != tag:
            raise RuntimeError(
                f"expected message {tag} of {self.name}, found message {message.tag} "
                "(both ranks must run the same plan and schedule)"
            )
        self.tidy()  # the thanks for a slot come before what is put into it
        if message.slot >= 0:
            assert self._lender is not None
            return self._lender.tensors(message.slot, message.forms)
        if message.by_lane:
            assert self._inlet is not None, "one end has lanes, the other has none"
            if self.lost is not None:
                raise self.error()  # its half of the broadcast may never come
            try:
                return self._inlet.tensors()
            except RuntimeError as error:
                raise PeerLost(f"{self.name} is lost in the middle of a message: {error}") from error
        return [from_wire(tensor, self.device) for tensor in message.tensors]

    @property
    def ready(self) -> int:
        """How many messages have arrived and wait to be taken."""
        if self._lender is None:
            return len(self._inbox)
        while self._ripe < len(self._inbox):
            slot = self._inbox[self._ripe].slot
            if slot >= 0 and not self._lender.is_there(slot):
                break
            self._ripe += 1
        return self._ripe

    @property
    def unripe(self) -> int:
        """How many messages are known of that a device has still to fill, and no bell will ring for them."""
        if self._lender is None or not self._lender.takes_turns:
            return 0
        return len(self._inbox) - self.ready

    @property
    def over(self) -> bool:
        return self.ended or self.lost is not None

    @property
    def unsent(self) -> bool:
        return bool(self._outbox)

    @property
    def due_seconds(self) -> float:
        """When, on the monotonic clock, the oldest unsent message may go out."""
        try:
            return self._outbox[0].release_seconds
        except IndexError:
            return math.inf

    def error(self) -> PeerLost:
        """Why nothing more can be sent or will arrive."""
        if self.lost is None:
            return PeerLost(
                f"{self.name} has ended, though more was expected of it (look for its own error; where it "
                "has none, its script made fewer calls: all ranks make the same steps and evaluations)"
            )
        return PeerLost(f"{self.name} is lost: {self.lost} (was it killed, or its machine?)")

    def say_goodbye(self) -> None:
        if self._borrower is not None:
            self._borrower.close()
        if self._outlet is not None and not self.over:
            self._outlet.finish(LANE_SECONDS)
        if not self.over:
            header = HEADER.pack(MAGIC, BYE, 0, 0, 0, self.sent)
            self._put(Outgoing([memoryview(header)], [], 0.0))

    def _put(self, message: Outgoing) -> None:
        self._outbox.append(message)
        self.flush()
        if self._outbox:
            self._backlog(self)

    # ------------------------------------------------------------ for whoever moves the bytes

    def flush(self) -> None:
        """Sends what is due and fits the kernel's buffers. Where another thread is at it, leaves it to it.

        The caller looks at `unsent` afterwards: what is left there needs another call.
        """
        while self._outbox and self._writing.acquire(blocking=False):
            try:
                if not self._send_some():
                    return
            finally:
                self._writing.release()

    def _send_some(self) -> bool:
        """Whether all that was due has been sent."""
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
                # What the peer sent before it went, a goodbye perhaps, may still lie in our kernel:
                # the reading side finds out how it went; here the unsendable is dropped.
                self._outbox.clear()
                return True
            _drop_front(buffers, count)
            if not buffers:
                self._outbox.popleft()
        return True

    def receive(self) -> None:
        """Takes in all that lies in the kernel."""
        with self._reading:
            try:
                while not self.over and self._receive_some():
                    pass
            except BlockingIOError:
                pass
            except BrokenFrame as error:
                self._lose(f"it sent something that is no message: {error}")
            except OSError as error:
                self._lose(error.strerror or str(error))

    def _receive_some(self) -> bool:
        """Reads once; whether there may be more."""
        if self._missing:
            count = self.socket.recvmsg_into(self._missing[:MAX_BUFFERS])[0]
            if not count:
                self._lose("its connection closed in the middle of a message")
                return False
            _drop_front(self._missing, count)
            if not self._missing:
                self._deliver()
            elif count < BULK_BYTES <= sum(map(len, self._missing)):
                time.sleep(NAP_SECONDS)
            return True
        room = len(self._scratch) - self._stop
        count = self.socket.recv_into(self._scratch[self._stop :])
        if not count:
            self._lose("its connection closed without a goodbye")
            return False
        self._stop += count
        while self._next_frame():
            pass
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start:  # the front of a header: make room for the rest
            rest = bytes(self._scratch[self._start : self._stop])
            self._scratch[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        return count == room or bool(self._missing)

    def _next_frame(self) -> bool:
        """Reads one frame out of the scratch; False where nothing complete enough is left there."""
        at_hand = self._stop - self._start
        if self.ended or at_hand < HEADER.size:
            return False
        magic, kind, num_tensors, num_described, num_bytes, tag = HEADER.unpack_from(
            self._scratch, self._start
        )
        if magic != MAGIC or kind > BY_LANE:
            raise BrokenFrame(f"expected a frame of this version ({MAGIC!r}), found {magic!r}")
        if num_described > MAX_DESCRIPTOR_BYTES:
            raise BrokenFrame(f"a descriptor of {num_described} bytes, above {MAX_DESCRIPTOR_BYTES}")
        if at_hand < HEADER.size + num_described:
            if HEADER.size + num_described > len(self._scratch):
                self._grow_scratch(HEADER.size + num_described)
            return False
        self._start += HEADER.size
        descriptor = bytes(self._scratch[self._start : self._start + num_described])
        self._start += num_described
        if kind == BYE:
            self.ended = True
            return False
        if kind not in (DATA, IN_SLOT, BY_LANE):
            self._words.append(Word(kind, tag, descriptor))
            return True
        if kind == IN_SLOT:
            (slot,) = struct.unpack_from("<I", descriptor)
            in_slot = decode_forms(descriptor[4:], num_tensors)
            self._frame = Incoming(tag, [], sum(form.num_bytes for form in in_slot), slot, forms=in_slot)
            self._deliver()
            return True
        forms = decode_forms(descriptor, num_tensors)
        if kind == BY_LANE:
            total = sum(form.num_bytes for form in forms)
            self._frame = Incoming(tag, [], total, by_lane=True, forms=forms)
            self._by_lane.append(self._frame)
            self._deliver()
            return True
        if sum(form.num_bytes for form in forms) != num_bytes:
            raise BrokenFrame(f"its tensors make other than the {num_bytes} bytes announced")
        pinned = self.device.type == "cuda"
        tensors = [torch.empty(form.shape, dtype=form.dtype, pin_memory=pinned) for form in forms]
        self._frame = Incoming(tag, tensors, num_bytes)
        self._missing = [memory_of(tensor) for tensor in tensors if tensor.numel()]
        self.bulky = self.bulky or num_bytes >= BULK_BYTES
        while self._missing and self._start < self._stop:
            target = self._missing[0]
            count = min(len(target), self._stop - self._start)
            target[:count] = self._scratch[self._start : self._start + count]
            self._start += count
            _drop_front(self._missing, count)
        if self._missing:
            return False
        self._deliver()
        return True

    def _grow_scratch(self, num_bytes: int) -> None:
        grown = memoryview(bytearray(num_bytes))
        grown[: self._stop] = self._scratch[: self._stop]
        self._scratch = grown

    def _deliver(self) -> None:
        assert self._frame is not None
        self._inbox.append(self._frame)
        self.received_bytes += self._frame.num_bytes
        self.received += 1
        self._frame = None

    def _lose(self, reason: str) -> None:
        self.lost = reason  # what is unsent is dropped by whoever sends: the outbox is theirs alone


def _drop_front(buffers: list[memoryview], count: int) -> None:
    """Cuts `count` bytes off the front of the buffers."""
    whole = 0
    for buffer in buffers:
        if count < len(buffer):
            break
        count -= len(buffer)
        whole += 1
    del buffers[:whole]
    if count:
        buffers[0] = buffers[0][count:]
