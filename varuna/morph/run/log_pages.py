"""Reads a log file of any size in bounded pieces: from its end, or from a place on.

Each call reads a limited number of bytes, so a request has a deadline, and no process keeps a whole log.
`varuna logs` first searches backwards for the start of the last lines, then reads forwards.
"""

import os
from pathlib import Path

import msgspec

from varuna.morph.protocol.messages import LogPage, LogRequest
from varuna.observe.step_timelines import NAME as TIMELINE
from varuna.observe.trace_file import list_traces

SCAN_BYTES = 32 * 2**20
"""Bytes that one search reads at most."""
PAGE_BYTES = 256 * 2**10
"""Bytes of text that one page has at most."""
_BLOCK_BYTES = 256 * 2**10


def answer(log_dir: Path, request: LogRequest) -> LogPage:
    """Search or read a file of this machine's log folder. Raise OSError."""
    if request.stream == "traces":
        data = msgspec.json.encode([file for file in list_traces(log_dir) if file.generation])
        return LogPage(len(data), len(data), data=data)
    path = log_dir / f"generation_{request.generation}" / f"rank_{request.rank}.{request.stream}"
    if request.stream == "timeline":
        path = log_dir / TIMELINE
    if request.lines:
        return find_lines(path, request.lines, stop=request.stop)
    return read_page(path, request.start, request.stop)


def find_lines(path: Path, lines: int, *, stop: int | None = None, scan_bytes: int = SCAN_BYTES) -> LogPage:
    """Search backwards for the start of the last `lines` lines before `stop` (default: the end of the file).

    The result has no data. If its `lines` is not 0, repeat with that number and `stop=start`. Raise OSError.
    """
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        if lines <= 0:
            return LogPage(end, end)
        start = stop = end if stop is None else min(stop, end)
        least = max(0, stop - scan_bytes)
        if stop == end and end:
            file.seek(end - 1)
            lines += file.read(1) == b"\n"  # the newline of the last line does not start another one
        while start > least:
            size = min(_BLOCK_BYTES, start - least)
            file.seek(start - size)
            block = file.read(size)
            found = block.count(b"\n")
            if found >= lines:
                for _ in range(lines):
                    size = block.rindex(b"\n", 0, size)
                return LogPage(start - len(block) + size + 1, stop, lines=0)
            lines -= found
            start -= size
    return LogPage(start, stop, lines=lines if start else 0)


def read_page(path: Path, start: int, stop: int | None) -> LogPage:
    """Read a page from `start` on, at most to `stop` (default: the end of the file). Raise OSError."""
    with path.open("rb") as file:
        stop = os.fstat(file.fileno()).st_size if stop is None else stop
        file.seek(start)
        data = file.read(max(0, min(PAGE_BYTES, stop - start)))
    return LogPage(start + len(data), stop, data=data)


def last_lines(path: Path, count: int = 20, *, max_bytes: int = 64 * 2**10) -> str:
    """Return the last lines, at most `max_bytes` of them; "" if there is no such file."""
    try:
        found = find_lines(path, count, scan_bytes=max_bytes)
        data = read_page(path, found.start, found.stop).data
    except OSError:
        return ""
    return "\n".join(data.decode(errors="replace").splitlines())
