"""Copies of a rank's state in host memory: its own, and that of another rank, received in the background.

    own state ──copy──► own snapshot ──socket, in a thread, with a hash──► snapshot on the holder

A rank that holds a snapshot of a lost rank can give its tensors in a handover (`handover.py`).
"""

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
import xxhash
from torch import Tensor

from varuna.execute.comm.frames import memory_of
from varuna.execute.comm.values import PlainValue, decode, encode
from varuna.execute.rebuild.handover import Unit

log = logging.getLogger("varuna")

CHUNK_BYTES = 4 << 20
"""Bytes that are hashed and sent at once."""
ALIGNMENT = 64
NICE = 10
"""Priority of the threads that send and receive: training goes first."""
_FRAME = struct.Struct("<qQQ")  # step, bytes of the head, bytes of the tensors
_HASH_BYTES = 16


class CopiedTensor(msgspec.Struct, frozen=True):
    """One tensor in the memory of a snapshot."""

    key: str
    dtype: str
    shape: list[int]
    place: int


class CopiedUnit(msgspec.Struct):
    """One unit in a snapshot."""

    name: str
    tree: PlainValue
    tensors: list[CopiedTensor]


@dataclass
class Snapshot:
    """The state of one rank before one step, in one piece of memory."""

    step: int
    head: Tensor  # encoded units
    memory: Tensor

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    def units(self) -> dict[str, Unit]:
        """Return the units by name. Their tensors are views of the snapshot's memory."""
        found = {}
        for one in decode(self.head, list[CopiedUnit], "the head of a snapshot"):
            tensors = {}
            for note in one.tensors:
                dtype = getattr(torch, note.dtype)
                empty = torch.empty(note.shape, dtype=dtype, device="meta")
                part = self.memory[note.place : note.place + empty.nbytes]
                tensors[note.key] = part.view(dtype).view(note.shape)
            found[one.name] = Unit(one.tree.value, tensors)
        return found


@torch.no_grad()
def take_snapshot(step: int, units: Mapping[str, Unit], memory: Tensor | None = None) -> Snapshot:
    """Copy units to host memory; to the given memory if it has the right size."""
    notes, copies, size = [], list[tuple[int, Tensor]](), 0
    for name, unit in units.items():
        tensors = []
        for key, tensor in unit.tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            tensors.append(CopiedTensor(key, dtype, list(tensor.shape), size))
            copies.append((size, tensor.detach()))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        notes.append(CopiedUnit(name, PlainValue(unit.tree), tensors))
    if memory is None or memory.nbytes != size:
        memory = torch.empty(size, dtype=torch.uint8)
    for place, tensor in copies:
        memory[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return Snapshot(step, encode(notes), memory)


def choose_holders(machines: Sequence[str]) -> list[int]:
    """Return the rank that holds the copy of each rank, on another machine if possible.

    `machines` of all ranks. Each rank holds the copy of one other rank.
    """
    order = sorted(range(len(machines)), key=lambda rank: (machines[rank], rank))
    most = max(machines.count(machine) for machine in machines)
    shift = most if most < len(machines) else 1
    holders = [0] * len(machines)
    for index, rank in enumerate(order):
        holders[rank] = order[(index + shift) % len(order)]
    return holders


class Mirror:
    """Sends snapshots of this rank to its holder, and receives those of the rank that it holds."""

    def __init__(self, holder: socket.socket, held: socket.socket) -> None:
        self._holder, self._held = holder, held  # the same socket if two ranks hold each other's copy
        for link in (holder, held):
            link.setblocking(True)
        self.arrived: Snapshot | None = None  # None after an exchange: its bytes were damaged on the way
        self.problem = ""  # why an exchange could not end; no other can follow
        self._thread_seconds: list[float] = []  # CPU time of each thread since the last `start`
        self._threads: list[threading.Thread] = []

    @property
    def thread_seconds(self) -> float:
        return sum(self._thread_seconds)

    @property
    def is_busy(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def start(
        self, own: Snapshot, memory: Tensor | None, *, on_arrival: Callable[[], None] = lambda: None
    ) -> None:
        """Exchange the next snapshots in the background; `memory` to receive into, if it fits.

        A thread calls `on_arrival` when the other rank's snapshot has arrived undamaged.
        """
        assert not self.is_busy, "the last exchange is not complete"
        self.arrived, self._thread_seconds = None, []
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="varuna-copies", daemon=True)
            for work in (lambda: self._send(own), lambda: self._receive(memory, on_arrival))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()

    def close(self) -> None:
        """End exchanges that are under way, and disconnect."""
        for link in (self._holder, self._held):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        self.wait()
        self._holder.close()
        self._held.close()

    def _run(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            work()
        except OSError as error:  # the other rank is gone, or this one leaves the generation
            self.problem = str(error) or type(error).__name__
        except Exception as error:
            log.exception("copies of the state can no longer be exchanged")
            self.problem = f"{type(error).__name__}: {error}"
        self._thread_seconds.append(time.thread_time())

    def _send(self, own: Snapshot) -> None:
        self._holder.sendall(_FRAME.pack(own.step, own.head.nbytes, own.memory.nbytes))
        digest = xxhash.xxh3_128()
        for part in (own.head, own.memory):
            view = memory_of(part) if part.numel() else memoryview(b"")
            for first in range(0, len(view), CHUNK_BYTES):
                chunk = view[first : first + CHUNK_BYTES]
                digest.update(chunk)
                self._holder.sendall(chunk)
        self._holder.sendall(digest.digest())

    def _receive(self, memory: Tensor | None, on_arrival: Callable[[], None]) -> None:
        frame = torch.empty(_FRAME.size, dtype=torch.uint8)
        self._fill(frame, xxhash.xxh3_128())
        step, head_bytes, memory_bytes = _FRAME.unpack(memory_of(frame))
        if memory is None or memory.nbytes != memory_bytes:
            memory = torch.empty(memory_bytes, dtype=torch.uint8)
        head = torch.empty(head_bytes, dtype=torch.uint8)
        digest = xxhash.xxh3_128()
        self._fill(head, digest)
        self._fill(memory, digest)
        sent = torch.empty(_HASH_BYTES, dtype=torch.uint8)
        self._fill(sent, xxhash.xxh3_128())
        if bytes(memory_of(sent)) == digest.digest():
            self.arrived = Snapshot(step, head, memory)
            on_arrival()

    def _fill(self, tensor: Tensor, digest: xxhash.xxh3_128) -> None:
        view = memory_of(tensor) if tensor.numel() else memoryview(b"")
        place = 0
        while place < len(view):
            count = self._held.recv_into(view[place : place + CHUNK_BYTES])
            if not count:
                raise ConnectionError("the other rank is gone")
            digest.update(view[place : place + count])
            place += count
