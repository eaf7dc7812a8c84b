"""Ports that nothing else takes between the moment a test chooses one and the moment its process listens.

Linux gives ports from 32768 up to whoever asks for any: a port from there may be gone before a test's own
process has imported torch. These lie below, and each test process has its own part of them.
"""

import itertools
import os
import random
import socket

FIRST, PER_PROCESS, PROCESSES = 12_000, 1_000, 20

_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_part = int(_worker.removeprefix("gw")) % 10 if _worker else 10 + os.getpid() % 10
_candidates = itertools.cycle(range(FIRST + _part * PER_PROCESS, FIRST + (_part + 1) * PER_PROCESS))
for _ in range(random.Random(os.getpid()).randrange(PER_PROCESS)):
    next(_candidates)


def free_port() -> int:
    for port in itertools.islice(_candidates, PER_PROCESS):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no port of {FIRST} to {FIRST + PROCESSES * PER_PROCESS} is free for this process")
