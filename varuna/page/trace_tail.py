"""Follows a growing trace file: reads only its new bytes, and keeps only its newest steps."""

from collections import deque
from collections.abc import Callable

import msgspec

from varuna.codec import UNDECODABLE
from varuna.observe.trace_file import LENGTH_BYTES, StepTrace, split_records

MAX_STEPS = 64
"""Newest steps of a file that are kept: ranks are read one after the other while they train."""
MAX_KEPT_BYTES = 2**20
MAX_BYTES = 8 * 2**20
"""Bytes that one update reads. A worker starts a new file at 2 MB."""
START_BYTES = 64
"""First bytes of a file. They hold the time of its first step, so they differ after it was replaced."""

ReadFrom = Callable[[int], tuple[bytes, int]]
"""Returns a piece of a file from a place on, and the size of the file. Raises OSError or ValueError."""


class TraceHead(msgspec.Struct, frozen=True, array_like=True):
    """The first fields of a `StepTrace`: decoding these skips its intervals."""

    step: int
    rank: int
    stage: int
    num_ranks: int
    written: float
    machine: str
    generation: int


class TraceTail:
    """The newest steps of one worker."""

    def __init__(self, read: ReadFrom, *, is_remote: bool) -> None:
        self._read = read
        self.is_remote = is_remote
        self._place = 0  # start of the first record that is not read yet
        self._start = b""  # the first bytes of the file
        self._records: deque[tuple[TraceHead, bytes]] = deque(maxlen=MAX_STEPS)
        self._heads = msgspec.msgpack.Decoder(TraceHead)
        self._traces = msgspec.msgpack.Decoder(StepTrace)

    @property
    def newest(self) -> TraceHead | None:
        return self._records[-1][0] if self._records else None

    def steps(self, generation: int, rank: int) -> set[int]:
        """Return the kept steps that the worker ran as this rank of this generation."""
        wanted = generation, rank
        return {head.step for head, data in self._records if data and (head.generation, head.rank) == wanted}

    def trace(self, step: int) -> StepTrace:
        """Return the intervals of a kept step. Raise msgspec.DecodeError if its record is damaged."""
        return self._traces.decode(next(data for head, data in reversed(self._records) if head.step == step))

    def forget(self) -> None:
        """Free the steps, except for the first fields of the newest."""
        self._records = deque(((head, b"") for head, _ in list(self._records)[-1:]), maxlen=MAX_STEPS)

    def update(self) -> int:
        """Read what is new; return the number of bytes. Raise OSError or ValueError."""
        data = self._new_bytes()
        records = list(split_records(data))
        try:
            found = [(self._heads.decode(record), record) for record in records[-MAX_STEPS:]]
        except UNDECODABLE:
            found = []
        if data and not found and self._was_replaced():
            self._place = 0
            return len(data) + self.update()
        if records and not found:  # damaged: continue after it
            self._place += len(data)
            return len(data)
        self._place += sum(LENGTH_BYTES + len(record) for record in records)
        self._records.extend(found)
        while len(self._records) > 1 and sum(len(record) for _, record in self._records) > MAX_KEPT_BYTES:
            self._records.popleft()
        return len(data)

    def _was_replaced(self) -> bool:
        """Return whether the worker has started a new file that is already longer than what was read."""
        return bool(self._place) and self._read(0)[0][:START_BYTES] != self._start

    def _new_bytes(self) -> bytes:
        data, size = self._read(self._place)
        if size < self._place:  # the worker has started a new file
            self._place = 0
            data, size = self._read(0)
        if not self._place:
            self._start = data[:START_BYTES]
        while data and self._place + len(data) < min(size, self._place + MAX_BYTES):
            more, _ = self._read(self._place + len(data))
            if not more:
                break
            data += more
        return data
