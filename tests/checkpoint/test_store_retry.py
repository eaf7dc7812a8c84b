"""Patience: what is tried again and for how long, how old a foreign claim must be. No time passes here."""

import errno
import os
import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import fsspec
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.checkpoint.store import claim as claim_module
from varuna.checkpoint.store.claim import DEAD_SECONDS, RECORD, STALE_SECONDS, ClaimRecord, blocks_claim
from varuna.checkpoint.store.remote import RemoteStore
from varuna.checkpoint.store.retry import LONGEST_PAUSE_SECONDS, pause_seconds
from varuna.checkpoint.store.store import Buffer, Owner, open_store, retrying
from varuna.errors import StoreTaken

MINE = Owner(job="mine", token="1", host="here", pid=1)
OTHER = Owner(job="other", token="2", host="there", pid=2)


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def chunks_that_fail(errors: Iterable[Exception], calls: list[int]) -> Callable[[], Iterator[Buffer]]:
    """The content of a file, after each of the errors has been raised once, one a call."""
    left = iter(errors)

    def chunks() -> Iterator[Buffer]:
        calls.append(len(calls))
        yield b"abc"
        if error := next(left, None):
            raise error

    return chunks


def attempt(errors: list[Exception], *, seconds: float) -> tuple[list[int], Clock, list[str]]:
    """Write with these failures; return the attempts, the clock and the messages."""
    clock, messages, calls = Clock(), [], []
    store = retrying(
        open_store(f"memory://{secrets.token_hex(8)}"),
        seconds=seconds,
        on_wait=messages.append,
        clock=clock,
        sleep=clock.sleep,
    )
    store.write("part", chunks_that_fail(errors, calls))
    assert store.read("part") == b"abc"
    return calls, clock, messages


def test_what_fails_for_a_while_is_tried_again_with_growing_pauses() -> None:
    calls, clock, messages = attempt([ConnectionResetError(errno.ECONNRESET, "reset")] * 5, seconds=60)
    assert len(calls) == 6
    assert len(clock.pauses) == len(messages) == 5
    assert clock.pauses[4] > 4 * clock.pauses[0]
    assert (
        "writing memory://" in messages[0] and "reset" in messages[0] and "attempt 2 starts in" in messages[0]
    )


@settings(deadline=None, max_examples=30)
@given(
    arguments=st.sampled_from([(errno.EIO, "lost"), (errno.ETIMEDOUT, "late"), ("no number",)]),
    seconds=st.floats(0.1, 1000),
)
def test_what_does_not_get_better_is_given_up_at_the_deadline_and_not_before(
    arguments: tuple[Any, ...], seconds: float
) -> None:
    clock = Clock()
    store = retrying(
        open_store("memory://nowhere"),
        seconds=seconds,
        on_wait=lambda message: None,
        clock=clock,
        sleep=clock.sleep,
    )
    calls: list[int] = []
    with pytest.raises(OSError, match=rf"{arguments[-1]} \(tried \d+ times over {seconds:.0f} s\)") as caught:
        store.write("part", chunks_that_fail((OSError(*arguments) for _ in count()), calls))
    assert clock.now == pytest.approx(1000 + seconds)
    assert f"tried {len(calls)} times" in str(caught.value)
    assert caught.value.errno == (arguments[0] if len(arguments) == 2 else errno.EIO)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "full"),
        OSError(errno.EROFS, "read-only"),
        OSError(errno.EFBIG, "too large"),
        PermissionError(errno.EACCES, "no"),
        PermissionError("without a number"),
        FileNotFoundError(errno.ENOENT, "gone"),
        ValueError("wrong"),
        KeyError("not the store's"),
    ],
    ids=repr,
)
def test_what_cannot_get_better_is_raised_at_once_as_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        attempt([error], seconds=1e9)
    assert caught.value is error


def test_two_seeds_wait_differently_and_one_seed_always_the_same() -> None:
    def pauses(seed: int) -> list[float]:
        clock = Clock()
        store = retrying(
            open_store("memory://nowhere"),
            seconds=60,
            on_wait=lambda message: None,
            seed=seed,
            clock=clock,
            sleep=clock.sleep,
        )
        store.write("part", chunks_that_fail([TimeoutError()] * 5, []))
        return clock.pauses

    assert pauses(1) == pauses(1) != pauses(2)


@settings(deadline=None)
@given(failures=st.integers(1, 10**6), left=st.floats(0, 1e6), jitter=st.floats(0, 1, exclude_max=True))
def test_a_pause_is_never_long_and_never_beyond_the_deadline(
    failures: int, left: float, jitter: float
) -> None:
    pause = pause_seconds(failures, seconds_left=left, jitter=jitter)
    assert 0 <= pause <= min(left, LONGEST_PAUSE_SECONDS)


# Claims by record.


