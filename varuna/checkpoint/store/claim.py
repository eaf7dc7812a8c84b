"""Claims: only one job at a time writes to a store.

A local folder is claimed with a file lock, which the kernel releases when the holder dies. Other
stores hold a claim record, which its owner renews every RENEW_SECONDS:

    the next generation of the same managed job    takes the record over
    a holder on this machine that is dead          its record is taken over
    a later run of the same job                    takes over a record older than DEAD_SECONDS
    another job                                    takes over a record older than STALE_SECONDS

S3 writes the record with conditional PUTs, so two jobs cannot claim a store at the same time. Stores
without them can grant two claims at the same instant; the earlier one fails at its next check. So a
claim is checked before each checkpoint.
"""

import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import msgspec

from varuna.checkpoint.store.store import OWN_PREFIX, Claim, Owner, Store, local_folder
from varuna.codec import UNDECODABLE
from varuna.errors import StoreOfOtherJob, StoreTaken

RECORD = OWN_PREFIX + "owner"
NOBODY = "-"  # a token of only these characters belongs to no run
STALE_SECONDS = 15 * 60.0  # a record that was not renewed for this long belongs to a dead job
RENEW_SECONDS = 20.0
DEAD_SECONDS = 3 * RENEW_SECONDS  # a run of this job that has not renewed its record for this long is dead
EARLIER_RUN_SECONDS = 20.0  # a run that was cut off ends within 10 s and releases its folder
EMPTY_SECONDS = 1.0  # a lock with an empty record is being acquired or released
NO_FLOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
WAYS_OUT = "use another store for this job, wait until that job ends, or take the store over with --force"
TAKEN_OVER = "it has taken over, and this run can no longer write there"


class ClaimRecord(msgspec.Struct, frozen=True):
    """The content of a store's claim record."""

    owner: Owner
    renewed: float  # seconds since 1970, by the owner's clock


class ClaimConflict(Exception):
    """Another run has changed the record between a read and a conditional write."""


def blocks_claim(record: ClaimRecord | None, owner: Owner, now: float) -> bool:
    """Return whether the record keeps an owner out of a store without locks."""
    if record is None or (owner.launch and record.owner.launch == owner.launch):
        return False
    holder, age = record.owner, now - record.renewed
    if not holder.since:
        return holder.job != owner.job and age < STALE_SECONDS
    if holder.host == socket.gethostname():
        return runs_since(holder.pid, holder.since)
    if holder.job == owner.job:
        return age < DEAD_SECONDS and bool(holder.token.strip(NOBODY))
    return age < STALE_SECONDS


def runs_since(pid: int, since: float) -> bool:
    """Return whether a process of this machine lives, other than this one, that began before `since`."""
    try:
        began = os.stat(f"/proc/{pid}").st_ctime
    except FileNotFoundError:
        return False
    return pid != os.getpid() and began <= since + 1.0


def taken_error(record: ClaimRecord | None, owner: Owner, *, place: str, advice: str) -> StoreTaken:
    if record is None:
        return StoreTaken(f"{place} is claimed by a run that has not written its name yet; {advice}")
    holder = record.owner
    generation = bool(owner.launch) and holder.launch == owner.launch
    own = generation or holder.job == owner.job
    who = "another run of this job" if own else f"job {holder.job}"
    since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(holder.since)) if holder.since else ""
    launch = f"{holder.launch}, " if holder.launch and holder.launch != holder.job else ""
    where = f"{launch}host {holder.host}, pid {holder.pid}{since}"
    kind = StoreOfOtherJob if owner.launch and not generation else StoreTaken
    taken = kind(f"{place} is claimed by {who} ({where}); {advice}")
    taken.by_this_job, taken.by_this_launch = own, generation
    taken.is_given_up = generation and not holder.token.strip(NOBODY)
    here = holder.host == socket.gethostname()
    taken.runs_here = here and (holder.pid == os.getpid() or runs_since(holder.pid, holder.since))
    return taken


