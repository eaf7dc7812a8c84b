"""Shares errors and waits between ranks, so that every rank can name the rank that failed or hangs.

The board lives in a torch.distributed Store:

    error          the first error of any rank: rank, place, type, message, traceback
    seen           number of other ranks that have read it
    status/<rank>  what the rank waits for, or that it has finished
    call/<number>  the call of the first rank that waits long in its call of this number
    beat/<rank>    a counter that the rank's watcher thread increments; it stops when the process is stopped

A request to a store blocks forever if the store's host is stopped. So the main thread sends requests through
another thread, with a timeout. The board has a client of its own, because a client handles one request at a
time. The client connects at the start, because torch resolves host names then, which may take seconds.
"""

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec
import torch.distributed as dist

from varuna import codec
from varuna.errors import CallMismatch, PeerHangs, PeerLost, WorkerError
from varuna.execute.calls import RankCall, mismatch
from varuna.execute.comm.job_store import JobStore

if TYPE_CHECKING:  # torch declares these names elsewhere than it exports them
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

POLL_SECONDS = 0.25
STORE_SECONDS = 2.0
"""A store that does not answer for this long is unavailable."""
INTERRUPT_SECONDS = 0.02
"""Interval at which a waiting caller looks whether it is interrupted."""
BEAT_SECONDS = 2.0
"""A process whose counter does not change for this long is stopped or disconnected."""
MAX_TRACEBACK = 20_000
STORE_HOST = 0
"""Rank that hosts the store under torchrun."""

T = TypeVar("T")


class PostedError(msgspec.Struct, frozen=True):
    """An error as it is stored on the board."""

    rank: int
    where: str
    kind: str
    message: str
    traceback: str


class RankStatus(msgspec.Struct, frozen=True):
    """State of one rank; "working" unless the rank has set another one."""

    state: Literal["working", "waiting", "finished"] = "working"
    what: str = ""  # what it waits for


class StoreUnavailable(Exception):
    """The store's host is gone or does not answer."""


