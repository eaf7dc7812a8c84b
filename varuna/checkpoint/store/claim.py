"""One job writes to a store at a time.

A local folder is claimed with a lock that the kernel lets go when its holder dies. Elsewhere a record
stands for the claim: of this very job it is taken over, a foreign one is waited for until it is old.

The record is no lock: of two jobs that start in the same instant both may believe in their claim, until
the next check of one of them finds the other's token. So a claim is checked before each checkpoint.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import msgspec

from varuna.checkpoint.store.store import OWN_PREFIX, Claim, Owner, Store
from varuna.errors import StoreTaken

RECORD = OWN_PREFIX + "owner"
NOBODY = "-"  # repeated, the token of no owner
STALE_SECONDS = 15 * 60.0  # a record that nobody renewed for so long belongs to a dead job
NAMELESS_SECONDS = 1.0  # a lock whose record is empty is being taken or released just now
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class Record(msgspec.Struct, frozen=True):
    """What a store says about who writes to it."""

    owner: Owner
    renewed: float  # seconds since 1970, by the owner's clock


def in_the_way(record: Record | None, owner: Owner, now: float) -> Record | None:
    """The record that keeps an owner out of a store without locks, if it does."""
    if record is None or record.owner.job == owner.job or now - record.renewed >= STALE_SECONDS:
        return None
    return record


def refusal(record: Record | None, owner: Owner, *, place: str, way_out: str) -> StoreTaken:
    if record is None:
        return StoreTaken(f"{place} is claimed by a run that has not written its name yet; {way_out}")
    holder = record.owner
    own = holder.job == owner.job
    who = "another run of this job" if own else f"job {holder.job}"
    taken = StoreTaken(f"{place} is claimed by {who} (host {holder.host}, pid {holder.pid}); {way_out}")
    taken.by_this_job = own
    return taken


class RecordClaim:
    """Holds a store through a record in it."""

    def __init__(self, store: Store, owner: Owner, now: Callable[[], float]) -> None:
        self._store = store
        self._owner = owner
        self._now = now

    def take(self) -> None:
        if record := in_the_way(self._read(), self._owner, self._now()):
            free_at = time.strftime("%H:%M:%S", time.localtime(record.renewed + STALE_SECONDS))
            way_out = (
                "give this job a place of its own, or wait until that one ends; if it is dead, remove "
                f"{self._store.url}/{RECORD} or wait until {free_at}"
            )
            raise refusal(record, self._owner, place=self._store.url, way_out=way_out)
        self._renew()

    def check(self) -> None:
        record = self._read()
        if record is not None and record.owner.token != self._owner.token:
            way_out = "it has taken over, and this run writes nothing there any more"
            raise refusal(record, self._owner, place=self._store.url, way_out=way_out)
        self._renew()

    def release(self) -> None:
        record = self._read()
        if record is not None and record.owner.token == self._owner.token:
            self._store.remove(RECORD)

    def _read(self) -> Record | None:
        try:
            data = self._store.read(RECORD)
            return msgspec.json.decode(data, type=Record) if data else None
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise StoreTaken(
                f"{self._store.url}/{RECORD} should say which job writes there and cannot be read ({error}): "
                "remove it if no job does, or give this job another place"
            ) from None

    def _renew(self) -> None:
        self._store.replace(RECORD, msgspec.json.encode(Record(self._owner, self._now())))


def claim_by_record(store: Store, owner: Owner, now: Callable[[], float]) -> Claim:
    claim = RecordClaim(store, owner, now)
    claim.take()
    return claim


def disowned(data: bytes) -> bytes | None:
    """The record as nobody's, though of the same job and as long as it was."""
    try:
        record = msgspec.json.decode(data, type=Record)
    except msgspec.DecodeError:
        return None
    owner = msgspec.structs.replace(record.owner, token=NOBODY * len(record.owner.token))
    return msgspec.json.encode(msgspec.structs.replace(record, owner=owner))


