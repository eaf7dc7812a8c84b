"""Watchers of the manager: changes of the machine list, and slow machines."""

import os
from collections.abc import Mapping
from pathlib import Path

from varuna.files import write_atomic
from varuna.morph.machines import read_machines
from varuna.morph.state import Generation, Heartbeat
from varuna.morph.stragglers import StragglerWatch, find_stragglers


class MachineListWatcher:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        self.was_read = False

    def poll(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the machines and the problems of the list if the file has changed, else None."""
        problem = ""
        try:
            found = os.stat(self._path)
            seen: object = (found.st_mtime_ns, found.st_size, found.st_ino)
            text = self._path.read_text(errors="replace") if seen != self._seen else ""
        except OSError as error:
            seen, text, problem = str(error), "", f"it cannot be read: {error}"
        if seen == self._seen:
            return None
        self._seen, self.was_read = seen, True
        machines, problems = read_machines(text)
        return machines, (problem,) if problem else problems


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
