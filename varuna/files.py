"""Files that are written whole: atomic writes, and logs of whole lines.

A reader of an atomic write sees the old file or the new one, never a part of it. A line of a `LineFile`
is written whole or not at all, also on a full disk.
"""

import os
from contextlib import suppress
from pathlib import Path


def write_atomic(path: Path, text: str, *, fsync: bool = True, mode: int = 0o666) -> None:
    """Write a file under a temporary name, then rename it. Create missing folders.

    `fsync` also keeps the file whole if the machine loses power. `mode` is reduced by the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
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


class LineFile:
    """A file that grows by whole lines. Only one process may write it."""

    def __init__(self, path: Path, *, fsync: bool = False, mode: int = 0o600) -> None:
        self.path = path
        self._fsync = fsync
        self._mode = mode
        self._fd: int | None = None

    def append(self, line: bytes) -> None:
        """Append one line. If that fails, raise OSError and leave the file as it was."""
        if self._fd is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(self.path, flags, self._mode)
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
