"""Where checkpoints lie: a local folder, or any other place that fsspec opens.

Paths are relative to the store and written with "/". Nothing here knows what a checkpoint is.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

Buffer = bytes | bytearray | memoryview


class Entry(msgspec.Struct, frozen=True):
    """One name in a folder."""

    name: str
    is_folder: bool
    size: int  # bytes; 0 for a folder


class Owner(msgspec.Struct, frozen=True):
    """Who writes to a store: one job at a time."""

    job: str  # the same for a job that was resumed from its own checkpoint, on whatever machines
    token: str  # this very run
    host: str
    pid: int


class Claim(Protocol):
    """The right to write to a store, until released or until this process ends."""

    def check(self) -> None:
        """Raises StoreTaken where another run has taken over since."""

    def release(self) -> None: ...


class Store(Protocol):
    """A place for checkpoints. Errors are OSErrors that name the path; a missing one is FileNotFoundError."""

    @property
    def url(self) -> str: ...

    def list(self, folder: str = "") -> list[Entry]:
        """Sorted by name; empty where the folder is not there."""

    def size(self, path: str) -> int: ...

    def read(self, path: str) -> bytes: ...

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        """The bytes first..stop-1 of each span and no others (neighbours may be fetched together).

        A span beyond the end of the file is an EOFError that names the path, the size and the span.
        """

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        """Durable on return; makes folders. `chunks` is called again where writing is tried again."""

    def replace(self, path: str, data: bytes) -> None:
        """Durable on return, and atomic: a reader sees the old content or the new, whole."""

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it; nothing where it is not there."""

    def claim(self, owner: Owner) -> Claim:
        """Raises StoreTaken where another living job has claimed it."""
