"""The wall clock of a test host, which tests can shift: a file holds the offset in seconds.

Python imports this file in every process of the host. It changes only `time.time`, like a clock that
somebody sets.
"""

import os
import time
from pathlib import Path

FILE = os.environ.get("LAB_CLOCK", "")
_right = time.time


def wrong_time() -> float:
    try:
        return _right() + float(Path(FILE).read_text())
    except (OSError, ValueError):  # the clock is not shifted
        return _right()


if FILE:
    time.time = wrong_time
