"""Machines that faults happen to: loopback addresses, whose processes are local ones, or hosts of a `Lab`."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ChaosMachine(Protocol):
    """A machine that can die and come back. A `Host` can be cut off, slowed down and filled, too."""

    name: str
    address: str

    def kill(self) -> None:
        """Kill all processes of the machine at once."""

    def boot(self) -> None:
        """Let the machine come back after `kill`."""

    def outer_pid(self, pid: int) -> int:
        """Return the process id outside of the machine."""

    def processes(self) -> dict[int, str]:
        """Return ids and command lines of the job's processes."""


class LoopbackMachine:
    """A machine 127.0.0.x: its agent, and all processes below it."""

    def __init__(self, number: int, agent_pid: Callable[[str], int | None]) -> None:
        """`agent_pid` returns the process id of a machine's agent, if there is one."""
        self.address = self.name = f"127.0.0.{number}"
        self._agent_pid = agent_pid

    def kill(self) -> None:
        signal_all(self.processes(), signal.SIGKILL)

    def kill_started(self, manager: int) -> None:
        """Kill an agent that the process `manager` has started here: the output goes to a log of its own."""
        log = f"/agent_{self.address}.log"
        for pid in children(manager):
            with suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/1").endswith(log):
                    signal_all(descendants(pid), signal.SIGKILL)

    def boot(self) -> None:
        """Do nothing: the manager starts the agent again, while the machine is on its list."""

    def outer_pid(self, pid: int) -> int:
        return pid

    def processes(self) -> dict[int, str]:
        agent = self._agent_pid(self.address)
        if agent is None:
            return {}
        below = descendants(agent)
        return {pid: line for pid in below if (line := command_line(pid))}


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes; some may be gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return a process and all that it has started, directly or not."""
    found = [pid]
    for one in found:
        found += children(one)
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_line(pid: int) -> str:
    """Return the command line of a process; "" if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def process_name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())
