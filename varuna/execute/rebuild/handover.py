"""Moves tensors between processes when their owners change: only those, each from one holder, with hashes.

1. every participant says what it holds and what it lacks
2. all compute the same senders: on the receiver's machine if possible, else those with the least to send
3. a sender describes all units of a receiver in one message; then their tensors follow, and their hashes
   at the end: both sides hash one tensor while others are on their way
4. what arrives with another hash is sent once more; if it is wrong again, all participants fail

The description has a hash, too. If it is wrong, the receiver does not know what follows, so it fails at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from varuna.errors import WorkerError, list_some
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.frames import to_host
from varuna.execute.comm.groups import waiting_in_gloo
from varuna.execute.comm.values import PlainValue, decode, encode
from varuna.execute.update.initial_values import hash_tensor

CHUNK_BYTES = 64 << 20
"""Most bytes of one message."""
ATTEMPTS = 2
HASH_BYTES = 16
LENGTH_BYTES = 8
EMPTY = torch.empty(0, dtype=torch.uint8)


@dataclass
class Unit:
    """Everything that belongs to one name: plain values, and tensors by key."""

    tree: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Holdings(Protocol):
    """The state of one participant."""

    def give(self, name: str) -> Unit: ...
    def memory(self, name: str, key: str) -> Tensor | None: ...  # to receive into; None: new memory
    def take(self, name: str, unit: Unit) -> None: ...


class Offer(msgspec.Struct, frozen=True):
    """The names that a participant holds and lacks."""

    machine: str
    holds: dict[str, int]  # name: bytes
    lacks: list[str]


class TensorNote(msgspec.Struct, frozen=True):
    """One tensor that follows."""

    key: str
    dtype: str
    shape: list[int]
    on_host: bool


class UnitNote(msgspec.Struct):
    """One unit that follows."""

    name: str
    tree: PlainValue
    tensors: list[TensorNote]


class Arrival(NamedTuple):
    """One unit on its way here."""

    note: UnitNote
    memory: dict[str, Tensor]
    works: dict[str, list[Any]]


Transfers = dict[tuple[int, int], list[str]]
"""Names by (sender, receiver)."""


def assign(offers: Sequence[Offer]) -> Transfers:
    """Choose a holder for everything that participants lack. All participants compute the same."""
    holders: dict[str, list[int]] = {}
    for index, offer in enumerate(offers):
        for name in offer.holds:
            holders.setdefault(name, []).append(index)
    load = [0] * len(offers)
    transfers: Transfers = {}
    for receiver, offer in enumerate(offers):
        for name in offer.lacks:
            if name not in holders:
                raise WorkerError(
                    f"no worker that is left holds {name!r} (the job must restart from its store)"
                )
            own = offer.machine
            sender = min(holders[name], key=lambda one: (offers[one].machine != own, load[one], one))
            load[sender] += offers[sender].holds[name]
            transfers.setdefault((sender, receiver), []).append(name)
    return transfers


@torch.no_grad()
def hand_over(
    group: Collective,
    machine: str,
    holds: Mapping[str, int],
    lacks: Sequence[str],
    holdings: Holdings,
    *,
    note_progress: Callable[[], None] = lambda: None,
) -> int:
    """Give and take what changes its owner; return the bytes that arrived here. All participants call it.

    `note_progress` is called whenever some of the bytes have moved.
    """
    offers = group.gather(Offer(machine, dict(holds), list(lacks)), Offer)
    transfers = assign(offers)
    received = 0
    for attempt in range(ATTEMPTS):
        if not transfers:
            break
        num_bytes, damaged = _Transfer(group, holdings, note_progress).run(transfers)
        received += num_bytes
        everyone = group.gather(damaged, list[tuple[int, int, str]])
        transfers = {}
        for sender, receiver, name in (one for found in everyone for one in found):
            transfers.setdefault((sender, receiver), []).append(name)
        if transfers and attempt == ATTEMPTS - 1:
            names = sorted({name for found in transfers.values() for name in found})
            raise WorkerError(
                f"{list_some(names)} arrived {ATTEMPTS} times with other bytes than were sent (check the "
                "memory and the network of the machines)"
            )
    return received


class _Transfer:
    """One round of sending and receiving."""

    def __init__(self, group: Collective, holdings: Holdings, note_progress: Callable[[], None]) -> None:
        self._group: Any = group.group  # a raw backend of gloo
        self._own = group.rank
        self._holdings = holdings
        self._note_progress = note_progress
        self._works: list[tuple[Any, Tensor]] = []  # the tensor is read until the work is done
        self._given: dict[str, tuple[Unit, dict[str, Tensor]]] = {}  # with its tensors on the host
        self._hashes: dict[int, bytes] = {}  # of these tensors, by identity

    def run(self, transfers: Transfers) -> tuple[int, list[tuple[int, int, str]]]:
        """Return the bytes that arrived, and what arrived damaged: (sender, receiver, name)."""
        queues = {
            receiver: self._send(receiver, names)
            for (sender, receiver), names in transfers.items()
            if sender == self._own
        }
        expected = [(sender, self._expect(sender)) for sender, receiver in transfers if receiver == self._own]
        for receiver, queue in queues.items():  # while the tensors are on their way
            for plain in queue:
                if id(plain) not in self._hashes:
                    self._hashes[id(plain)] = hash_tensor(plain)
            tail = b"".join(self._hashes[id(plain)] for plain in queue)
            self._put(receiver, torch.frombuffer(bytearray(tail), dtype=torch.uint8) if tail else EMPTY)
        received, damaged = 0, []
        for sender, arrivals in expected:
            num_bytes, bad = self._receive(sender, arrivals)
            received += num_bytes
            damaged += [(sender, self._own, name) for name in bad]
        for work, _ in self._works:
            self._wait_for(work)
        return received, damaged

    def _send(self, receiver: int, names: Sequence[str]) -> list[Tensor]:
        """Start to send units; return their tensors, whose hashes must follow."""
        notes, queue = [], list[Tensor]()
        for name in names:
            if name not in self._given:
                unit = self._holdings.give(name)
                plain = {key: to_host(tensor.detach()).contiguous() for key, tensor in unit.tensors.items()}
                self._given[name] = unit, plain
            unit, plain = self._given[name]
            tensors = []
            for key, tensor in unit.tensors.items():
                kind = str(tensor.dtype).removeprefix("torch.")
                tensors.append(TensorNote(key, kind, list(tensor.shape), tensor.device.type == "cpu"))
                queue.append(plain[key])
            notes.append(UnitNote(name, PlainValue(unit.tree), tensors))
        head = encode(notes)
        length, digest = len(head).to_bytes(LENGTH_BYTES, "little"), hash_tensor(head)
        self._put(receiver, torch.frombuffer(bytearray(length + digest), dtype=torch.uint8))
        self._put(receiver, head)
        for one in queue:
            self._put(receiver, _bytes_of(one))
        return queue

    def _put(self, receiver: int, data: Tensor) -> None:
        for chunk in _chunks(data):
            self._works.append((self._group.send([chunk], receiver, 0), chunk))

    def _expect(self, sender: int) -> list[Arrival]:
        """Receive the description of units, and start to receive their tensors."""
        start = torch.empty(LENGTH_BYTES + HASH_BYTES, dtype=torch.uint8)
        self._arrive(self._start(sender, start), start)
        announced = start.numpy().tobytes()
        head = torch.empty(int.from_bytes(announced[:LENGTH_BYTES], "little"), dtype=torch.uint8)
        self._arrive(self._start(sender, head), head)
        if hash_tensor(head) != announced[LENGTH_BYTES:]:
            raise WorkerError(
                f"the description of what participant {sender} sends arrived with other bytes than were sent "
                "(the job restarts from its store; check the memory and the network of the machines)"
            )
        notes: list[UnitNote] = decode(head, list[UnitNote], f"the description by participant {sender}")
        arrivals = []
        for note in notes:
            memory = {one.key: self._memory(note.name, one) for one in note.tensors}
            works = {key: self._start(sender, _bytes_of(tensor)) for key, tensor in memory.items()}
            arrivals.append(Arrival(note, memory, works))
        return arrivals

    def _receive(self, sender: int, arrivals: Sequence[Arrival]) -> tuple[int, list[str]]:
        """Return the bytes that arrived, and the names of damaged units; the others are taken."""
        found: list[bytes] = []
        for one in arrivals:
            for key, tensor in one.memory.items():
                self._arrive(one.works[key], _bytes_of(tensor))
                found.append(hash_tensor(tensor))
        sent = torch.empty(sum(map(len, found)), dtype=torch.uint8)
        self._arrive(self._start(sender, sent), sent)
        hashes, place, received, damaged = sent.numpy().tobytes(), 0, 0, []
        for one in arrivals:
            own = b"".join(found[place : place + len(one.memory)])
            first, place = place, place + len(one.memory)
            received += sum(tensor.nbytes for tensor in one.memory.values())
            if own == hashes[first * HASH_BYTES : place * HASH_BYTES]:
                self._holdings.take(one.note.name, Unit(one.note.tree.value, one.memory))
            else:
                damaged.append(one.note.name)
        return received, damaged

    def _memory(self, name: str, note: TensorNote) -> Tensor:
        found = self._holdings.memory(name, note.key)
        dtype = getattr(torch, note.dtype)
        fits = found is not None and found.device.type == "cpu" and found.is_contiguous()
        if found is not None and fits and (found.dtype, list(found.shape)) == (dtype, note.shape):
            return found.detach()
        return torch.empty(note.shape, dtype=dtype)

    def _start(self, sender: int, memory: Tensor) -> list[Any]:
        return [self._group.recv([chunk], sender, 0) for chunk in _chunks(memory)]

    def _arrive(self, works: Sequence[Any], memory: Tensor) -> None:
        """Wait until these bytes have arrived in `memory`."""
        for work in works:
            self._wait_for(work)

    def _wait_for(self, work: Any) -> None:
        with waiting_in_gloo():
            work.wait()
        self._note_progress()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _chunks(data: Tensor) -> Sequence[Tensor]:
    """Split bytes into messages. An empty tensor needs none."""
    return torch.split(data, CHUNK_BYTES) if data.numel() else ()
