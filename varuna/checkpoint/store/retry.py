"""A store that retries failed operations for some time: stores stall, restart and lose connections."""

import errno
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from varuna.checkpoint.store.store import Buffer, Claim, Entry, Owner, Store

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0

PERMANENT = PermissionError | FileNotFoundError | FileExistsError | IsADirectoryError | NotADirectoryError
PERMANENT_CODES = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP
"""A retry would meet these errors again. All other OSErrors are retried."""

Result = TypeVar("Result")


def pause_seconds(failures: int, *, seconds_left: float, jitter: float) -> float:
    """Double after each failure, minus up to half as jitter; the last attempt runs at the deadline."""
    longest = min(FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 10), LONGEST_PAUSE_SECONDS)
    return min(longest * (1 - jitter / 2), seconds_left)


@dataclass
class RetryPolicy:
    """Total retry time, pauses, and the function that receives a message before each pause."""

    seconds: float
    on_wait: Callable[[str], None]
    jitter: random.Random
    clock: Callable[[], float]
    sleep: Callable[[float], None]

    def run(self, description: str, operation: Callable[[], Result]) -> Result:
        failures = 0
        first_failure = 0.0
        while True:
            try:
                return operation()
            except OSError as error:
                if isinstance(error, PERMANENT) or error.errno in PERMANENT_CODES:
                    raise
                now = self.clock()
                failures += 1
                if failures == 1:
                    first_failure = now
                left = first_failure + self.seconds - now
                if left <= 0:
                    raise final_error(error, failures, seconds=now - first_failure) from error
                pause = pause_seconds(failures, seconds_left=left, jitter=self.jitter.random())
                self.on_wait(
                    f"{description} failed ({error}): attempt {failures + 1} starts in {pause:.1f} s, "
                    f"retries end in {left:.0f} s"
                )
            self.sleep(pause)


def final_error(error: OSError, failures: int, *, seconds: float) -> OSError:
    reason = error.strerror or str(error) or type(error).__name__
    tries = "tried once" if failures == 1 else f"tried {failures} times over {seconds:.0f} s"
    code = error.errno or (errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO)
    return OSError(code, f"{reason} ({tries})", error.filename)


class RetryingStore:
    """A store whose operations run under a retry policy."""

    def __init__(self, store: Store, policy: RetryPolicy) -> None:
        self._store = store
        self._policy = policy

    @property
    def url(self) -> str:
        return self._store.url

    def list(self, folder: str = "") -> list[Entry]:
        return self._run("listing", folder, lambda: self._store.list(folder))

    def size(self, path: str) -> int:
        return self._run("reading the size of", path, lambda: self._store.size(path))

    def read(self, path: str) -> bytes:
        return self._run("reading", path, lambda: self._store.read(path))

    def read_spans(self, path: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview]:
        return self._run("reading", path, lambda: self._store.read_spans(path, spans))

    def write(self, path: str, chunks: Callable[[], Iterable[Buffer]]) -> None:
        self._run("writing", path, lambda: self._store.write(path, chunks))

    def replace(self, path: str, data: bytes) -> None:
        self._run("writing", path, lambda: self._store.replace(path, data))

    def remove(self, path: str) -> None:
        self._run("removing", path, lambda: self._store.remove(path))

    def claim(self, owner: Owner, *, force: bool = False) -> Claim:
        claim = self._run("claiming", "", lambda: self._store.claim(owner, force=force))
        return RetryingClaim(claim, self.url, self._policy)

    def disown(self, launch: str = "") -> None:
        self._run("disowning", "", lambda: self._store.disown(launch))

    def _run(self, verb: str, path: str, operation: Callable[[], Result]) -> Result:
        return self._policy.run(f"{verb} {self.url}/{path}".rstrip("/"), operation)


class RetryingClaim:
    """A claim whose operations run under a retry policy."""

    def __init__(self, claim: Claim, url: str, policy: RetryPolicy) -> None:
        self._claim = claim
        self._url = url
        self._policy = policy

    def check(self) -> None:
        self._policy.run(f"checking the claim on {self._url}", self._claim.check)

    def release(self) -> None:
        self._policy.run(f"releasing {self._url}", self._claim.release)
