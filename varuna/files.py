"""Atomic writes: a reader sees the old file or the new one, never a part of it."""

import os
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
    finally:
        temporary.unlink(missing_ok=True)