def refuse_disowned(store: Store) -> None:
    """For a process that saves in the background: the claim is its trainer's."""
    with suppress(FileNotFoundError, msgspec.DecodeError):
        owner = msgspec.json.decode(store.read(RECORD), type=Record).owner
        if not owner.token.strip(NOBODY):
            raise StoreTaken(f"{store.url}: job {owner.job} goes on without this run, which writes no more")


def disown_by_record(store: Store) -> None:
    with suppress(FileNotFoundError):
        if (data := disowned(store.read(RECORD))) is not None:
            store.replace(RECORD, data)


def disown_folder(folder: str) -> None:
    """In place: a holder takes a new file for a folder that was cleared, and claims it again."""
    with suppress(FileNotFoundError), open(os.path.join(folder, RECORD), "r+b", buffering=0) as file:
        if (data := disowned(file.readall())) is not None:
            os.pwrite(file.fileno(), data, 0)


class FolderClaim:
    """Holds a local folder through flock on the record.

    flock belongs to the open file: it goes when the last descriptor of it is closed, so a killed job
    frees its folder at once. A forked child would keep such a descriptor and, living longer than its
    parent (a data loader's worker), the lock: children close theirs as they are born, and programs that
    they start never get it (O_CLOEXEC). POSIX locks (lockf) are not inherited at all, but any read of
    the record by this process would drop them, and a second claim in this process would be granted.

    A file system that is shared but locks on each machine for itself (some FUSE mounts) grants two
    claims; the earlier one then finds the other's token at its next check.
    """

    def __init__(self, folder: str, owner: Owner) -> None:
        self._folder = folder
        self._place = os.path.join(folder, RECORD)
        self._owner = owner
        self._fd: int | None = None

    def take(self) -> None:
        deadline = time.monotonic() + NAMELESS_SECONDS
        while True:
            try:
                return self._try_to_take()
            except BlockingIOError:
                record = self._read()
                if record is not None or time.monotonic() >= deadline:
                    way_out = "give this job a folder of its own, or wait until that one ends"
                    raise refusal(record, self._owner, place=self._folder, way_out=way_out) from None
            time.sleep(0.01)

    def _try_to_take(self) -> None:
        self._fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        HELD.add(self)
        close_in_children()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(self._fd)
        except BlockingIOError:
            self._let_go()
            raise
        except OSError as error:
            self._let_go()
            raise OSError(error.errno, error.strerror, self._place) from error

    def check(self) -> None:
        if self._fd is None:
            raise self._refused("this process does not hold it: it is a child, or has released it")
        if not self._is_in_place(self._fd):  # somebody cleared the folder
            self._let_go()
            self.take()
        elif (record := self._read()) is None:
            self._write(self._fd)
        elif record.owner.token != self._owner.token:
            raise self._refused("it has taken over, and this run writes nothing there any more")

    def release(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            self._let_go()

    def close_in_child(self) -> None:
        """Closing leaves the parent's lock alone; unlocking would not."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _let_go(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            HELD.discard(self)
            with suppress(OSError):  # a child that C code forked may hold it too
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._place))
        except FileNotFoundError:
            return False

    def _write(self, fd: int) -> None:
        """In place, since the lock is on this very file."""
        data = msgspec.json.encode(Record(self._owner, time.time()))
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))

    def _read(self) -> Record | None:
        """None also for one that is being written just now."""
        try:
            with open(self._place, "rb") as file:
                return msgspec.json.decode(file.read(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _refused(self, way_out: str) -> StoreTaken:
        return refusal(self._read(), self._owner, place=self._folder, way_out=way_out)


HELD: set[FolderClaim] = set()  # also keeps a forgotten claim until this process ends


@cache
def close_in_children() -> None:
    """Once per process, at its first claim: a hook cannot be taken back, and importing sets none."""
    os.register_at_fork(after_in_child=forget_claims)


def forget_claims() -> None:
    for claim in HELD:
        claim.close_in_child()
    HELD.clear()


def claim_folder(store: Store, folder: str, owner: Owner) -> Claim:
    claim = FolderClaim(folder, owner)
    try:
        claim.take()
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return claim_by_record(store, owner, time.time)
    return claim
