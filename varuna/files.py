"""Files that are written whole: atomic writes, and logs of whole lines; and files for this user only.

A reader of an atomic write sees the old file or the new one, never a part of it. A line of a `LineFile`
is written whole or not at all, also on a full disk.
"""

import errno
import io
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str, *, fsync: bool = True, private: bool = False) -> None:
    """Write a file under a temporary name, then rename it. Create missing folders.

    The text is UTF-8 in every locale. `fsync` also keeps the file whole if the machine loses power. A
    `private` file, and the folders that are created for it, can be read by this user only. Other files
    follow the umask.
    """
    if private:
        make_private_folder(path.parent)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        mode = 0o600 if private else 0o666
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk has no name of its own
        raise
    finally:
        temporary.unlink(missing_ok=True)


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes: one call of os.write may write only some of them."""
    while data:
        data = data[os.write(fd, data) :]


class DroppingFile(io.FileIO):
    """A file that drops output while its disk is full, for logs of programs that must not end then."""

    def write(self, data: Any) -> int:
        try:
            write_all(self.fileno(), bytes(data))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise
        return len(data)


class LineFile:
    """A file that grows by whole lines, for this user only. Only one process may write it."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        self.path = path
        self._fsync = fsync
        self._fd: int | None = None

    def append(self, line: bytes) -> None:
        """Append one line. If that fails, raise OSError and leave the file as it was."""
        if self._fd is None:
            self._fd = open_private(self.path, os.O_RDWR | os.O_APPEND)
        size = os.fstat(self._fd).st_size
        try:
            # An incomplete last line, which a crash has left, ends here.
            incomplete = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
            write_all(self._fd, b"\n" * incomplete + line + b"\n")
            if self._fsync:
                os.fsync(self._fd)
        except OSError:
            with suppress(OSError):  # the next append repairs what this leaves
                os.ftruncate(self._fd, size)
            self.close()
            raise

    def close(self) -> None:
        """Close the file; the next append opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def make_private_folder(path: Path) -> None:
    """Create a folder, and its missing parents, for this user only. Leave existing folders as they are."""
    if not path.is_dir():
        make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path, flags: int = os.O_WRONLY | os.O_APPEND) -> int:
    """Open or create a file for this user only, also if it exists with other permissions."""
    fd = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    found = os.fstat(fd)
    is_open_to_others = stat.S_ISREG(found.st_mode) and found.st_mode & 0o077
    if is_open_to_others and found.st_uid == os.geteuid():
        os.fchmod(fd, 0o600)
    return fd
