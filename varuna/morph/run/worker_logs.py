"""Reads the log and error files that a worker leaves behind."""

from contextlib import suppress
from pathlib import Path

from varuna.codec import decode
from varuna.morph.failures import ErrorFile


def read_error(path: Path) -> ErrorFile | None:
    try:
        return decode(path.read_bytes(), ErrorFile, str(path))
    except (FileNotFoundError, ValueError):  # not written, or by something that writes another form
        return None


def last_lines(path: Path, count: int = 20) -> str:
    with suppress(FileNotFoundError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-count:])
    return ""
