"""A connection to the store of a job. It blocks; every call has a deadline."""

import functools
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from varuna.codec import UNDECODABLE
from varuna.secure.credential import JobCredential
from varuna.secure.framing import FrameReader, FramingError, pack_frame
from varuna.secure.store_server import StoreAnswer, StoreRequest, prepare_connection

ANSWER_SECONDS = 30.0
"""Time limit for an answer, beyond the time that the request may wait for keys."""
CONNECT_SECONDS = 10.0
TRY_SECONDS = 2.0
"""Longest single attempt to connect: after each one, the connection may have been closed meanwhile."""
RETRY_SECONDS = 0.05

_read_answer = msgspec.msgpack.Decoder(StoreAnswer).decode
_write = msgspec.msgpack.encode
_opening: "set[StoreConnection]" = set()


class StoreGone(ConnectionError):
    """The store's process or machine has ended, does not answer, or belongs to another job."""


class KeyTimeout(TimeoutError):
    """Nobody has set a key within the time limit."""

    def __init__(self, missing: Sequence[str], ranks: Sequence[int], seconds: float) -> None:
        super().__init__(f"no process has set {', '.join(missing)} within {seconds:g} s")
        self.missing = tuple(missing)
        self.ranks = tuple(ranks)  # that have connected to the store
        self.seconds = seconds


class StoreConnection:
    """Sends one request at a time. A lost connection stays lost: the store's values went with its process."""

    def __init__(
        self,
        host: str,
        port: int,
        credential: JobCredential,
        *,
        rank: int = -1,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Connect, and try again for `connect_seconds` while nobody listens there. Raise StoreGone."""
        self.address = f"{host}:{port}"
        self._lock = threading.Lock()
        self._frames = FrameReader()
        self._lost = ""
        self._socket: socket.socket | None = None
        _opening.add(self)
        try:
            with self._lock:  # `close` only shuts the socket down
                self._open(self._connect(host, port, time.monotonic() + connect_seconds), credential)
            self.request(StoreRequest("hello", number=rank))
        finally:
            _opening.discard(self)

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection(
                    (host, port), max(0.1, min(TRY_SECONDS, deadline - time.monotonic()))
                )
            except OSError as error:
                if self._lost:
                    raise self._gone(self._lost) from None
                if time.monotonic() + RETRY_SECONDS >= deadline:
                    raise self._gone(f"cannot be reached: {error}") from None
                time.sleep(RETRY_SECONDS)

    def _open(self, raw: socket.socket, credential: JobCredential) -> None:
        """Begin TLS. The handshake comes after `_socket` is set, so that `close` can end it."""
        found = raw
        try:
            prepare_connection(raw)
            raw.settimeout(ANSWER_SECONDS)
            found = client_context(credential).wrap_socket(raw, do_handshake_on_connect=False)
            self._socket = found
            if not self._lost:
                found.do_handshake()
        except OSError as error:
            found.close()
            raise self._gone(self._lost or _explain(error)) from None

    def request(self, request: StoreRequest) -> StoreAnswer:
        """Send the request and return the answer. Raise StoreGone, KeyTimeout or ValueError."""
        limit = request.seconds + ANSWER_SECONDS
        if not self._lock.acquire(timeout=limit):
            raise self._gone(f"has not answered another thread's request for {limit:g} s")
        try:
            if self._lost:
                raise self._gone(self._lost)
            answer = self._exchange(pack_frame(_write(request)), time.monotonic() + limit)
        except (OSError, FramingError, *UNDECODABLE) as error:
            if isinstance(error, StoreGone):
                raise
            self._lost = _explain(error)
            raise self._gone(self._lost) from None
        finally:
            if self._lost and self._socket is not None:
                self._socket.close()
            self._lock.release()
        if answer.missing:
            raise KeyTimeout(answer.missing, answer.ranks, request.seconds)
        if answer.error:
            raise ValueError(answer.error)
        return answer

    def _exchange(self, frame: bytes, deadline: float) -> StoreAnswer:
        assert self._socket is not None
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(frame)
        while True:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("it closed the connection")
            for payload in self._frames.feed(data):
                return _read_answer(payload)

    def _gone(self, why: str) -> StoreGone:
        return StoreGone(f"the job's store at {self.address} {why}")

    def close(self) -> None:
        """Close the connection, also while another thread waits for an answer.

        That thread gets the end of the stream, and closes the socket itself: if it were closed here, another
        socket could get its number, and the thread would wait for that one.
        """
        self._lost = self._lost or "was closed by this process"
        if self._socket is None:  # it is being opened, and notices
            return
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # the TLS object stays
        if self._lock.acquire(blocking=False):
            self._socket.close()
            self._lock.release()


def close_unopened() -> None:
    """Close the connections that this process is just opening: their stores may never answer."""
    for connection in list(_opening):
        connection.close()


@functools.lru_cache(maxsize=1)
def client_context(credential: JobCredential) -> ssl.SSLContext:
    """Return the TLS context of this process's job: making one takes milliseconds."""
    return credential.client_context()


def _explain(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "does not answer: its process is stopped, or its machine is disconnected"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"does not accept this job's credential; does another job listen there? ({error})"
    return f"has ended: {error}"