class RecordClaim:
    """A claim through a record in the store."""

    def __init__(self, store: Store, owner: Owner, now: Callable[[], float]) -> None:
        self._store = store
        self._owner = owner
        self._now = now
        self._released = threading.Event()
        self._lock = threading.Lock()  # a read and a conditional write of one thread

    def take(self, *, force: bool = False) -> "RecordClaim":
        while True:
            record = self._read()
            if not force and blocks_claim(record, self._owner, self._now()):
                assert record is not None
                free_at = time.strftime("%H:%M:%S", time.localtime(record.renewed + STALE_SECONDS))
                advice = (
                    f"{WAYS_OUT}; if that job is dead, "
                    f"remove {self._store.url}/{RECORD} or wait until {free_at}"
                )
                raise taken_error(record, self._owner, place=self._store.url, advice=advice)
            with suppress(ClaimConflict):
                self._renew()
                break
        if self._owner.since:
            threading.Thread(target=self._keep, name="varuna-claim", daemon=True).start()
        return self

    def _keep(self) -> None:
        """Renew the record until it is released or taken over; the next check reports a loss."""
        while not self._released.wait(RENEW_SECONDS):
            try:
                with self._lock:
                    if not self._released.is_set():
                        self._check()
            except StoreTaken:
                return
            except OSError:
                pass  # the store may answer again

    def check(self) -> None:
        with self._lock:
            self._check()

    def _check(self) -> None:
        while True:
            record = self._read()
            if record is not None and record.owner.token != self._owner.token:
                raise taken_error(record, self._owner, place=self._store.url, advice=TAKEN_OVER)
            with suppress(ClaimConflict):
                return self._renew()

    def release(self) -> None:
        self._released.set()
        with self._lock:
            self._remove()

    def _remove(self) -> None:
        record = self._read()
        if record is not None and record.owner.token == self._owner.token:
            self._store.remove(RECORD)

    def _read(self) -> ClaimRecord | None:
        try:
            data = self._read_record()
            return msgspec.json.decode(data, type=ClaimRecord) if data else None
        except FileNotFoundError:
            return None
        except UNDECODABLE as error:
            raise StoreTaken(
                f"the claim record {self._store.url}/{RECORD} cannot be read ({error}): "
                "remove it if no job writes there, or use another store"
            ) from None

    def _renew(self) -> None:
        self._write_record(msgspec.json.encode(ClaimRecord(self._owner, self._now())))

    def _read_record(self) -> bytes:
        return self._store.read(RECORD)

    def _write_record(self, data: bytes) -> None:
        self._store.replace(RECORD, data)


def disowned(data: bytes, launch: str) -> bytes | None:
    """Return the record with a token of no run; its job and its length stay the same.

    Returns None for a record of another managed job than `launch`.
    """
    try:
        record = msgspec.json.decode(data, type=ClaimRecord)
    except UNDECODABLE:
        return None
    if launch and record.owner.launch not in ("", launch):
        return None
    owner = msgspec.structs.replace(record.owner, token=NOBODY * len(record.owner.token))
    return msgspec.json.encode(msgspec.structs.replace(record, owner=owner))


def refuse_disowned(store: Store, token: str = "") -> None:
    """Raise StoreTaken if the claim was invalidated, or is no longer that of `token`.

    For the writer process, which holds no claim.
    """
    with suppress(FileNotFoundError, *UNDECODABLE):
        owner = msgspec.json.decode(store.read(RECORD), type=ClaimRecord).owner
        if not owner.token.strip(NOBODY) or (token and owner.token != token):
            raise StoreTaken(
                f"{store.url}: job {owner.job} continues without this run, which can no longer write there"
            )


def disown_record(store: Store, launch: str) -> None:
    with suppress(FileNotFoundError):
        if (data := disowned(store.read(RECORD), launch)) is not None:
            store.replace(RECORD, data)


def disown_folder(folder: str, launch: str) -> None:
    """Change the record in place: with a new file, its holder would assume a cleared folder and claim it."""
    with suppress(FileNotFoundError), open(os.path.join(folder, RECORD), "r+b", buffering=0) as file:
        if (data := disowned(file.readall(), launch)) is not None:
            os.pwrite(file.fileno(), data, 0)


