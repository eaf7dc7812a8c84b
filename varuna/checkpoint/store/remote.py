"""A store on another machine: an object store (s3://) or a file server, through fsspec.

write     blocks of one size, each on its way before the next is gathered
replace   one PUT; where a PUT can be seen half done, a name of our own and a rename
read      ranges of the file, near ones together, several at once
"""

import asyncio
import errno
import os
import secrets
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import fsspec
import fsspec.asyn
from fsspec.spec import AbstractBufferedFile

from varuna.checkpoint.store.claim import claim_by_record, disown_by_record
from varuna.checkpoint.store.store import (
    MANIFEST,
    OWN_PREFIX,
    Buffer,
    Claim,
    Entry,
    Owner,
    check_spans,
    checked,
)

BLOCK_BYTES = 32 << 20  # S3 takes at most 10,000 blocks for a file, of at least 5 MiB each
GAP_BYTES = 256 << 10  # reading so much in vain costs less than another request

# What these are given in one piece appears in one piece, and their folders are only names.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"})

S3 = ("s3", "s3a")
# One request of S3 is tried thrice; whole operations are tried again by `retrying`, which says so.
S3_PATIENCE = {
    "connect_timeout": 5,
    "read_timeout": 30,
    "retries": {"mode": "standard", "total_max_attempts": 3},
}

ERRNO_OF = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}


def open_remote(url: str, options: Mapping[str, object]) -> "RemoteStore":
    scheme = url.partition("://")[0].lower()
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = " (pip install 'varuna-torch[s3]')" if scheme in S3 else ""
        raise ImportError(f"{url} needs a package that is not installed: {error}{extra}") from error
    except ValueError:
        raise ValueError(
            f"{url}: fsspec knows no {scheme}://, expected a local path, s3://, gs://, ... "
            f"(install the package that brings {scheme}:// to fsspec, or mend the URL)"
        ) from None
    # An instance of our own: fsspec would otherwise share one, and its settings, with all users of it.
    if scheme in S3:
        fs, root = open_s3(url, options)
    else:
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    return RemoteStore(url, fs, root, scheme=scheme)


def open_s3(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    config = {**S3_PATIENCE, **options.get("config_kwargs", {})}
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **{**options, "config_kwargs": config})
    fs.retries = 1
    limit_requests(fs, seconds=4 * config["read_timeout"])
    return fs, root


def limit_requests(fs: Any, *, seconds: float) -> None:
    """Ends a request of S3 that a stalled server neither takes nor answers.

    The client's own timeouts begin when a request has been sent; until then it waits for ever.
    """
    unlimited = fs._call_s3

    async def limited(*arguments: Any, **keywords: Any) -> Any:
        async with asyncio.timeout(seconds):
            return await unlimited(*arguments, **keywords)

    fs._call_s3 = limited
    fs.call_s3 = partial(fsspec.asyn.sync, fs.loop, limited)


class RemoteStore:
    def __init__(
        self,
        url: str,
        fs: Any,
        root: str,
        *,
        scheme: str,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._url = url.rstrip("/")
        self._fs = fs
        self._root = root.rstrip("/")
        self._is_object_store = scheme in OBJECT_STORES
        self.block_bytes = BLOCK_BYTES
        self._now = now

    @property
    def url(self) -> str:
        return self._url

    def list(self, folder: str = "") -> list[Entry]:
        place = self._place(folder) if folder else self._root
        try:
            with self._naming(folder):
                self._fs.invalidate_cache()
                found = self._fs.ls(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # A folder's own marker, and a file that is listed as itself, are not in the folder.
        inside = [item for item in found if item["name"].strip("/") != place.strip("/")]
        entries = [entry_of(item) for item in inside]
        return sorted((e for e in entries if not e.name.startswith(OWN_PREFIX)), key=lambda e: e.name)

    def size(self, path: str) -> int:
        place = self._place(path)
        with self._naming(path):
            self._fs.invalidate_cache()
            facts = self._fs.info(place)
            if facts["type"] == "directory":
                raise IsADirectoryError(os.strerror(errno.EISDIR))
            return int(facts["size"])

    def read(self, path: str) -> bytes:
        place = self._place(path)
        with self._naming(path):
            self._fs.invalidate_cache()
            return bytes(self._fs.cat_file(place))

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        place = self._place(path)
        check_spans(spans, size=self.size(path), place=self._name(path))
        ranges = cut(together(spans, gap=GAP_BYTES), longest=self.block_bytes)
        if not ranges:
            return [memoryview(b"") for _ in spans]
        firsts, stops = zip(*ranges, strict=True)
        with self._naming(path):
            pieces = self._fs.cat_ranges([place] * len(ranges), list(firsts), list(stops), on_error="return")
            for piece, (first, stop) in zip(pieces, ranges, strict=True):
                if isinstance(piece, BaseException):
                    raise piece
                if len(piece) != stop - first:
                    raise OSError(errno.EIO, f"{len(piece)} bytes came for the range {first}..{stop}")
        return [assemble(span, ranges, pieces) for span in spans]

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        place = self._place(path)
        self._make_folder(path, place)
        with self._naming(path):
            file = self._fs.open(place, "wb", block_size=self.block_bytes)
        try:
            for piece in in_blocks(chunks(), self.block_bytes):
                with self._naming(path):
                    file.write(piece)
            with self._naming(path):
                file.close()
        except BaseException:
            self._abandon(file, place)
            raise

    def replace(self, path: str, data: bytes) -> None:
        place = self._place(path)
        self._make_folder(path, place)
        if self._is_object_store:
            with self._naming(path):
                self._fs.pipe_file(place, data)
            return
        draft = f"{place.rpartition('/')[0]}/{OWN_PREFIX}{secrets.token_hex(8)}"
        with self._naming(path):
            try:
                self._fs.pipe_file(draft, data)
                self._fs.mv(draft, place)
                if self._fs.exists(draft):  # some file servers say nothing and leave both as they are
                    raise FileExistsError("this file system does not rename over a file")
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(draft)
                raise

    def remove(self, path: str) -> None:
        place = self._place(path)
        with self._naming(path):
            self._fs.invalidate_cache()
            # One by one: removing many at once, S3's file system keeps quiet about those that stay.
            for file in sorted(self._fs.find(place), key=lambda file: not file.endswith(f"/{MANIFEST}")):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(file)
            if not self._is_object_store and self._fs.exists(place):
                self._fs.rm(place, recursive=True)  # empty folders

    def claim(self, owner: Owner) -> Claim:
        return claim_by_record(self, owner, self._now)

    def disown(self) -> None:
        disown_by_record(self)

    def _place(self, path: str) -> str:
        return f"{self._root}/{checked(path)}"

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}".rstrip("/")

    def _make_folder(self, path: str, place: str) -> None:
        if not self._is_object_store:
            with self._naming(path):
                self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)

    def _abandon(self, file: Any, place: str) -> None:
        """Closing, which also happens when Python collects it, would publish what there is of the file."""
        with suppress(Exception):
            if isinstance(file, AbstractBufferedFile):
                file.closed = True
                file.discard()
            else:
                file.close()
                self._fs.rm_file(place)

    @contextmanager
    def _naming(self, path: str) -> Iterator[None]:
        """Every failure of the store leaves here as an OSError that names the path."""
        try:
            yield
        except Exception as error:
            if told := as_os_error(error, self._name(path)):
                raise told from error
            raise


