"""A GPU simulated with threads, to test memory that two processes share.

It guarantees what CUDA guarantees and no more: work on a stream runs later, in order; an event is done when
its stream reaches it; a wait blocks a stream until the event's last record is done; other processes see
events and memory. Everything takes a random time.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import queue
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from varuna.execute.comm import link, slots
from varuna.execute.comm.network import connect

CPU = torch.device("cpu")
USUAL_SECONDS, LONG_SECONDS = 5e-5, 2e-2
"""Maximum duration of usual work, and duration of some long computations."""


class Stream:
    def __init__(self, seed: int, *, long: float = 0.0) -> None:
        self._long = long  # the share of its work that takes long
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        self._random = random.Random(seed)
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def query(self) -> bool:
        return self._work.unfinished_tasks == 0

    def synchronize(self) -> None:
        self._work.join()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            is_long = self._random.random() < self._long
            time.sleep(LONG_SECONDS if is_long else self._random.uniform(0, USUAL_SECONDS))
            work()
            del work
            self._work.task_done()


class Event:
    """The number of records and the last one that its stream has reached, in a file that both map."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("r+b") as file:
            self._numbers = mmap.mmap(file.fileno(), 16)

    def record(self, stream: Stream) -> None:
        number = self.recorded + 1
        self._write(0, number)
        stream.put(functools.partial(self._write, 8, number))

    def wait(self, stream: Stream) -> None:
        number = self.recorded

        def hold_up() -> None:
            while self._done < number:
                time.sleep(1e-5)

        stream.put(hold_up)

    def query(self) -> bool:
        return self._done >= self.recorded

    def ipc_handle(self) -> bytes:
        return str(self._path).encode()

    @property
    def recorded(self) -> int:
        return int(struct.unpack_from("<q", self._numbers, 0)[0])

    @property
    def _done(self) -> int:
        return int(struct.unpack_from("<q", self._numbers, 8)[0])

    def _write(self, place: int, number: int) -> None:
        struct.pack_into("<q", self._numbers, place, number)


class Card:
    """The part of `torch.cuda` that slots use."""

    def __init__(self, home: Path, seed: int) -> None:
        self.home = home
        self.computing = self._current = Stream(seed, long=0.05)
        self._seed = seed
        self._num_files = 0
        self.Event = functools.partial(_new_event, self)
        self.Event.from_ipc_handle = lambda _, handle: Event(Path(handle.decode()))  # type: ignore[attr-defined]

    def Stream(self, _: torch.device) -> Stream:
        return Stream(self._seed + 1)

    def current_stream(self, _: torch.device) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def device(self, _: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def new_file(self, num_bytes: int) -> Path:
        self._num_files += 1
        path = self.home / f"{os.getpid()}-{self._num_files}"
        path.write_bytes(bytes(num_bytes))
        return path

    def handle(self, slot: slots.OwnSlot) -> slots.SlotHandle:
        path = self.new_file(slot.memory.nbytes)
        slot.memory = map_file(None, str(path).encode(), slot.memory.nbytes)
        memory = slots.SharedStorage(str(path).encode(), slot.memory.nbytes, 0, b"counter", 0, b"event", True)
        return slots.SlotHandle(slot.number, slot.memory.nbytes, "0", memory, slot.emptied.ipc_handle())

    def view(self, real: Callable[..., Tensor], slot: slots.RemoteSlot, place: int, like: Tensor) -> Any:
        return Target(self, real(slot, place, like))


class Target:
    """Target of a copy that runs later."""

    def __init__(self, card: Card, tensor: Tensor) -> None:
        self._card, self._tensor = card, tensor

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert non_blocking and source.is_contiguous()
        # By their addresses: whoever owns the memory has to keep it until then.
        addresses = self._tensor.data_ptr(), source.data_ptr()
        self._card.current_stream(CPU).put(functools.partial(ctypes.memmove, *addresses, source.nbytes))


class SharedSlotMemory(slots.SlotMemory):
    def __init__(self, slot: slots.OwnSlot, num_bytes: int, returned: Any) -> None:
        super().__init__(slot, num_bytes, returned)
        self.__array_interface__ = {**self.__cuda_array_interface__, "version": 3}


def _new_event(card: Card, interprocess: bool = False) -> Event:
    return Event(card.new_file(16))


def map_file(_: object, path: bytes, num_bytes: int, *_rest: object) -> Tensor:
    return torch.from_file(path.decode(), shared=True, size=num_bytes, dtype=torch.uint8)


@contextlib.contextmanager
def installed(card: Card, *, uuid: str) -> Iterator[None]:
    """Replace CUDA by the card inside the block; this process has the GPU with this UUID."""
    real_view = slots.RemoteSlot.view
    with contextlib.ExitStack() as stack:
        for place, name, new in (
            (slots, "cuda", card),
            (slots, "SlotMemory", SharedSlotMemory),
            (slots, "MAX_SLOTS", 4),  # so that each is soon used again
            (slots, "device_uuid", lambda _: uuid),
            (link, "device_uuid", lambda _: uuid),
            (slots, "find_reachable", lambda own, _: own),
            (slots.OwnSlot, "handle", lambda slot: card.handle(slot)),
            (slots.RemoteSlot, "view", lambda slot, at, like: card.view(real_view, slot, at, like)),
            (torch.UntypedStorage, "_new_shared_cuda", lambda *memory: map_file(*memory).untyped_storage()),
            (torch, "as_tensor", lambda message, device: torch.from_numpy(np.asarray(message))),
        ):
            stack.enter_context(patch.object(place, name, new))
        yield


def exchange_by_card(home: str, seed: int, count: int, same_card: bool) -> tuple[int, list[str]]:
    """Exchange messages; return how many came in slots, and descriptions of wrong ones."""
    rank = dist.get_rank()
    card = Card(Path(home), 2 * seed + rank)
    chance = random.Random(2 * seed + rank)
    wrong: list[str] = []
    by_slot = 0

    def exchange(own: object) -> list[object]:
        everyone: list[object] = [None, None]
        dist.all_gather_object(everyone, own)
        return everyone

    def check(number: int, address: int, num_bytes: int) -> None:
        """Check on the device, after the host has released the message."""
        found = set(ctypes.string_at(address, num_bytes))
        if found != {number % 251}:
            wrong.append(f"message {number} holds {found}")

    with (
        installed(card, uuid="0" if same_card else str(rank)),
        connect(rank, {1 - rank: "the other"}, exchange, device=CPU) as network,
    ):
        link_to_peer = network.links[1 - rank]
        link_to_peer._slots_in, link_to_peer._slots_out = slots.SlotReceiver(CPU), slots.SlotSender(CPU)
        sent = taken = 0
        while sent < count or taken < count:
            if sent < min(count, taken + 6) and chance.random() < 0.7:
                sizes = [chance.randint(1, 3000) for _ in range(chance.randint(1, 3))]
                link_to_peer.send([torch.full((size,), sent % 251, dtype=torch.uint8) for size in sizes])
                sent += 1
            elif link_to_peer.ready:
                in_slot = link_to_peer._inbox[0].slot >= 0
                tensors = link_to_peer.take()
                by_slot += in_slot
                for tensor in tensors if in_slot else []:
                    card.computing.put(functools.partial(check, taken, tensor.data_ptr(), tensor.nbytes))
                if not in_slot and any(not torch.all(tensor == taken % 251) for tensor in tensors):
                    wrong.append(f"message {taken} by the host")
                tensors = tensor = None
                taken += 1
            elif sent == min(count, taken + 6):
                network.wait()
        dist.barrier()
        card.computing.synchronize()
        dist.barrier()
    return by_slot, wrong
