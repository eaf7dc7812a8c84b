"""Where checkpoints lie: a local folder, or any other place that fsspec opens.

Paths are relative to the store and written with "/". Nothing here knows what a checkpoint is, but that
a folder's manifest goes first when the folder is removed.

    local.py   a folder, through plain calls of the operating system
    remote.py  an object store or a file server, through fsspec
    retry.py   either of them, tried again while it fails
    claim.py   one job writes to a store at a time
"""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol
from urllib.parse import unquote

import msgspec

Buffer = bytes | bytearray | memoryview

MANIFEST = "manifest.json"  # a folder that holds one is whole, so that it goes first
OWN_PREFIX = ".varuna-"  # names that stores keep for themselves and never list

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


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
        """Sorted by name, as it stands now; empty where the folder is not there."""

    def size(self, path: str) -> int: ...

    def read(self, path: str) -> bytes: ...

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        """The bytes first..stop-1 of each span and no others (neighbours may be fetched together).

        A span beyond the end of the file is an EOFError that names the path, the size and the span.
        """

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        """Durable on return; makes folders; what was there before is gone.

        `chunks` is called again where writing is tried again. A chunk may be reused once the next one
        is asked for. Where writing fails, no part of the file is left behind.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Durable on return, and atomic: a reader sees the old content or the new, whole."""

    def remove(self, path: str) -> None:
        """A file, or a folder with all that is in it, its manifest first; nothing where it is not there."""

    def claim(self, owner: Owner) -> Claim:
        """Raises StoreTaken where another living job has claimed it."""

    def disown(self) -> None:
        """Whoever has claimed it writes nothing there any more: it finds out at its next check."""


def open_store(url: str, *, options: Mapping[str, object] | None = None) -> Store:
    """The store at a local path, a file:// URL, or any URL that fsspec opens (s3://bucket/folder).

    `options` go to fsspec's file system (an endpoint, credentials). A store is used in the process that
    opened it: a forked one opens its own.
    """
    if folder := local_folder(url):
        from varuna.checkpoint.store.local import LocalStore

        if options:
            raise ValueError(f"{url} is a local folder, which takes no options (found {', '.join(options)})")
        return LocalStore(folder)
    from varuna.checkpoint.store.remote import open_remote

    return open_remote(url, options or {})


def retrying(
    store: Store,
    *,
    seconds: float,
    on_wait: Callable[[str], None],
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Store:
    """The same store; what fails is tried again until `seconds` have passed since its first failure.

    `on_wait` is told before each pause what failed and what happens next. Give each rank its own `seed`,
    so that they do not all come back at the same moment.
    """
    from varuna.checkpoint.store.retry import Patience, RetryingStore

    patience = Patience(seconds=seconds, on_wait=on_wait, seed=seed, clock=clock, sleep=sleep)
    return RetryingStore(store, patience)


def local_folder(url: str) -> str | None:
    """The absolute path that a local store stands for; None for a URL that is not local."""
    if not url:
        raise ValueError(
            "a store needs a place: a local folder or a URL such as s3://bucket/folder, found ''"
        )
    scheme = SCHEME.match(url)
    if scheme is None and "://" in url:
        raise ValueError(f"a store's URL starts with one scheme (s3://bucket/folder), found {url!r}")
    if scheme is None:
        return os.path.abspath(os.path.expanduser(url))
    if scheme[1].lower() not in ("file", "local"):
        return None
    path = unquote(url[scheme.end() :])
    if not path.startswith("/"):
        raise ValueError(f"a file:// URL holds an absolute path (file:///data/checkpoints), found {url!r}")
    return os.path.abspath(path)


def checked(path: str) -> str:
    """The path, where it can only lie inside a store."""
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\\" in path or "\0" in path:
        raise ValueError(
            f"a path in a store is relative, written with '/', and has no '..' in it: found {path!r}"
        )
    return path


def check_spans(spans: Sequence[tuple[int, int]], *, size: int, place: str) -> None:
    for first, stop in spans:
        if not 0 <= first <= stop:
            raise ValueError(f"a span runs forward from 0 or later, found {first}..{stop} for {place}")
        if stop > size:
            raise EOFError(f"{place} has {size} bytes, too few for the span {first}..{stop}")
