"""The state of reading an epoch: whether its data has ended, and the random states that give its order."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

EPOCH_RANDOM_STATE = "epoch_rng.pth"
"""File in a checkpoint folder."""


def random_state() -> dict[str, Any]:
    """Return the states of the generators from which samplers draw, as plain values and a tensor."""
    kind, keys, *rest = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.tensor(keys, dtype=torch.int64), *rest),
        "cpu": torch.get_rng_state(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    kind, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(state["cpu"])


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Set the generators back after the block."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def load_random_state(folder: str) -> dict[str, Any] | None:
    """Return the state at the start of the epoch in which a folder was saved; None: it has none."""
    path = os.path.join(folder, EPOCH_RANDOM_STATE)
    state: dict[str, Any] | None = torch.load(path, weights_only=True) if os.path.exists(path) else None
    return state


@dataclass
class EpochReader:
    """An epoch that is being read. It is made before the first batch."""

    start: dict[str, Any] = field(default_factory=random_state)
    has_ended: bool = False

    def save_random_state(self, folder: str) -> None:
        torch.save(self.start, os.path.join(folder, EPOCH_RANDOM_STATE))
