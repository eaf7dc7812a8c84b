"""Moves tensors between processes when their owners change: only those, each from one holder, with hashes.

1. every participant says what it holds and what it lacks
2. all compute the same senders: on the receiver's machine if possible, else those with the least to send
3. a sender describes all units of a receiver in one message, with hashes; then their tensors follow
4. what arrives with another hash is sent once more; if it is wrong again, all participants fail
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from varuna.errors import WorkerError, list_some
from varuna.execute.comm.collective import Collective
from varuna.execute.comm.frames import to_host
from varuna.execute.comm.values import PlainValue, decode, encode
from varuna.execute.update.initial_values import hash_tensor

CHUNK_BYTES = 64 << 20
"""Most bytes of one message."""
ATTEMPTS = 2


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
    hash: bytes


class UnitNote(msgspec.Struct):
    """One unit that follows."""

    name: str
    tree: PlainValue
    tensors: list[TensorNote]


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
    group: Collective, machine: str, holds: Mapping[str, int], lacks: Sequence[str], holdings: Holdings
) -> int:
    """Give and take what changes its owner; return the bytes that arrived here. All participants call it."""
    offers = group.gather(Offer(machine, dict(holds), list(lacks)), Offer)
    transfers = assign(offers)
    received = 0
    for attempt in range(ATTEMPTS):
        if not transfers:
            break
        num_bytes, damaged = _Transfer(group, holdings).run(transfers)
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

    def __init__(self, group: Collective, holdings: Holdings) -> None:
        self._group: Any = group.group  # a raw backend of gloo
        self._own = group.rank
        self._holdings = holdings
        self._works: list[tuple[Any, Tensor]] = []  # the tensor is read until the work is done

    def run(self, transfers: Transfers) -> tuple[int, list[tuple[int, int, str]]]:
        """Return the bytes that arrived, and what arrived damaged: (sender, receiver, name)."""
        for (sender, receiver), names in transfers.items():
            if sender == self._own:
                self._send(receiver, names)
        received, damaged = 0, []
        for sender, receiver in transfers:
            if receiver == self._own:
                num_bytes, bad = self._receive(sender)
                received += num_bytes
                damaged += [(sender, receiver, name) for name in bad]
        for work, _ in self._works:
            work.wait()
        return received, damaged

    def _send(self, receiver: int, names: Sequence[str]) -> None:
        notes, queue = [], list[Tensor]()
        for name in names:
            unit = self._holdings.give(name)
            tensors = []
            for key, tensor in unit.tensors.items():
                on_host = tensor.device.type == "cpu"
                plain = to_host(tensor.detach()).contiguous()
                kind = str(tensor.dtype).removeprefix("torch.")
                tensors.append(TensorNote(key, kind, list(tensor.shape), on_host, hash_tensor(plain)))
                queue.append(plain)
            notes.append(UnitNote(name, PlainValue(unit.tree), tensors))
        head = encode(notes)
        self._put(receiver, torch.tensor([len(head)]).view(torch.uint8))
        self._put(receiver, head)
        for plain in queue:
            self._put(receiver, _bytes_of(plain))

    def _put(self, receiver: int, data: Tensor) -> None:
        for chunk in _chunks(data):
            self._works.append((self._group.send([chunk], receiver, 0), chunk))

    def _receive(self, sender: int) -> tuple[int, list[str]]:
        """Return the bytes that arrived, and the names of damaged units; the others are taken."""
        (length,) = self._get(sender, torch.empty(8, dtype=torch.uint8)).view(torch.int64).tolist()
        head = self._get(sender, torch.empty(int(length), dtype=torch.uint8))
        notes: list[UnitNote] = decode(head, list[UnitNote], f"the description by participant {sender}")
        received, damaged = 0, []
        for note in notes:
            unit, whole = Unit(note.tree.value), True
            for one in note.tensors:
                memory = self._memory(note.name, one)
                self._get(sender, _bytes_of(memory))
                received += memory.nbytes
                whole &= hash_tensor(memory) == one.hash
                unit.tensors[one.key] = memory
            if whole:
                self._holdings.take(note.name, unit)
            else:
                damaged.append(note.name)
        return received, damaged

    def _memory(self, name: str, note: TensorNote) -> Tensor:
        found = self._holdings.memory(name, note.key)
        dtype = getattr(torch, note.dtype)
        fits = found is not None and found.device.type == "cpu" and found.is_contiguous()
        if found is not None and fits and (found.dtype, list(found.shape)) == (dtype, note.shape):
            return found.detach()
        return torch.empty(note.shape, dtype=dtype)

    def _get(self, sender: int, memory: Tensor) -> Tensor:
        for chunk in _chunks(memory):
            self._group.recv([chunk], sender, 0).wait()
        return memory


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _chunks(data: Tensor) -> Sequence[Tensor]:
    """Split bytes into messages. An empty tensor needs none."""
    return torch.split(data, CHUNK_BYTES) if data.numel() else ()
