"""Stores for checkpoints: a local folder, an S3 bucket, or any URL that fsspec opens.

Paths are relative to the store and use "/". A store does not know the checkpoint format. It only
removes the manifest of a folder before the other files.

    local.py   a folder, through system calls
    s3.py      an S3 bucket, through obstore
    remote.py  other object stores and file servers, through fsspec
    retry.py   a store that retries failed operations
    claim.py   the right of one job to write to a store
"""

import os
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from urllib.parse import unquote

import msgspec

Buffer = bytes | bytearray | memoryview

MANIFEST = "manifest.json"
OWN_PREFIX = ".varuna-"  # names for internal use, never listed
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Entry(msgspec.Struct, frozen=True):
    """A file or folder in a listing."""

    name: str
    is_folder: bool
    size: int  # bytes; 0 for a folder


class Owner(msgspec.Struct, frozen=True):
    """A run of a job that writes to a store."""

    job: str  # stays the same when a job resumes, on any machine
    token: str  # unique to this run
    host: str
    pid: int
    since: float = 0.0  # seconds since 1970; 0: the claim is not renewed by itself
    launch: str = ""  # id of the managed job, the same for all its generations


class Claim(Protocol):
    """The right to write to a store, until it is released or the process ends."""

    def check(self) -> None:
        """Raise StoreTaken if another run has taken over."""

    def release(self) -> None: ...


class Store(Protocol):
    """A place for checkpoints.

    All errors are OSErrors that name the path. A missing path raises FileNotFoundError.
    """

    @property
    def url(self) -> str: ...

    def list(self, folder: str = "") -> list[Entry]:
        """Return the current entries, sorted by name; an empty list if the folder does not exist."""

    def size(self, path: str) -> int: ...

    def read(self, path: str) -> bytes: ...

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        """Return the bytes [first, stop) of each span.

        Raises EOFError with the path, the size and the span if a span ends after the end of the file.
        """

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        """Write a file durably, create its folders, and replace an existing file.

        A retry calls `chunks` again. The memory of a chunk may be reused after the next chunk is
        requested. A failed write leaves no file.
        """

    def replace(self, path: str, data: bytes) -> None:
        """Write a file durably and atomically: a reader sees the old content or the new content."""

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with its content (manifest first); do nothing if it is missing."""

    def claim(self, owner: Owner, *, force: bool = False) -> Claim:
        """Return the claim. Raises StoreTaken if another running job holds it; `force` takes it over."""

    def disown(self, launch: str = "") -> None:
        """Invalidate the current claim: its holder stops writing at its next check.

        With `launch`, only a claim of that managed job.
        """


def open_store(url: str) -> Store:
    """Open the store at a local path, a file:// URL, s3://bucket/folder, or a URL that fsspec opens.

    Use a store only in the process that opened it. A forked process must open its own.
    """
    if folder := local_folder(url):
        from varuna.checkpoint.store.local import LocalStore

        return LocalStore(folder)
    if url.partition("://")[0].lower() in ("s3", "s3a"):
        from varuna.checkpoint.store.s3 import S3Store

        return S3Store(url)
    from varuna.checkpoint.store.remote import open_remote

    return open_remote(url)


def retrying(
    store: Store,
    *,
    seconds: float,
    on_wait: Callable[[str], None],
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Store:
    """Return the store with retries: a failed operation runs again until `seconds` after its first failure.

    `on_wait` receives a message before each pause. Give each rank a different `seed`, so that ranks do
    not retry at the same moment.
    """
    from varuna.checkpoint.store.retry import RetryingStore, RetryPolicy

    return RetryingStore(store, RetryPolicy(seconds, on_wait, random.Random(seed), clock, sleep))


def local_folder(url: str) -> str | None:
    """Return the absolute path of a local store, or None for a remote URL."""
    if not url:
        raise ValueError("the store is empty: expected a local folder or a URL such as s3://bucket/folder")
    scheme = SCHEME.match(url)
    if scheme is None and "://" in url:
        raise ValueError(f"a store's URL must start with one scheme (s3://bucket/folder), found {url!r}")
    if scheme is None:
        return os.path.abspath(os.path.expanduser(url))
    if scheme[1].lower() not in ("file", "local"):
        return None
    path = unquote(url[scheme.end() :])
    if not path.startswith("/"):
        raise ValueError(f"a file:// URL needs an absolute path (file:///data/checkpoints), found {url!r}")
    return os.path.abspath(path)


def checked(path: str) -> str:
    """Return the path. Raises ValueError if it could point outside of the store."""
    parts = path.split("/")
    if not all(parts) or {".", ".."} & set(parts) or "\\" in path or "\0" in path:
        raise ValueError(f"a path in a store must be relative, with '/' and without '..': found {path!r}")
    return path
