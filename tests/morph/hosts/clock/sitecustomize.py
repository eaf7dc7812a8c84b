"""The wall clock of a test host, which can be made to jump: a file says by how many seconds it is wrong.

Python imports this by itself on a host of the lab, in every process. `time.time` alone is moved: what a
clock that is set does, and all that Python code of ours can see of it.
"""

import os
import time
from pathlib import Path

FILE = os.environ.get("LAB_CLOCK", "")
_right = time.time


def wrong_time() -> float:
    try:
        return _right() + float(Path(FILE).read_text())
    except (OSError, ValueError):  # nobody has moved it
        return _right()


if FILE:
    time.time = wrong_time
