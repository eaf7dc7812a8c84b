"""A namespace of processes: whatever ever runs in it dies with its first process, all at once."""

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
    ) -> None:
        """`within` is a command that runs another: `ip netns exec NAME`."""
        unshare = [tool("unshare"), "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.outer = subprocess.Popen(
            [*within, *unshare, *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def kill(self) -> None:
        if self.outer.poll() is None:
            pid = self.outer.pid
            (first,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(first), signal.SIGKILL)
        self.outer.wait()  # the kernel has ended and reaped all of them by then
        if self.outer.stdout is not None:
            self.outer.stdout.close()


def missing_tools(names: Sequence[str]) -> list[str]:
    return [name for name in names if shutil.which(name, path=PATH) is None]


def tool(name: str) -> str:
    found = shutil.which(name, path=PATH)
    assert found is not None, name
    return found
