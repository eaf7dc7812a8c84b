"""Morph orders of a worker: its agent writes them to a small file, and a counter to a shared memory page.

The files stand beside the progress page of the worker: `<progress file>.order` has the newest order as JSON,
`<progress file>.control` the generation of that order. The worker reads the counter once a step, which takes
less than a microsecond. The agent writes the order first, so a worker that sees the counter finds the order.
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
_COUNTER = struct.Struct("<q")
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

    def give(self, order: MorphOrder) -> None:
        """Write an order; the worker carries it out at its next step boundary. Raise OSError."""
        write_atomic(self._order, encode(order), fsync=False, private=True)
        _COUNTER.pack_into(self._page, 0, order.generation)

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

    def take(self) -> MorphOrder:
        """Return the newest order, which is then no longer pending."""
        raise RuntimeError("no order is pending (take() needs is_pending)")


class SharedOrderReader(OrderReader):
    """Reads the orders of this worker's agent."""

    def __init__(self, progress_file: Path) -> None:
        self._order, control = _paths(progress_file)
        with control.open("rb") as file:
            self._page = mmap.mmap(file.fileno(), PAGE, access=mmap.ACCESS_READ)
        self._taken = 0

    @property
    def is_pending(self) -> bool:
        return bool(_COUNTER.unpack_from(self._page)[0] != self._taken)

    def take(self) -> MorphOrder:
        if not self.is_pending:
            return super().take()
        order = decode(self._order.read_bytes(), MorphOrder, str(self._order))
        self._taken = order.generation
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