def remote(clock: Clock, place: str) -> RemoteStore:
    return RemoteStore(f"memory://{place}", fsspec.filesystem("memory"), place, scheme="memory", now=clock)


def test_a_foreign_record_refuses_until_it_is_old_and_a_check_keeps_it_young() -> None:
    clock = Clock()
    store = remote(clock, secrets.token_hex(8))
    mine = store.claim(MINE)
    clock.now += STALE_SECONDS - 1
    with pytest.raises(StoreTaken, match=r"job mine \(host here, pid 1\).*remove memory://.*owner or wait"):
        store.claim(OTHER)
    mine.check()
    clock.now += STALE_SECONDS - 1
    with pytest.raises(StoreTaken):
        store.claim(OTHER)
    clock.now += 1
    other = store.claim(OTHER)
    with pytest.raises(StoreTaken, match=r"job other .*has taken over"):
        mine.check()
    mine.release()
    other.check()


def test_a_removed_record_is_written_again_and_an_unreadable_one_is_an_error() -> None:
    store = remote(Clock(), secrets.token_hex(8))
    mine = store.claim(MINE)
    store.remove(RECORD)
    mine.check()
    with pytest.raises(StoreTaken, match="job mine"):
        store.claim(OTHER)
    store.replace(RECORD, b"{half")
    with pytest.raises(StoreTaken, match=r"cannot be read .*remove it if no job writes"):
        store.claim(OTHER)


def test_a_retried_claim_retries_store_failures_but_not_a_lost_claim() -> None:
    clock = Clock()
    plain = remote(clock, secrets.token_hex(8))
    store = retrying(plain, seconds=10, on_wait=lambda message: None, clock=clock, sleep=clock.sleep)
    mine = store.claim(MINE)
    mine.check()
    with pytest.raises(StoreTaken):
        store.claim(OTHER)
    mine.release()
    store.claim(OTHER).release()
    assert clock.pauses == []


owners = st.builds(
    Owner, job=st.sampled_from("ab"), token=st.sampled_from("12"), host=st.just("here"), pid=st.integers(1, 9)
)


@settings(deadline=None)
@given(holder=owners, comer=owners, age=st.floats(-1e4, 1e4))
def test_only_a_young_record_of_another_job_blocks_a_claim(holder: Owner, comer: Owner, age: float) -> None:
    record = ClaimRecord(holder, renewed=1e6)
    assert msgspec.json.decode(msgspec.json.encode(record), type=ClaimRecord) == record
    refused = blocks_claim(record, comer, 1e6 + age)
    assert refused == (holder.job != comer.job and age < STALE_SECONDS)


def test_a_record_of_a_dead_process_of_this_machine_is_free_at_once() -> None:
    """A crashed job is not refused, whatever its name; a living one is, also under the same name."""
    here = socket.gethostname()
    with subprocess.Popen(["sleep", "60"]) as process:
        living = Owner("a", "1", here, process.pid, since=time.time())
        record = ClaimRecord(living, renewed=time.time())
        comers = [Owner(job, "2", here, os.getpid(), since=time.time()) for job in "ab"]
        assert all(blocks_claim(record, comer, time.time()) for comer in comers)
        later = msgspec.structs.replace(record, owner=msgspec.structs.replace(living, since=1.0))
        assert not any(blocks_claim(later, comer, time.time()) for comer in comers)  # the number was reused
        process.kill()
    assert not any(blocks_claim(record, comer, time.time()) for comer in comers)


def test_a_record_of_another_machine_is_free_when_its_run_no_longer_renews_it() -> None:
    """The next generation of the same managed job takes it over at once; another job waits longest."""
    record = ClaimRecord(Owner("a", "1", "there", 7, since=1.0, launch="x"), renewed=1000.0)

    def waits(job: str, launch: str) -> float:
        comer = Owner(job, "2", "here", 8, since=1.0, launch=launch)
        return next(age for age in range(0, 1000, 10) if not blocks_claim(record, comer, 1000.0 + age))

    assert waits("a", "x") == waits("b", "x") == 0
    assert waits("a", "y") == waits("a", "") == DEAD_SECONDS
    assert waits("b", "y") == STALE_SECONDS


def test_a_claim_renews_its_record_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_module, "RENEW_SECONDS", 0.01)
    store = open_store("memory://renewed")
    claim = store.claim(Owner("a", "1", "there", 7, since=1.0))

    def renewed() -> float:
        return msgspec.json.decode(store.read(RECORD), type=ClaimRecord).renewed

    first = renewed()
    deadline = time.monotonic() + 30
    while renewed() == first:
        assert time.monotonic() < deadline
    claim.release()
    assert not any(thread.name == "varuna-claim" and wait_for_end(thread) for thread in threading.enumerate())


def wait_for_end(thread: threading.Thread) -> bool:
    thread.join(30)
    return thread.is_alive()
