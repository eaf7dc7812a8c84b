"""Watchers of the manager: changes of the machine list, and slow machines."""

import os
from collections.abc import Mapping
from pathlib import Path

from varuna.files import write_atomic
from varuna.morph.machines import MAX_BYTES, MachineList, read_machines
from varuna.morph.state import Generation, Heartbeat
from varuna.morph.stragglers import StragglerWatch, find_stragglers

WHOLE_SECONDS = 1.0
"""A list that ends within a line is whole after this time without a change."""


class MachineListWatcher:
    """Reads the machine list when it has changed, by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None  # file that was parsed last
        self._unfinished: tuple[object, float] = (None, 0.0)  # file with half a line, and when it was seen
        self.was_read = False

    def poll(self, now: float) -> MachineList | None:
        """Return the list if it has changed, else None.

        A last line without an end may still be written: it counts once the file has stayed the same for
        `WHOLE_SECONDS`. A file that cannot be read is an empty list.
        """
        try:
            found = os.stat(self._path)
            seen: object = (found.st_mtime_ns, found.st_size, found.st_ino)
            if seen == self._seen:
                return None
            with self._path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            seen = str(error)
            if seen == self._seen:
                return None
            self._seen = seen
            return MachineList(problem=f"{self._path} cannot be read: {error.strerror or error}")
        if self.was_read and data and not data.endswith(b"\n"):
            if self._unfinished[0] != (seen, data):
                self._unfinished = ((seen, data), now)
            if now - self._unfinished[1] < WHOLE_SECONDS:
                return None
        self._seen = seen
        machines = read_machines(data, source=str(self._path))
        self.was_read = self.was_read or not machines.problem
        return machines


class SlowMachineWatcher:
    """Finds machines that compute slowly, and lists them in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = StragglerWatch()
        self.machines: dict[str, None] = {}  # in order of detection
        self.problem = ""  # why the file lacks machines

    def reset(self) -> None:
        """Start again with a new generation."""
        self._watch = StragglerWatch()

    def find(self, heartbeats: Mapping[str, Heartbeat], generation: Generation) -> list[str]:
        """Return the machines that are newly found to be slow."""
        times = {
            worker.rank: (worker.steps, worker.compute_seconds)
            for _, number, progress in heartbeats.values()
            for worker in progress
            if number == generation.number
        }
        self._watch, ranks = find_stragglers(self._watch, times, generation.layout)
        slow = dict.fromkeys(generation.machine_of(rank) for rank in sorted(ranks))
        new = [machine for machine in slow if machine is not None and machine not in self.machines]
        if new:
            self.machines.update(dict.fromkeys(new))
        if new or self.problem:
            try:
                write_atomic(self._path, "".join(f"{name}\n" for name in self.machines), fsync=False)
                self.problem = ""
            except OSError as error:  # a full disk must not end the job
                self.problem = f"{self._path} cannot be written: {error.strerror or error}"
        return new
