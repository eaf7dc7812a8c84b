"""Ends a job's processes when its launcher was killed and could not do so itself.

The kernel ends each worker with the launcher, but not what the workers had started (loaders of data,
say). This small process reads the workers' process groups, one a line, and waits: "done" sends it
home, the end of its input without that means that the launcher is gone.
"""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    groups = []
    for line in sys.stdin:
        if line.strip() == "done":
            return
        groups.append(int(line))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
