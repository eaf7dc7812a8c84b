"""A process namespace: all its processes die with its first one."""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Box:
    def __init__(
        self,
        argv: Sequence[str],
        *,
        within: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        output: int | IO[bytes] = subprocess.PIPE,
        uptime_seconds: int = 0,
    ) -> None:
        """`within` is a command that runs another: `ip netns exec NAME`.

        `uptime_seconds`: how much longer than the real machine this one seems to be up.
        """
        unshare = [tool("unshare"), "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if uptime_seconds:
            unshare += ["--time", f"--monotonic={uptime_seconds}", f"--boottime={uptime_seconds}"]
        self.outer = subprocess.Popen(
            [*within, *unshare, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    @property
    def first(self) -> int:
        """Return the first process, with which all others die."""
        pid = self.outer.pid
        (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(first)

    def kill(self) -> None:
        if self.outer.poll() is None:
            os.kill(self.first, signal.SIGKILL)
        self.outer.wait()  # the kernel has ended and reaped all of them by then
        if self.outer.stdout is not None:
            self.outer.stdout.close()


def missing_tools(names: Sequence[str]) -> list[str]:
    return [name for name in names if shutil.which(name, path=PATH) is None]


def tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    assert found is not None, name
    return found
