"""The file that holds the address of a running page. Each server has its own, so none removes another's."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path

from varuna.files import make_private_folder, open_private, write_all

ADDRESS_FILE = "page.url"
"""The address with its token, in the log folder, for this user only."""


@contextmanager
def published_address(log_dir: Path, url: str) -> Iterator[Path]:
    """Write the address to a file of this server, and remove it at the end.

    The file is `page.url`, or `page-2.url`, ... while other servers show the same job. A lock marks a file
    as used. It ends with its process: the file of a server that was killed is used again.
    """
    make_private_folder(log_dir)
    names = chain([ADDRESS_FILE], (f"page-{number}.url" for number in count(2)))
    path, fd = next((path, fd) for path in map(log_dir.joinpath, names) if (fd := _lock(path)) is not None)
    try:
        os.ftruncate(fd, 0)
        write_all(fd, f"{url}\n".encode())
        yield path
    finally:
        with suppress(OSError):
            if _is_open_file(path, fd):
                path.unlink()
        os.close(fd)


def _lock(path: Path) -> int | None:
    """Open a file and lock it; return None if another server has it."""
    while True:
        fd = open_private(path, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:  # a file system without locks
            return fd
        if _is_open_file(path, fd):
            return fd
        os.close(fd)  # the server that had it has removed it meanwhile


def _is_open_file(path: Path, fd: int) -> bool:
    """Return whether the path still names this open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False
