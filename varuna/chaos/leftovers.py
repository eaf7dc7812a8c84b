"""Finds and removes what a job left behind: processes, sockets, shared memory and temporary files.

A process belongs to the job if its environment names the job's folder, which all of them inherit.
"""

import os
import signal
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.chaos.machines import all_processes, command_line, signal_all

SHARED_MEMORY = Path("/dev/shm")
GRACE_SECONDS = 10.0
"""Processes that end within this time after the job are not left behind."""
WATCH_SECONDS = 1.0
MOST_SHOWN = 10


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """All that was left behind."""

    processes: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    shared_memory: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not (self.processes or self.sockets or self.shared_memory or self.files)

    def lines(self) -> list[str]:
        """Return one line for each thing, at most MOST_SHOWN of a kind."""
        found = []
        for name in self.__struct_fields__:
            things = getattr(self, name)
            found += [f"{name.replace('_', ' ')}: {thing}" for thing in things[:MOST_SHOWN]]
            if len(things) > MOST_SHOWN:
                found.append(f"{name.replace('_', ' ')}: {len(things) - MOST_SHOWN} more")
        return found


class JobWatcher:
    """Notes the shared memory that the job's processes use while they live."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self._folder = folder
        self._temporary = temporary
        self._segments: set[str] = set()
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stops.wait(WATCH_SECONDS):
            for pid in self.processes():
                self._segments |= segments_of(pid)

    def processes(self) -> list[int]:
        return processes_with(f"{self._folder}/".encode())

    def find(self) -> Leftovers:
        """Wait for the processes of the job to end; return what is there after that."""
        deadline = time.monotonic() + GRACE_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            self._segments |= segments_of(pid)
        files = [path for path in sorted(self._temporary.rglob("*")) if not path.is_dir()]
        socket_files = [path for path in files if stat.S_ISSOCK(path.lstat().st_mode)]
        return Leftovers(
            processes=tuple(f"{pid}: {command_line(pid)}" for pid in left),
            sockets=(
                *(port for pid in left for port in listening_ports(pid)),
                *(str(path.relative_to(self._temporary)) for path in socket_files),
            ),
            shared_memory=tuple(sorted(name for name in self._segments if (SHARED_MEMORY / name).exists())),
            files=tuple(str(path.relative_to(self._temporary)) for path in files if path not in socket_files),
        )

    def remove(self) -> None:
        """Kill what is left of the job, and unlink its shared memory."""
        self._stops.set()
        self._thread.join()
        while left := self.processes():
            signal_all(left, signal.SIGKILL)
            time.sleep(0.05)
        for name in self._segments:
            with suppress(OSError):
                (SHARED_MEMORY / name).unlink()


def processes_with(text: bytes) -> list[int]:
    """Return the processes whose environment contains a text, without this one and without zombies."""
    found = []
    for pid in all_processes():
        with suppress(OSError):
            if pid != os.getpid() and text in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
    return found


def segments_of(pid: int) -> set[str]:
    """Return the shared memory that a process has mapped."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            place = line.partition(f"{SHARED_MEMORY}/")[2]
            if place and not place.endswith(" (deleted)"):
                found.add(place)
    return found


def listening_ports(pid: int) -> list[str]:
    """Return the TCP ports on which a process listens."""
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path))
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.append(f"port {int(fields[1].rpartition(':')[2], 16)} of process {pid}")
    return found