class FolderClaim:
    """A claim on a local folder through flock on the record.

    The kernel drops an flock when the last descriptor of the open file closes, so a killed job frees its
    folder at once. A forked child (a data loader's worker) inherits the descriptor and could outlive its
    parent, so children close it right after the fork; programs that they start never get it (O_CLOEXEC).
    POSIX locks (lockf) do not fit: any read of the record in this process would drop them, and a
    second claim in this process would be granted.

    A shared file system that locks only within each machine (some FUSE mounts) can grant two claims. The
    earlier one then finds the other token at its next check.
    """

    def __init__(self, folder: str, owner: Owner) -> None:
        self._folder = folder
        self._place = os.path.join(folder, RECORD)
        self._owner = owner
        self._fd: int | None = None

    def take(self) -> None:
        deadline = time.monotonic() + EMPTY_SECONDS
        while True:
            try:
                return self._try_to_take()
            except BlockingIOError:
                record = self._read()
                if record is not None or time.monotonic() >= deadline:
                    raise taken_error(record, self._owner, place=self._folder, advice=WAYS_OUT) from None
            time.sleep(0.01)

    def _try_to_take(self) -> None:
        self._fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        HELD_CLAIMS.add(self)
        close_in_children()
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(self._fd)
        except BlockingIOError:
            self._unlock()
            raise
        except OSError as error:
            self._unlock()
            raise OSError(error.errno, error.strerror, self._place) from error

    def take_over(self) -> None:
        """Replace the locked record by a new one. The earlier holder finds it at its next check."""
        draft = f"{self._place}-{self._owner.token}"
        self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        HELD_CLAIMS.add(self)
        close_in_children()
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write(self._fd)
        os.replace(draft, self._place)

    def check(self) -> None:
        if self._fd is None:
            raise self._taken("this process does not hold it: it is a child, or has released the claim")
        if not self._is_in_place(self._fd):  # somebody cleared the folder
            self._unlock()
            self.take()
        elif (record := self._read()) is None:
            self._write(self._fd)
        elif record.owner.token != self._owner.token:
            raise self._taken(TAKEN_OVER)

    def release(self) -> None:
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)
            self._unlock()

    def close_in_child(self) -> None:
        """Close without unlocking: unlocking would also release the parent's lock."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _unlock(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            HELD_CLAIMS.discard(self)
            with suppress(OSError):  # a child that C code forked may hold it, too
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)

    def _is_in_place(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self._place))
        except FileNotFoundError:
            return False

    def _write(self, fd: int) -> None:
        """Write in place, because the lock is on this file."""
        data = msgspec.json.encode(ClaimRecord(self._owner, time.time()))
        os.pwrite(fd, data, 0)
        os.ftruncate(fd, len(data))

    def _read(self) -> ClaimRecord | None:
        """Return None for a missing record and for one that is being written."""
        try:
            with open(self._place, "rb") as file:
                return msgspec.json.decode(file.read(), type=ClaimRecord)
        except (FileNotFoundError, *UNDECODABLE):
            return None

    def _taken(self, advice: str) -> StoreTaken:
        return taken_error(self._read(), self._owner, place=self._folder, advice=advice)


HELD_CLAIMS: set[FolderClaim] = set()  # also keeps a claim that nobody refers to until the process ends


@cache
def close_in_children() -> None:
    """Register the fork hook at the first claim: hooks cannot be removed, and importing sets none."""
    os.register_at_fork(after_in_child=forget_claims)


def forget_claims() -> None:
    for claim in HELD_CLAIMS:
        claim.close_in_child()
    HELD_CLAIMS.clear()


def claim_folder(store: Store, folder: str, owner: Owner, *, force: bool) -> Claim:
    claim = FolderClaim(folder, owner)
    try:
        claim.take()
    except StoreTaken:
        if not force:
            raise
        claim.take_over()
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return RecordClaim(store, owner, time.time).take(force=force)
    return claim


def claim_after_earlier_run(store: Store, owner: Owner, *, force: bool = False, wait: bool = True) -> Claim:
    """Claim the store; wait for an earlier run of the same job that is about to end.

    Without `wait`, do not wait for an earlier generation of the same managed job. Such a generation on a
    machine that is frozen keeps its lock: take the folder over if the manager has given it up, or in the end.
    """
    patience = EARLIER_RUN_SECONDS if local_folder(store.url) else DEAD_SECONDS + RENEW_SECONDS
    deadline = time.monotonic() + patience
    while True:
        try:
            return store.claim(owner, force=force)
        except StoreTaken as taken:
            early = taken.by_this_launch and not wait and not taken.is_given_up
            is_over = time.monotonic() >= deadline
            if force or early or not taken.by_this_job:
                raise
            force = taken.is_given_up or (is_over and taken.by_this_launch and not taken.runs_here)
            if force:
                continue
            if is_over:
                raise
        time.sleep(0.1 if local_folder(store.url) else 1.0)
