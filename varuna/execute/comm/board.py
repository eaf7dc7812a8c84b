"""Where ranks tell each other of errors and waits, so that a failure has a name on every rank.

It lives in a torch.distributed Store:

    error        the first error of any rank: rank, place, type, message, traceback
    seen         how many other ranks have read it
    note/<rank>  what a rank waits for, or that it has finished
    beat/<rank>  a count that the rank's watcher thread drives on: stands still where a process is stopped

A store's client blocks for good when the store's host is stopped. So the computing thread asks
through another thread, for a limited time; and the client is one of our own, because a client
serves one request at a time and somebody else's may be a long wait. It is made at the beginning:
torch looks up names when it connects, which may take seconds.
"""

import contextlib
import queue
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import msgspec
import torch.distributed as dist

from varuna import codec
from varuna.errors import PeerHangs, PeerLost, WorkerError

if TYPE_CHECKING:  # where torch declares what torch.distributed hands out
    from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
else:
    from torch.distributed import PrefixStore, Store, TCPStore

POLL_SECONDS = 0.25
STORE_SECONDS = 2.0
"""A store that has not answered for so long counts as silent, and its host as the culprit."""
BEAT_SECONDS = 2.0
"""A rank whose watcher has not moved for so long is stopped, or cut off."""
MAX_TRACEBACK = 20_000

Answer = TypeVar("Answer")


class Post(msgspec.Struct, frozen=True):
    """An error as it stands on the board."""

    rank: int
    where: str
    kind: str
    message: str
    traceback: str


class Note(msgspec.Struct, frozen=True):
    """What a rank says of itself; one without a note is at work."""

    state: Literal["working", "waiting", "finished"] = "working"
    what: str = ""


class StoreSilent(Exception):
    """The store's host is gone, or does not answer."""


