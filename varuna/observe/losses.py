"""The losses of a job, step by step: each worker appends its own to a file, and another process follows them.

The variable `losses` of the environment names the folder; without it, nothing is written. A line is
"STEP GENERATION RANK LOSS".
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from varuna.environment import VarunaEnvironment, variable_name


class LossRecord(NamedTuple):
    """The loss of one step, as one rank knows it."""

    step: int
    generation: int  # 0: no manager
    rank: int
    loss: float


class LossWriter:
    """Appends a line for each step. An error must not end the training, so it is ignored."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = environment  # a morph in place changes generation and rank
        self._fd = -1
        with suppress(OSError):
            name = f"{environment.get('HOSTNAME', 'worker')}-{os.getpid()}-{os.urandom(4).hex()}"
            self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, step: int, loss: float) -> None:
        generation = self._environment.get(variable_name("generation")) or 0
        rank = self._environment.get("RANK") or 0
        with suppress(OSError):
            os.write(self._fd, f"{step} {generation} {rank} {loss!r}\n".encode())


def open_losses(environment: Mapping[str, str]) -> LossWriter | None:
    """Return where to write the losses; None: nobody asks for them."""
    folder = VarunaEnvironment.read(environment).losses
    return None if folder is None else LossWriter(Path(folder), environment)


class LossFollower:
    """Reads the records that workers have added since the last call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, int] = {}  # bytes by file

    def read(self) -> list[LossRecord]:
        found: list[LossRecord] = []
        for entry in os.scandir(self.folder):
            start = self._read.get(entry.name, 0)
            if entry.stat().st_size > start:
                with open(entry.path, "rb") as file:
                    file.seek(start)
                    data = file.read()
                whole = data[: data.rfind(b"\n") + 1]  # a worker may be killed within a line
                self._read[entry.name] = start + len(whole)
                found += [_parse(line) for line in whole.decode().splitlines()]
        return found


def _parse(line: str) -> LossRecord:
    step, generation, rank, loss = line.split()
    return LossRecord(int(step), int(generation), int(rank), float(loss))
