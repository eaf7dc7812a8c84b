"""Morph orders of a worker: its agent writes them to a small file, and a counter to a shared memory page.

The files stand beside the progress page of the worker: `<progress file>.order` has the newest order as JSON,
`<progress file>.control` the generation of that order, and of the newest order after a loss. If only joiners
were lost, it also has that of the order which this one interrupts: a worker that has not taken that one does
not miss them, and goes on to its next step boundary, or until it loses another one that has. The worker
reads the counters once a step, which takes less than a microsecond, and while it waits for other ranks. The
agent writes the order first, so a worker that sees the counters finds the order. The worker writes there the
generation of the last order that it has taken: from then on, it is in the middle of the change.
"""

import mmap
import os
import struct
from collections.abc import MutableMapping
from pathlib import Path

from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment, variable_name
from varuna.files import open_private, write_atomic
from varuna.types import MorphOrder

PAGE = 4096
_COUNTERS = struct.Struct("<qq")  # generation of the newest order, and of the newest one with lost ranks
_INTERRUPTED = struct.Struct("<q")  # generation of the order that this one interrupts; 0: any
_INTERRUPTED_AT = 128
_TAKEN = struct.Struct("<q")  # generation of the last order that the worker has taken
_TAKEN_AT = 64
_CHANGING = (
    "stage_to_rank_map",
    "batch_size",
    "replica_batch_size",
    "chunk_size",
    "resume_step",
    "plan",
    "profile",
    "saves",
    "generation",
    "joins",
)
"""Variables that belong to one generation: one that an order does not set is unset."""


def _paths(progress_file: Path) -> tuple[Path, Path]:
    """Return the order file and the control page of a worker."""
    name = progress_file.name
    return progress_file.with_name(f"{name}.order"), progress_file.with_name(f"{name}.control")


class OrderWriter:
    """Gives orders to one worker. Used by its agent."""

    def __init__(self, progress_file: Path) -> None:
        self._order, self._control = _paths(progress_file)
        self._order.unlink(missing_ok=True)
        with os.fdopen(open_private(self._control, os.O_RDWR), "r+b") as file:
            file.write(bytes(PAGE))
            file.flush()
            self._page = mmap.mmap(file.fileno(), PAGE)
        self._newest_loss = self._interrupts = 0
        self._last: MorphOrder | None = None

    def give(self, order: MorphOrder) -> None:
        """Write an order; the worker carries it out at its next step boundary. Raise OSError.

        If ranks were lost, the worker abandons its step; or only the last order, if joiners of it were lost.
        """
        write_atomic(self._order, encode(order), fsync=False, private=True)
        if order.lost:
            last, is_pending = self._last, self._newest_loss > self.taken and not self._interrupts
            joined = () if last is None else (rank for rank, old in enumerate(last.previous) if old is None)
            only_joiners = last is not None and not is_pending and set(order.lost) <= set(joined)
            self._interrupts = last.generation if last is not None and only_joiners else 0
            self._newest_loss = order.generation
        self._last = order
        _INTERRUPTED.pack_into(self._page, _INTERRUPTED_AT, self._interrupts)  # the worker reads it last
        _COUNTERS.pack_into(self._page, 0, order.generation, self._newest_loss)

    @property
    def taken(self) -> int:
        """Generation of the last order that the worker has begun to carry out; 0: none."""
        return int(_TAKEN.unpack_from(self._page, _TAKEN_AT)[0])

    def close(self) -> None:
        self._page.close()
        for path in (self._order, self._control):
            path.unlink(missing_ok=True)


class OrderReader:
    """Never has an order: no agent has started this worker."""

    @property
    def is_pending(self) -> bool:
        """Return True if there is an order that was not taken."""
        return False

    @property
    def has_loss(self) -> bool:
        """Return True if an order to go on without lost ranks was not taken."""
        return False

    @property
    def abandons(self) -> bool:
        """Return True if this worker has to abandon what it does, because it misses the lost ranks."""
        return False

    def take(self) -> MorphOrder:
        """Return the newest order, which is then no longer pending."""
        raise RuntimeError("no order is pending (take() needs is_pending)")


class SharedOrderReader(OrderReader):
    """Reads the orders of this worker's agent."""

    def __init__(self, progress_file: Path) -> None:
        self._order, control = _paths(progress_file)
        with control.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE)
        self._taken = 0

    @property
    def is_pending(self) -> bool:
        return bool(_COUNTERS.unpack_from(self._page)[0] != self._taken)

    @property
    def has_loss(self) -> bool:
        return bool(_COUNTERS.unpack_from(self._page)[1] > self._taken)

    @property
    def abandons(self) -> bool:
        return self.has_loss and bool(self._taken >= _INTERRUPTED.unpack_from(self._page, _INTERRUPTED_AT)[0])

    def take(self) -> MorphOrder:
        if not self.is_pending:
            return super().take()
        order = decode(self._order.read_bytes(), MorphOrder, str(self._order))
        self._taken = order.generation
        _TAKEN.pack_into(self._page, _TAKEN_AT, order.generation)
        return order


def open_orders() -> OrderReader:
    """Open the orders of this worker, if an agent has started it."""
    path = VarunaEnvironment.read(os.environ).progress_file
    if not path:
        return OrderReader()
    try:
        return SharedOrderReader(Path(path))
    except (OSError, ValueError):  # training continues without it
        return OrderReader()


def apply_environment(order: MorphOrder, environment: MutableMapping[str, str]) -> None:
    """Change the variables of a worker to those of its next generation."""
    for field in _CHANGING:
        environment.pop(variable_name(field), None)
    environment.update(order.environment)