def entry_of(item: Mapping[str, Any]) -> Entry:
    is_folder = item["type"] == "directory"
    name = item["name"].rstrip("/").rpartition("/")[2]
    return Entry(name=name, is_folder=is_folder, size=0 if is_folder else int(item["size"]))


def together(spans: Iterable[tuple[int, int]], *, gap: int) -> list[tuple[int, int]]:
    """The ranges that cover all spans, with those joined between which there is no more than a gap."""
    ranges: list[tuple[int, int]] = []
    for first, stop in sorted(span for span in spans if span[0] < span[1]):
        if ranges and first - ranges[-1][1] <= gap:
            ranges[-1] = (ranges[-1][0], max(stop, ranges[-1][1]))
        else:
            ranges.append((first, stop))
    return ranges


def cut(ranges: Iterable[tuple[int, int]], *, longest: int) -> list[tuple[int, int]]:
    """The same bytes in ranges that are short enough to come side by side."""
    return [piece for first, stop in ranges for piece in pairwise([*range(first, stop, longest), stop])]


def assemble(span: tuple[int, int], ranges: Sequence[tuple[int, int]], pieces: Sequence[bytes]) -> memoryview:
    """A span's bytes out of the pieces that were fetched: a view of one, where one holds it all."""
    first, stop = span
    if first == stop:
        return memoryview(b"")
    begin = bisect_right(ranges, first, key=lambda piece: piece[0]) - 1
    end = bisect_left(ranges, stop, key=lambda piece: piece[0])
    views = [
        memoryview(piece)[max(first - start, 0) : stop - start]
        for (start, _), piece in zip(ranges[begin:end], pieces[begin:end], strict=True)
    ]
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


def in_blocks(chunks: Iterable[Buffer], block_bytes: int) -> Iterator[memoryview]:
    """The same bytes, cut where a block is full, so that no file gathers more than one."""
    room = block_bytes
    for chunk in chunks:
        view = memoryview(chunk)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        while len(flat):
            piece, flat = flat[:room], flat[room:]
            room = room - len(piece) or block_bytes
            yield piece


def as_os_error(error: Exception, name: str) -> OSError | None:
    """The OSError that tells a store's failure; None for what is not the store's."""
    if isinstance(error, OSError):
        kinds = (code for kind, code in ERRNO_OF.items() if isinstance(error, kind))
        code = errno.EIO if lost_upload(error) else error.errno or next(kinds, errno.EIO)
        said = error.strerror or str(error)
        # Often nothing but the path is said.
        return OSError(code, said if " " in said else os.strerror(code), name)
    if type(error).__module__ == "builtins":
        return None
    told = f"{type(error).__name__}: {error}"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return PermissionError(errno.EACCES, f"{told} (give them by environment, profile or options)", name)
    return OSError(errno.EIO, told, name)


def lost_upload(error: OSError) -> bool:
    """S3 forgot the blocks sent so far: as if the file was not found, though sending again helps."""
    response = getattr(error.__cause__, "response", None) or {}
    return bool(response.get("Error", {}).get("Code") == "NoSuchUpload")
