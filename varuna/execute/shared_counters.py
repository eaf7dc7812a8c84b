"""Counters that all ranks of one machine share: a barrier without a message.

Each rank writes its own counter and reads those of the others. The memory has no name, so nothing is left
behind: the first rank makes it, and the others open it through /proc. They cannot if they run on another
machine or in another container; then there are no counters, and the ranks send messages.

    16 bytes   random, to recognize the memory
    64 bytes   for each rank: its counter, and nothing else in this cache line
"""

import contextlib
import mmap
import os
import secrets
import stat
from collections.abc import Callable
from typing import NamedTuple

TOKEN_BYTES = 16
LINE = 64
"""Bytes of a cache line: ranks that write to one line would slow each other down."""
_NUMBERS_PER_LINE = LINE // 8


class CounterPlace(NamedTuple):
    """The path by which other processes open the memory, and its first bytes."""

    path: str  # "": there is none
    token: bytes


class SharedCounters:
    """One counter for each rank of a session, all on this machine; they only grow."""

    def __init__(self, fd: int, index: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(fd, LINE * (1 + num_ranks))
        self._numbers = memoryview(self._memory).cast("q")
        # Aligned numbers of 8 bytes: a process sees the old one or the new one.
        self._counters = self._numbers[_NUMBERS_PER_LINE::_NUMBERS_PER_LINE]
        self._index = index
        self.own = 0

    def advance(self) -> None:
        """Count one more on this rank."""
        self.own += 1
        self._counters[self._index] = self.own

    def all_here(self) -> bool:
        """Return whether all ranks have counted as far as this one."""
        assert max(self._counters) <= self.own + 1, "another rank has passed a barrier without this one"
        return min(self._counters) >= self.own

    def close(self) -> None:
        self._counters.release()
        self._numbers.release()
        self._memory.close()


def open_counters(
    index: int,
    num_ranks: int,
    *,
    gather_places: Callable[[CounterPlace], list[CounterPlace]],
    gather_flags: Callable[[bool], list[bool]],
) -> SharedCounters | None:
    """Share counters with all ranks; None if some rank cannot. All ranks call it, in the order of `index`.

    The arguments gather a value of each rank.
    """
    with contextlib.ExitStack() as stack:
        fd, place = _make(num_ranks) if index == 0 else (None, CounterPlace("", b""))
        if fd is not None:
            stack.callback(os.close, fd)
        place = gather_places(place)[0]
        if index > 0 and (fd := _open(place)) is not None:
            stack.callback(os.close, fd)
        # The first rank closes its file when all others have opened theirs.
        if not all(gather_flags(fd is not None)):
            return None
        assert fd is not None
        return SharedCounters(fd, index, num_ranks)


def _make(num_ranks: int) -> tuple[int | None, CounterPlace]:
    """Make the memory; None if this system has no such memory, or does not allow it (`vm.memfd_noexec`)."""
    try:
        fd = os.memfd_create("varuna-counters", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        return None, CounterPlace("", b"")
    token = secrets.token_bytes(TOKEN_BYTES)
    os.write(fd, token.ljust(LINE * (1 + num_ranks), b"\0"))
    return fd, CounterPlace(f"/proc/{os.getpid()}/fd/{fd}", token)


def _open(place: CounterPlace) -> int | None:
    """Open the memory of another process; None if this is impossible, or the path leads to another file."""
    try:
        if not place.path or not stat.S_ISREG(os.stat(place.path).st_mode):
            return None
        fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.pread(fd, TOKEN_BYTES, 0) == place.token:
        return fd
    os.close(fd)
    return None
