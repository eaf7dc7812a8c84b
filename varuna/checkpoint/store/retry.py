"""Tries again what a store failed to do, for a while: stores stall, restart and lose connections."""

import errno
import random
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from varuna.checkpoint.store.store import Buffer, Claim, Entry, Owner, Store

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

# What a second attempt would meet again. All other OSErrors may pass.
HOPELESS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)

T = TypeVar("T")


def can_pass(error: OSError) -> bool:
    hopeless = PermissionError | FileNotFoundError | FileExistsError | IsADirectoryError | NotADirectoryError
    return error.errno not in HOPELESS and not isinstance(error, hopeless)


def pause_seconds(failures: int, *, seconds_left: float, jitter: float) -> float:
    """Twice as long after each failure, shortened by up to a half; the last attempt is at the deadline."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_SECONDS)
    return min(longest * (1 - jitter / 2), seconds_left)


class Patience:
    """How long to try, how to wait, and whom to tell."""

    def __init__(
        self,
        *,
        seconds: float,
        on_wait: Callable[[str], None],
        seed: int,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._seconds = seconds
        self._on_wait = on_wait
        self._random = random.Random(seed)
        self._clock = clock
        self._sleep = sleep

    def carry_out(self, doing: str, operation: Callable[[], T]) -> T:
        failures = 0
        first_failure = 0.0
        while True:
            try:
                return operation()
            except OSError as error:
                if not can_pass(error):
                    raise
                now = self._clock()
                failures += 1
                if failures == 1:
                    first_failure = now
                left = first_failure + self._seconds - now
                if left <= 0:
                    raise given_up(error, failures, seconds=now - first_failure) from error
                pause = pause_seconds(failures, seconds_left=left, jitter=self._random.random())
                self._on_wait(
                    f"{doing} failed ({error}): attempt {failures + 1} in {pause:.1f} s, "
                    f"given up in {left:.0f} s"
                )
            self._sleep(pause)


def given_up(error: OSError, failures: int, *, seconds: float) -> OSError:
    reason = error.strerror or str(error) or type(error).__name__
    tries = "tried once" if failures == 1 else f"tried {failures} times over {seconds:.0f} s"
    code = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO)
    return OSError(code, f"{reason} ({tries})", error.filename)


class RetryingStore:
    def __init__(self, store: Store, patience: Patience) -> None:
        self._store = store
        self._patience = patience

    @property
    def url(self) -> str:
        return self._store.url

    def list(self, folder: str = "") -> list[Entry]:
        return self._try("listing", folder, lambda: self._store.list(folder))

    def size(self, path: str) -> int:
        return self._try("asking for the size of", path, lambda: self._store.size(path))

    def read(self, path: str) -> bytes:
        return self._try("reading", path, lambda: self._store.read(path))

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        return self._try("reading", path, lambda: self._store.read_spans(path, spans))

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        self._try("writing", path, lambda: self._store.write(path, chunks))

    def replace(self, path: str, data: bytes) -> None:
        self._try("writing", path, lambda: self._store.replace(path, data))

    def remove(self, path: str) -> None:
        self._try("removing", path, lambda: self._store.remove(path))

    def claim(self, owner: Owner) -> Claim:
        claim = self._try("claiming", "", lambda: self._store.claim(owner))
        return RetryingClaim(claim, self.url, self._patience)

    def disown(self) -> None:
        self._try("disowning", "", self._store.disown)

    def _try(self, doing: str, path: str, operation: Callable[[], T]) -> T:
        return self._patience.carry_out(f"{doing} {self.url}/{path}".rstrip("/"), operation)


class RetryingClaim:
    def __init__(self, claim: Claim, url: str, patience: Patience) -> None:
        self._claim = claim
        self._url = url
        self._patience = patience

    def check(self) -> None:
        self._patience.carry_out(f"checking the claim on {self._url}", self._claim.check)

    def release(self) -> None:
        self._patience.carry_out(f"releasing {self._url}", self._claim.release)