class StatusBoard:
    """One rank's view of the board. `describe(3)` is the name of rank 3 in errors."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        describe: Callable[[int], str],
        *,
        timeout_seconds: float,
    ) -> None:
        self.rank = rank
        self.world = world
        self.describe = describe
        self.timeout_seconds = timeout_seconds
        self._client = StoreClient(store)
        self._acknowledged = False
        self._published = ""  # key of the last call that this rank published
        self._stop_watching = threading.Event()
        self._watcher: threading.Thread | None = None

    def post_error(self, error: BaseException, where: str) -> None:
        """Publish an error. The first error of all ranks stays, because later ones follow from it."""
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        own = codec.encode(PostedError(self.rank, where, type(error).__name__, str(error), text))
        with contextlib.suppress(StoreUnavailable):
            posted = self._client.run(lambda store: store.compare_set("error", "", own))
            # A rank that fails too has seen the first error: the first rank need not wait for it.
            self._acknowledge(codec.decode(posted, PostedError, "the board"), self._client.run)

    def read_error(self, wait_seconds: float = 0) -> WorkerError | None:
        """Return the error of another rank, if one is posted within `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        try:
            while True:
                posted = self._client.run(_read_posted)
                if posted is not None:
                    self._acknowledge(posted, self._client.run)
                    return None if posted.rank == self.rank else self._to_exception(posted)
                if time.monotonic() >= deadline:
                    return None
                time.sleep(min(0.05, wait_seconds))
        except StoreUnavailable:
            return None

    def set_waiting(self, what: str | None) -> None:
        """Publish what this rank waits for ("rank 2's activation 3"); None: it no longer waits."""
        self._set_status(RankStatus() if what is None else RankStatus("waiting", what))

    def set_finished(self) -> None:
        """Publish that this rank has finished its work."""
        self._set_status(RankStatus("finished"))

    def compare_call(self, number: int, name: str) -> CallMismatch | None:
        """Return an error, which is posted too, if a waiting rank's call of this number has another name."""
        key, own = f"call/{number}", codec.encode(RankCall(self.rank, name))

        def publish(store: Store) -> str:
            if self._published and self._published != key:
                store.delete_key(self._published)
            found = bytes(store.compare_set(key, "", own)).decode()
            self._published = key if found == own else ""
            return found

        try:
            first = codec.decode(self._client.run(publish), RankCall, key)
        except StoreUnavailable:
            return None
        if first.name == name:
            return None
        error = mismatch(sorted([first, RankCall(self.rank, name)], key=lambda call: call.rank))
        self.post_error(error, f"{name}()")
        self.wait_until_seen()
        return error

    def find_hanging_rank(self) -> PeerHangs:
        """Return an error that names the rank that does not progress. Call it after a timeout."""
        try:
            statuses, alive = self._client.run(self._observe, seconds=STORE_SECONDS + BEAT_SECONDS)
        except StoreUnavailable as error:
            torchs = f"{self.describe(STORE_HOST)}, which hosts the store,"
            host = "the job's store" if self._client.secured else torchs
            return PeerHangs(
                f"{host} hangs or is gone: {error} "
                "(check whether its process is stopped or its machine is disconnected)"
            )
        return PeerHangs(self._diagnose(statuses, alive))

    def find_ended_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended or are stopped; none if the store does not answer."""
        try:
            statuses, alive = self._client.run(self._observe, seconds=STORE_SECONDS + BEAT_SECONDS)
        except StoreUnavailable:
            return []
        return sorted(set(statuses) - alive)

    def watch(self, on_error: Callable[[WorkerError], None]) -> None:
        """Start a thread that shows that this process runs, and gives another rank's error to `on_error`."""
        assert self._watcher is None, "a board has one watcher"
        self._watcher = threading.Thread(
            target=self._watch, args=(on_error,), name="varuna-watch", daemon=True
        )
        self._watcher.start()

    def wait_until_seen(self, seconds: float = 3.0) -> None:
        """Wait after `post_error` until all ranks have read it: the store may end with this rank."""
        deadline = time.monotonic() + seconds

        def count_informed(store: Store) -> int:
            finished = [self._status(store, rank).state == "finished" for rank in range(self.world)]
            return store.add("seen", 0) + sum(finished)

        with contextlib.suppress(StoreUnavailable):
            while time.monotonic() < deadline and self._client.run(count_informed) < self.world - 1:
                time.sleep(0.02)

    def close(self) -> None:
        self._stop_watching.set()
        if self._watcher is not None:
            self._watcher.join(timeout=STORE_SECONDS)  # it stays blocked if the store's host is stopped
        self._client.close()

    def abandon(self) -> None:
        """Stop without a word to other ranks. The store's host may be gone."""
        self._stop_watching.set()
        self._client.close(at_once=True)
        if self._watcher is not None:
            self._watcher.join(timeout=STORE_SECONDS)

    def interrupt_with(self, has_order: Callable[[], bool]) -> None:
        """Give up requests to a store that does not answer as soon as `has_order()`."""
        self._client.interrupted = has_order

    def _watch(self, on_error: Callable[[WorkerError], None]) -> None:
        store, reported = self._client.store, False
        with contextlib.suppress(RuntimeError):  # the store ended between the check and the request
            while not self._stop_watching.is_set() and self._client.alive():
                store.add(f"beat/{self.rank}", 1)
                posted = None if reported else _read_posted(store)
                if posted is not None:
                    reported = True
                    if posted.rank != self.rank:
                        on_error(self._to_exception(posted))
                        self._acknowledge(posted, lambda request: request(store))
                self._stop_watching.wait(POLL_SECONDS)

    def _set_status(self, status: RankStatus) -> None:
        with contextlib.suppress(StoreUnavailable):
            self._client.run(lambda store: store.set(f"status/{self.rank}", codec.encode(status)))

    def _acknowledge(self, posted: PostedError, run: Callable[[Callable[[Store], int]], int]) -> None:
        if posted.rank != self.rank and not self._acknowledged:
            self._acknowledged = True
            run(lambda store: store.add("seen", 1))

    def _status(self, store: Store, rank: int) -> RankStatus:
        key = f"status/{rank}"
        return codec.decode(store.get(key), RankStatus, key) if store.check([key]) else RankStatus()

    def _observe(self, store: Store) -> tuple[dict[int, RankStatus], set[int]]:
        """Return all other ranks' statuses, and the ranks whose watcher runs (or never started)."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        first = {rank: store.add(f"beat/{rank}", 0) for rank in others}
        deadline = time.monotonic() + BEAT_SECONDS
        still = {rank for rank in others if first[rank]}
        while still and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
            still = {rank for rank in still if store.add(f"beat/{rank}", 0) == first[rank]}
        return {rank: self._status(store, rank) for rank in others}, set(others) - still

    def _to_exception(self, posted: PostedError) -> WorkerError:
        who = self.describe(posted.rank)
        if posted.kind == "CallMismatch":
            return CallMismatch(posted.message)
        if posted.kind in ("PeerLost", "PeerHangs"):  # the message names the cause, not who noticed it
            kind = PeerLost if posted.kind == "PeerLost" else PeerHangs
            return kind(f"{posted.message}\n(noticed by {who} at {posted.where})")
        return WorkerError(
            f"{who} failed at {posted.where}: {posted.kind}: {posted.message}\n\n"
            f"The original traceback, of rank {posted.rank}:\n{posted.traceback}"
        )

    def _diagnose(self, statuses: dict[int, RankStatus], alive: set[int]) -> str:
        unfinished = [rank for rank, status in statuses.items() if status.state != "finished"]
        stopped = [rank for rank in unfinished if rank not in alive]
        busy = [rank for rank in unfinished if statuses[rank].state == "working"]
        culprits = " and ".join(map(self.describe, stopped or busy))
        if stopped:
            verdict = (
                f"{culprits} hangs: its process is stopped or disconnected, "
                "because its watcher thread does not run either"
            )
        elif busy:
            verdict = (
                f"{culprits} hangs: for {self.timeout_seconds:g} s it has neither sent the awaited "
                "message nor waited for another rank (an endless or very long computation?)"
            )
        else:
            verdict = f"no rank progresses: {self.describe(self.rank)} and all others wait or have finished"
        waiting = [
            f"{self.describe(rank)} waits for {status.what}"
            for rank, status in statuses.items()
            if status.state == "waiting" and rank not in stopped
        ]
        finished = [f"{self.describe(rank)} has finished" for rank in statuses if rank not in unfinished]
        details = "; ".join([*waiting, *finished])
        return (
            f"{verdict}. {details + '. ' if details else ''}"
            f"({self.describe(self.rank)} timed out after {self.timeout_seconds:g} s; if steps may take "
            "longer, raise the timeout)"
        )


class StoreClient:
    """A client of the store that sends requests from a thread of its own, so that the caller can time out.

    Under torchrun the store is a TCPStore. There a bare connection to its server shows whether it lives. It
    is checked before each request: a request to a dead server makes torch print a page of C++ frames.
    """

    def __init__(self, store: Store) -> None:
        self.store: Store = cast(Any, store).clone()  # torch's declarations lack `clone`
        self.interrupted: Callable[[], bool] = lambda: False  # no longer wait for an answer
        self._socket: socket.socket | None = None
        base: Any = self.store
        while isinstance(store, PrefixStore):
            store, base = store.underlying_store, base.underlying_store
        self._base = base  # torch does not keep a JobStore alive
        self.secured = isinstance(store, JobStore)
        if isinstance(store, TCPStore):
            with contextlib.suppress(OSError):
                self._socket = socket.create_connection((store.host, store.port), timeout=STORE_SECONDS)
                self._socket.setblocking(False)
        self._tasks = queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]()
        self._thread = threading.Thread(target=self._run, name="varuna-board", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Return False if the server has ended; True if that is unknown."""
        if self._socket is None:
            return True
        try:
            return self._socket.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run(self, request: Callable[[Store], T], seconds: float = STORE_SECONDS) -> T:
        answer: Future[T] = Future()
        self._tasks.put((request, answer))
        deadline = time.monotonic() + seconds
        while True:
            try:
                return answer.result(timeout=min(INTERRUPT_SECONDS, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                if answer.done() or not (time.monotonic() >= deadline or self.interrupted()):
                    continue  # the answer has just come, or may still come
                answer.cancel()
                raise StoreUnavailable(f"the store has not answered for {seconds:g} s") from None

    def close(self, *, at_once: bool = False) -> None:
        """Close the connection. `at_once`: requests that wait for an answer fail."""
        self._tasks.put(None)
        if at_once and isinstance(self._base, JobStore):
            self._base.disconnect()
        self._thread.join(timeout=STORE_SECONDS)
        if isinstance(self._base, JobStore):
            self._base.close()
        if self._socket is not None:
            self._socket.close()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            request, answer = task
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if not self.alive():
                    raise StoreUnavailable("the store is gone")
                answer.set_result(request(self.store))
            except (dist.DistError, OSError) as error:
                answer.set_exception(StoreUnavailable(str(error)))
            except BaseException as error:  # the caller gets it
                answer.set_exception(error)


def _read_posted(store: Store) -> PostedError | None:
    if not store.check(["error"]):
        return None
    return codec.decode(store.get("error"), PostedError, "the board's error")