class Board:
    """One rank's view of the board. `describe(3)` is what errors call rank 3."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        describe: Callable[[int], str],
        *,
        timeout_seconds: float,
        host: int = 0,
    ) -> None:
        self.rank = rank
        self.world = world
        self.describe = describe
        self.timeout_seconds = timeout_seconds
        self.host = host
        self._client = _own_client(store)
        self._canary = Canary(store)
        self._clerk = Clerk(self._client, self._canary)
        self._watch: Watch | None = None
        self._acknowledged = False

    def post(self, error: BaseException, where: str) -> None:
        """Tells all ranks; the first error of all wins, for the others follow from it."""
        text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
        post = codec.encode(Post(self.rank, where, type(error).__name__, str(error), text))
        with contextlib.suppress(StoreSilent):
            standing = self._clerk.ask(lambda store: store.compare_set("error", "", post))
            # Who fails by itself, and second, needs no telling: the first need not linger for it.
            self._acknowledge(codec.decode(standing, Post, "the board"), self._clerk.ask)

    def read(self, wait_seconds: float = 0) -> WorkerError | None:
        """The error that another rank has posted, waiting for one to come up if asked to."""
        deadline = time.monotonic() + wait_seconds
        try:
            while True:
                post = self._clerk.ask(_read_post)
                if post is not None:
                    self._acknowledge(post, self._clerk.ask)
                    return None if post.rank == self.rank else self._as_error(post)
                if time.monotonic() >= deadline:
                    return None
                time.sleep(min(0.05, wait_seconds))
        except StoreSilent:
            return None

    def waiting(self, what: str | None) -> None:
        """Says what this rank waits for ("rank 2's activation 3"), or that it waits no more."""
        self._put(Note() if what is None else Note("waiting", what))

    def finished(self) -> None:
        """Says that this rank has done all its work: nobody need wait for it, nor blame it."""
        self._put(Note("finished"))

    def culprit(self) -> PeerHangs:
        """Who it is that does not move, asked after a wait of `timeout_seconds` in vain."""
        try:
            notes, moving = self._clerk.ask(self._look_around, seconds=STORE_SECONDS + BEAT_SECONDS)
        except StoreSilent as error:
            return PeerHangs(
                f"{self.describe(self.host)}, which hosts the store, hangs or is gone: {error} "
                "(is its process stopped, or its machine cut off?)"
            )
        return PeerHangs(self._verdict(notes, moving))

    def watch(self, on_error: Callable[[WorkerError], None]) -> "Watch":
        """Calls `on_error` once, from a background thread, when another rank has posted an error."""
        assert self._watch is None, "one watcher is enough"
        self._watch = Watch(self, self._client, self._canary, on_error)
        return self._watch

    def linger(self, seconds: float = 3.0) -> None:
        """After `post`: waits until the others have seen it, for the store may die with this rank."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(StoreSilent):
            while time.monotonic() < deadline:
                if self._clerk.ask(self._count_informed) >= self.world - 1:
                    return
                time.sleep(0.02)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        self._clerk.close()
        self._canary.close()

    # ------------------------------------------------------------ what is asked of the store

    def _put(self, note: Note) -> None:
        with contextlib.suppress(StoreSilent):
            self._clerk.ask(lambda store: store.set(f"note/{self.rank}", codec.encode(note)))

    def _acknowledge(self, post: Post, ask: Callable[[Callable[[Store], int]], int]) -> None:
        if post.rank != self.rank and not self._acknowledged:
            self._acknowledged = True
            ask(lambda store: store.add("seen", 1))

    def _count_informed(self, store: Store) -> int:
        finished = [self._note(store, rank).state == "finished" for rank in range(self.world)]
        return store.add("seen", 0) + sum(finished)

    def _note(self, store: Store, rank: int) -> Note:
        key = f"note/{rank}"
        return codec.decode(store.get(key), Note, key) if store.check([key]) else Note()

    def _look_around(self, store: Store) -> tuple[dict[int, Note], set[int]]:
        """Every rank's note, and those whose watcher moves (or never started)."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        first = {rank: _count(store, f"beat/{rank}") for rank in others}
        deadline = time.monotonic() + BEAT_SECONDS
        still = {rank for rank in others if first[rank]}
        while still and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 5)
            still = {rank for rank in still if _count(store, f"beat/{rank}") == first[rank]}
        notes = {rank: self._note(store, rank) for rank in others}
        return notes, {rank for rank in others if rank not in still}

    # ------------------------------------------------------------ what is made of it

    def _as_error(self, post: Post) -> WorkerError:
        who = self.describe(post.rank)
        if post.kind in ("PeerLost", "PeerHangs"):  # the culprit is in the message, not who noticed
            kind = PeerLost if post.kind == "PeerLost" else PeerHangs
            return kind(f"{post.message}\n(noticed by {who} at {post.where})")
        return WorkerError(
            f"{who} failed at {post.where}: {post.kind}: {post.message}\n\n"
            f"The original traceback, of rank {post.rank}:\n{post.traceback}"
        )

    def _verdict(self, notes: dict[int, Note], moving: set[int]) -> str:
        at_work = [rank for rank, note in notes.items() if note.state != "finished"]
        stopped = [rank for rank in at_work if rank not in moving]
        busy = [rank for rank in at_work if notes[rank].state == "working"]
        if stopped:
            verdict = (
                f"{self._list(stopped)} hangs: its process is stopped or cut off, "
                "for its watcher stands still too"
            )
        elif busy:
            verdict = (
                f"{self._list(busy)} hangs: for {self.timeout_seconds:g} s it has neither sent what is "
                "waited for nor waited for anyone (an endless or very long computation?)"
            )
        else:
            verdict = f"no rank moves: {self.describe(self.rank)} and all others wait, or have finished"
        waits = [
            f"{self.describe(rank)} waits for {note.what}"
            for rank, note in notes.items()
            if note.state == "waiting" and rank not in stopped
        ]
        finished = [f"{self.describe(rank)} has finished" for rank in notes if rank not in at_work]
        details = "; ".join([*waits, *finished])
        return (
            f"{verdict}. {details + '. ' if details else ''}"
            f"({self.describe(self.rank)} gave up after {self.timeout_seconds:g} s; where steps may take "
            "longer, raise the timeout)"
        )

    def _list(self, ranks: list[int]) -> str:
        return " and ".join(self.describe(rank) for rank in ranks)


class Watch:
    """A background thread that looks at the board and shows that this process is alive."""

    def __init__(
        self, board: Board, store: Store, canary: "Canary", on_error: Callable[[WorkerError], None]
    ) -> None:
        self._board = board
        self._store = store
        self._canary = canary
        self._on_error = on_error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=STORE_SECONDS)  # where the store's host is stopped it stays behind, asleep

    def _run(self) -> None:
        told = False
        with contextlib.suppress(RuntimeError):  # the store went between the look and the request
            while not self._stop.is_set() and self._canary.alive():
                self._store.add(f"beat/{self._board.rank}", 1)
                post = None if told else _read_post(self._store)
                if post is not None:
                    told = True
                    if post.rank != self._board.rank:
                        self._on_error(self._board._as_error(post))
                        self._board._acknowledge(post, lambda question: question(self._store))
                self._stop.wait(POLL_SECONDS)


class Clerk:
    """Asks the store from a thread of its own, so that a silent store costs seconds, not the process."""

    def __init__(self, store: Store, canary: "Canary") -> None:
        self._store = store
        self._canary = canary
        self._questions: queue.SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None]
        self._questions = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="varuna-board", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Store], Answer], seconds: float = STORE_SECONDS) -> Answer:
        answer: Future[Answer] = Future()
        self._questions.put((question, answer))
        try:
            return answer.result(timeout=seconds)
        except FutureTimeout:
            answer.cancel()
            raise StoreSilent(f"the store has not answered for {seconds:g} s") from None

    def close(self) -> None:
        self._questions.put(None)
        self._thread.join(timeout=STORE_SECONDS)

    def _run(self) -> None:
        while (task := self._questions.get()) is not None:
            question, answer = task
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if not self._canary.alive():
                    raise StoreSilent("the store is gone")
                answer.set_result(question(self._store))
            except (dist.DistError, OSError) as error:
                answer.set_exception(StoreSilent(str(error)))
            except BaseException as error:  # whoever asked is to have it
                answer.set_exception(error)


class Canary:
    """A bare connection to the store's server, which ends when that does.

    Looked at before each request, because a request to a dead server makes torch print a page of C++
    frames that no handler can hold back.
    """

    def __init__(self, store: Store) -> None:
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._line: socket.socket | None = None
        if isinstance(store, TCPStore):
            with contextlib.suppress(OSError):
                self._line = socket.create_connection((store.host, store.port), timeout=STORE_SECONDS)
                self._line.setblocking(False)

    def alive(self) -> bool:
        if self._line is None:
            return True  # not known to be dead
        try:
            return self._line.recv(1) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        if self._line is not None:
            self._line.close()


def _own_client(store: Store) -> Store:
    client: Store = cast(Any, store).clone()  # torch's declarations lack it
    return client


def _read_post(store: Store) -> Post | None:
    return codec.decode(store.get("error"), Post, "the board's error") if store.check(["error"]) else None


def _count(store: Store, key: str) -> int:
    return store.add(key, 0)
