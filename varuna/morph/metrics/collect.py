"""Collects the records of one worker in its agent, and cuts them into messages of bounded size.

Very short steps are thinned out evenly. While the manager is away, records wait, up to a limit.
"""

import os
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.morph.metrics.ring import NUM_STEPS, MetricsReader
from varuna.morph.protocol.messages import WorkerMetrics
from varuna.morph.state import WorkerFacts
from varuna.observe.history import ScalarPoint, StepPoint

MAX_PER_BEAT = 64
"""Steps between two heartbeats that are kept on average: all of them if a step takes 8 ms or more."""
MAX_BURST = NUM_STEPS
"""Steps that are kept at once after fewer in the heartbeats before, such as after a late heartbeat."""
MAX_PER_MESSAGE = 512
MAX_WAITING = 8192
"""Steps, and scalars, that wait for the manager."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MetricsCollector:
    def __init__(self, progress_file: Path) -> None:
        self._reader: MetricsReader | None = None
        with suppress(OSError):  # a full disk: the job continues without its curves
            self._reader = MetricsReader(progress_file)
        self._steps: list[StepPoint] = []
        self._scalars: deque[ScalarPoint] = deque()
        self._sent_steps: deque[StepPoint] = deque(maxlen=MAX_PER_MESSAGE)
        self._sent_scalars: deque[ScalarPoint] = deque(maxlen=MAX_PER_MESSAGE)
        self._dropped = self._rank = 0
        self._allowance = MAX_BURST  # steps that may be kept now
        self._facts = WorkerFacts()

    def collect(self, rank: int, *, again: bool = False) -> None:
        """Take the new records of the worker, which has this rank.

        `again`: the last messages wait again, because a manager that has ended may have lost them. A manager
        that has them drops them.
        """
        self._rank = rank
        if again:
            self._steps = [*self._sent_steps, *self._steps]
            self._scalars.extendleft(reversed(self._sent_scalars))
            self._sent_steps.clear()
            self._sent_scalars.clear()
        if self._reader is None:
            return
        steps, scalars, dropped = self._reader.take()
        self._allowance = min(self._allowance + MAX_PER_BEAT, MAX_BURST)
        kept = thin(steps, max(self._allowance, MAX_PER_BEAT))
        self._allowance -= len(kept)
        self._dropped += dropped + len(steps) - len(kept)
        self._steps += kept
        self._scalars += scalars
        if len(self._steps) > MAX_WAITING:
            kept = thin(self._steps, MAX_WAITING // 2)
            self._dropped += len(self._steps) - len(kept)
            self._steps = kept
        while len(self._scalars) > MAX_WAITING:
            self._scalars.popleft()
            self._dropped += 1

    def take(self) -> WorkerMetrics | None:
        """Return the next message, or None if nothing waits."""
        if not (self._steps or self._scalars or self._dropped):
            return None
        steps, self._steps = self._steps[:MAX_PER_MESSAGE], self._steps[MAX_PER_MESSAGE:]
        scalars = [self._scalars.popleft() for _ in range(min(len(self._scalars), MAX_PER_MESSAGE))]
        self._sent_steps += steps
        self._sent_scalars += scalars
        dropped, self._dropped = self._dropped, 0
        return WorkerMetrics(self._rank, tuple(steps), tuple(scalars), dropped)

    def facts(self, pid: int) -> WorkerFacts:
        """Return the worker's facts. The memory of a worker without a device is that of its process."""
        facts = self._reader.facts() if self._reader is not None else self._facts
        if not facts.memory_bytes and pid:
            facts = msgspec.structs.replace(facts, memory_bytes=resident_bytes(pid))
        return facts

    def close(self) -> None:
        """Take the last records of a worker that has ended, and remove its file."""
        if self._reader is not None:
            self.collect(self._rank)
            self._reader.close()
            self._reader = None


def thin(steps: list[StepPoint], limit: int) -> list[StepPoint]:
    """Keep at most about `limit` steps at equal distances, and always the last one."""
    stride = 1
    while len(steps) > limit * stride:
        stride *= 2
    if stride == 1:
        return steps
    return [point for point in steps if point.step % stride == 0 or point is steps[-1]]


def resident_bytes(pid: int) -> int:
    """Return the memory of a process; 0 if it cannot be read."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError, ValueError):
        return 0
