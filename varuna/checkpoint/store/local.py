"""A store in a local folder, through system calls; writes are durable when they return.

write     new file, its bytes, fsync; then fsync of each folder up to the store's
replace   the same with a temporary name, then a rename over the old file
read      a mapping of the file: views of the page cache, without a copy
"""

import errno
import mmap
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from varuna.checkpoint.store.claim import claim_folder, disown_folder
from varuna.checkpoint.store.spans import check_spans
from varuna.checkpoint.store.store import MANIFEST, OWN_PREFIX, Buffer, Claim, Entry, Owner, checked

SMALL_BYTES = 256 << 10  # a copy of a smaller chunk costs less than a system call
BATCH_BYTES = 4 << 20
SYNC_BYTES = 1 << 30
MADV_POPULATE_READ = 22  # the module mmap has no name for it
OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems that sync folders automatically


class LocalStore:
    """A local folder."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.abspath(folder)

    @property
    def url(self) -> str:
        return self._folder

    def list(self, folder: str = "") -> list[Entry]:
        place = self._place(folder) if folder else self._folder
        entries = []
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as found:
            for item in found:
                with suppress(FileNotFoundError):  # another process may have removed it
                    is_folder = item.is_dir()
                    size = 0 if is_folder else item.stat().st_size
                    entries.append(Entry(name=item.name, is_folder=is_folder, size=size))
        return sorted((e for e in entries if not e.name.startswith(OWN_PREFIX)), key=lambda e: e.name)

    def size(self, path: str) -> int:
        place = self._place(path)
        return size_of_file(os.stat(place), place)

    def read(self, path: str) -> bytes:
        with open(self._place(path), "rb", buffering=0) as file:
            return file.readall()

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        """Return read-only views of one mapping of the file, which lives as long as they do."""
        place = self._place(path)
        fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = size_of_file(os.fstat(fd), place)
            check_spans(spans, size=size, place=place)
            whole = mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b""  # cannot map 0 bytes
        finally:
            os.close(fd)
        if not isinstance(whole, bytes):
            pages = page_runs(spans)
            for first, stop in pages:
                with suppress(OSError):  # requests all pages of a run at once; advice only
                    whole.madvise(mmap.MADV_WILLNEED, first, stop - first)
            for first, stop in pages:
                populate(whole, first, stop - first, place)
        view = memoryview(whole)
        return [view[first:stop] for first, stop in spans]

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        place = self._place(path)
        make_folders(os.path.dirname(place))
        with suppress(FileNotFoundError):
            os.unlink(place)  # another process may have mapped the old file
        create(place, chunks())
        self._sync_folders(place)

    def replace(self, path: str, data: bytes) -> None:
        place = self._place(path)
        folder = os.path.dirname(place)
        make_folders(folder)
        draft = os.path.join(folder, OWN_PREFIX + secrets.token_hex(8))
        create(draft, [data])
        try:
            os.replace(draft, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise
        self._sync_folders(place)

    def remove(self, path: str) -> None:
        remove(self._place(path))

    def claim(self, owner: Owner, *, force: bool = False) -> Claim:
        make_folders(self._folder)
        return claim_folder(self, self._folder, owner, force=force)

    def disown(self, launch: str = "") -> None:
        disown_folder(self._folder, launch)

    def _place(self, path: str) -> str:
        return os.path.join(self._folder, checked(path))

    def _sync_folders(self, place: str) -> None:
        """Sync each folder up to the store's, because another process may have just created them."""
        folder = os.path.dirname(place)
        sync_folder(folder)
        while folder != self._folder:
            folder = os.path.dirname(folder)
            sync_folder(folder)


def page_runs(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans from the start of their first page, joined where they touch or share a page."""
    runs: list[tuple[int, int]] = []
    for first, stop in sorted(span for span in spans if span[1] > span[0]):
        start = first - first % mmap.PAGESIZE
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(stop, runs[-1][1])
        else:
            runs.append((start, stop))
    return runs


def populate(mapping: mmap.mmap, first: int, length: int, place: str) -> None:
    """Read the pages of a mapping. Raises EIO for a bad sector, which would kill this process later."""
    try:
        mapping.madvise(MADV_POPULATE_READ, first, length)
    except OSError as error:
        if error.errno in (errno.EFAULT, errno.EIO):
            raise OSError(errno.EIO, os.strerror(errno.EIO), place) from error
        # Linux before 5.14 does not know this advice.


def size_of_file(facts: os.stat_result, place: str) -> int:
    if stat.S_ISDIR(facts.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place)
    return facts.st_size


def create(place: str, chunks: Iterable[Buffer]) -> None:
    """Create a file whose content, but not yet its name, is durable; remove it after an error."""
    fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_chunks(fd, chunks)
        os.fsync(fd)
    except BaseException as error:
        explained = explain_error(error, fd, place)
        with suppress(OSError):
            os.unlink(place)
        if explained is error:
            raise
        raise explained from error
    finally:
        os.close(fd)


def write_chunks(fd: int, chunks: Iterable[Buffer]) -> None:
    """Write the chunks; small ones are copied together, because their memory may be reused."""
    pending = bytearray()
    unsynced = 0
    for chunk in chunks:
        view = memoryview(chunk)
        unsynced += view.nbytes
        if unsynced >= SYNC_BYTES:  # one long sync at the end would look like a hang on a slow disk
            os.fdatasync(fd)
            unsynced = 0
        if view.nbytes < SMALL_BYTES:
            pending += view.tobytes() if view.ndim != 1 or view.format != "B" else view
            if len(pending) < BATCH_BYTES:
                continue
            view = memoryview(b"")
        write_all(fd, [memoryview(pending), view.cast("B")])
        pending = bytearray()
    write_all(fd, [memoryview(pending)])


def write_all(fd: int, views: list[memoryview]) -> None:
    views = [view for view in views if len(view)]
    while views:
        done = os.writev(fd, views)
        while views and done >= len(views[0]):
            done -= len(views.pop(0))
        if views:
            views[0] = views[0][done:]


def explain_error(error: BaseException, fd: int, place: str) -> BaseException:
    """Return the error with the path; if the disk is full, also with the written and free bytes."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return error
    message = os.strerror(error.errno)
    if error.errno in OUT_OF_SPACE:
        disk = os.fstatvfs(fd)
        free = disk.f_bavail * disk.f_frsize
        message += (
            f" after {os.fstat(fd).st_size} bytes of this file, with {free} bytes free on its file system "
            "(free some space, keep fewer checkpoints, or save to another store)"
        )
    return OSError(error.errno, message, place)


def make_folders(folder: str) -> None:
    """Create the missing folders of a path, durably."""
    if os.path.isdir(folder):
        return
    make_folders(os.path.dirname(folder))
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(os.path.dirname(folder))


def sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise OSError(error.errno, error.strerror, folder) from error
    finally:
        os.close(fd)


def remove(place: str) -> None:
    """Remove a file or folder; the manifest first, so that a folder looks incomplete after a crash."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(place).st_mode):
            os.unlink(place)
            return
        manifest = os.path.join(place, MANIFEST)
        if os.path.lexists(manifest):
            remove(manifest)
            sync_folder(place)
        for name in os.listdir(place):
            remove(os.path.join(place, name))
        os.rmdir(place)
