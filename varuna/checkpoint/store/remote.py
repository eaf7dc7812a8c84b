"""A store on another machine through fsspec: Google Cloud, Azure, SFTP and others.

write    blocks of one size
replace  one PUT; on file servers, a temporary file and a rename
read     ranges of the file, several at once
"""

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from varuna.checkpoint.store.claim import RecordClaim, disown_record
from varuna.checkpoint.store.spans import check_spans, cut_span, requests_for
from varuna.checkpoint.store.store import MANIFEST, OWN_PREFIX, Buffer, Claim, Entry, Owner, checked

BLOCK_BYTES = 32 << 20
OBJECT_STORES = frozenset({"gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"})
"""A PUT is atomic here, and folders exist only as prefixes of names."""

ERRNO_OF = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    TimeoutError: errno.ETIMEDOUT,
}


def open_remote(url: str) -> "RemoteStore":
    scheme = url.partition("://")[0].lower()
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise ImportError(f"{url} needs a package that is not installed: {error}") from error
    except ValueError:
        raise ValueError(
            f"{url}: fsspec knows no {scheme}://, expected a local path, s3://, gs://, ... "
            f"(install the package that adds {scheme}:// to fsspec, or correct the URL)"
        ) from None
    # fsspec shares instances, with their settings, between all users in the process; this one is separate.
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    return RemoteStore(url, fs, root, scheme=scheme)


class RemoteStore:
    """A folder of an fsspec file system."""

    def __init__(
        self, url: str, fs: Any, root: str, *, scheme: str, now: Callable[[], float] = time.time
    ) -> None:
        self._url = url.rstrip("/")
        self._fs = fs
        self._root = root.rstrip("/")
        self._is_object_store = scheme in OBJECT_STORES
        self._now = now

    @property
    def url(self) -> str:
        return self._url

    def list(self, folder: str = "") -> list[Entry]:
        place = self._place(folder) if folder else self._root
        try:
            with self._errors(folder):
                self._fs.invalidate_cache()
                found = self._fs.ls(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        # fsspec may also list the folder's own marker, or a file as its own content.
        inside = [item for item in found if item["name"].strip("/") != place.strip("/")]
        names = [item["name"].rstrip("/").rpartition("/")[2] for item in inside]
        sizes = [None if item["type"] == "directory" else int(item["size"]) for item in inside]
        entries = [Entry(name, size is None, size or 0) for name, size in zip(names, sizes, strict=True)]
        return sorted((e for e in entries if not e.name.startswith(OWN_PREFIX)), key=lambda e: e.name)

    def size(self, path: str) -> int:
        place = self._place(path)
        with self._errors(path):
            self._fs.invalidate_cache()
            facts = self._fs.info(place)
            if facts["type"] == "directory":
                raise IsADirectoryError(os.strerror(errno.EISDIR))
            return int(facts["size"])

    def read(self, path: str) -> bytes:
        place = self._place(path)
        with self._errors(path):
            self._fs.invalidate_cache()
            return bytes(self._fs.cat_file(place))

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        place = self._place(path)
        check_spans(spans, size=self.size(path), place=self._name(path))
        ranges = requests_for(spans, longest=BLOCK_BYTES)
        if not ranges:
            return [memoryview(b"") for _ in spans]
        firsts, stops = zip(*ranges, strict=True)
        with self._errors(path):
            pieces = self._fs.cat_ranges([place] * len(ranges), list(firsts), list(stops), on_error="return")
            for piece, (first, stop) in zip(pieces, ranges, strict=True):
                if isinstance(piece, BaseException):
                    raise piece
                if len(piece) != stop - first:
                    raise OSError(errno.EIO, f"received {len(piece)} bytes for the range {first}..{stop}")
        return [cut_span(span, ranges, pieces) for span in spans]

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        place = self._place(path)
        self._make_folder(path, place)
        with self._errors(path):
            file = self._fs.open(place, "wb", block_size=BLOCK_BYTES)
        try:
            for piece in _blocks(chunks()):
                with self._errors(path):
                    file.write(piece)
            with self._errors(path):
                file.close()
        except BaseException:
            self._discard(file, place)
            raise

    def replace(self, path: str, data: bytes) -> None:
        place = self._place(path)
        self._make_folder(path, place)
        if self._is_object_store:
            with self._errors(path):
                self._fs.pipe_file(place, data)
            return
        draft = f"{place.rpartition('/')[0]}/{OWN_PREFIX}{secrets.token_hex(8)}"
        with self._errors(path):
            try:
                self._fs.pipe_file(draft, data)
                self._fs.mv(draft, place)
                if self._fs.exists(draft):  # some file servers fail silently
                    raise FileExistsError("this file system cannot rename over an existing file")
            except BaseException:
                with suppress(Exception):
                    self._fs.rm_file(draft)
                raise

    def remove(self, path: str) -> None:
        place = self._place(path)
        with self._errors(path):
            self._fs.invalidate_cache()
            # One at a time: some file systems hide the errors of a bulk removal.
            for file in sorted(self._fs.find(place), key=lambda file: not file.endswith(f"/{MANIFEST}")):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(file)
            if not self._is_object_store and self._fs.exists(place):
                self._fs.rm(place, recursive=True)  # empty folders

    def claim(self, owner: Owner, *, force: bool = False) -> Claim:
        return RecordClaim(self, owner, self._now).take(force=force)

    def disown(self, launch: str = "") -> None:
        disown_record(self, launch)

    def _place(self, path: str) -> str:
        return f"{self._root}/{checked(path)}"

    def _name(self, path: str) -> str:
        return f"{self._url}/{path}".rstrip("/")

    def _make_folder(self, path: str, place: str) -> None:
        if not self._is_object_store:
            with self._errors(path):
                self._fs.makedirs(place.rpartition("/")[0], exist_ok=True)

    def _discard(self, file: Any, place: str) -> None:
        """Drop an unfinished file. Closing it, also by garbage collection, would publish it."""
        with suppress(Exception):
            if isinstance(file, AbstractBufferedFile):
                file.closed = True
                file.discard()
            else:
                file.close()
                self._fs.rm_file(place)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Convert errors of the file system to OSErrors that name the path."""
        try:
            yield
        except Exception as error:
            if found := as_os_error(error, self._name(path)):
                raise found from error
            raise


def _blocks(chunks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Split the chunks at block boundaries, so that the file buffers at most one block."""
    left = BLOCK_BYTES
    for chunk in chunks:
        view = memoryview(chunk)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        while len(flat):
            piece, flat = flat[:left], flat[left:]
            left = left - len(piece) or BLOCK_BYTES
            yield piece


def as_os_error(error: Exception, name: str) -> OSError | None:
    """Return an OSError for an error of the file system; None for an error from elsewhere."""
    if isinstance(error, OSError):
        codes = (code for kind, code in ERRNO_OF.items() if isinstance(error, kind))
        code = error.errno or next(codes, errno.EIO)
        text = error.strerror or str(error)
        return OSError(code, text if " " in text else os.strerror(code), name)  # often only the path
    if type(error).__module__ == "builtins":
        return None
    return OSError(errno.EIO, f"{type(error).__name__}: {error}", name)
