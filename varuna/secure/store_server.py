"""The store of a job: keys and values for the processes of the job, over mutual TLS.

Ranks find each other through it, and share errors and heartbeats. It has the semantics of torch's TCPStore,
which has no authentication. A caller is a stranger until its TLS handshake is complete; no byte that it sends
before is read as a message. When the server's process ends, every connection closes, so clients that wait
know at once.
"""

import asyncio
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import msgspec

from varuna.codec import UNDECODABLE
from varuna.secure.credential import JobCredential
from varuna.secure.framing import FrameReader, FramingError, pack_frame
from varuna.secure.refusals import RefusalLog

HANDSHAKE_SECONDS = 5.0
"""Time limit for a caller to prove that it belongs to the job."""
MAX_STRANGERS = 512
"""Limit for callers in their handshake. One more disconnects the oldest: a member needs milliseconds."""
MAX_WAIT_SECONDS = 3600.0
"""Longest wait for a key that a request can ask for."""
BACKLOG = 1024

Operation = Literal[
    "hello",
    "set",
    "get",
    "add",
    "compare_set",
    "check",
    "wait",
    "delete_key",
    "num_keys",
    "list_keys",
    "append",
]


class StoreRequest(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A request; a client sends the next one after the answer."""

    what: Operation
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0  # summand of `add`; rank of `hello`, -1 if it has none
    seconds: float = 0.0  # time limit of `get` and `wait`


class StoreAnswer(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    values: tuple[bytes, ...] = ()
    number: int = 0
    keys: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()  # keys that nobody has set within the time limit
    ranks: tuple[int, ...] = ()  # with `missing`: all ranks that have connected so far
    error: str = ""


_read_request = msgspec.msgpack.Decoder(StoreRequest).decode
_write = msgspec.msgpack.encode


class StoreMember(asyncio.Protocol):
    """One connected process of the job; the handshake is complete."""

    def __init__(self, server: "StoreServer") -> None:
        self._server = server
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._peer = str(transport.get_extra_info("peername"))
        self._server.join(self)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                self._server.handle(self, _read_request(payload))
        except (FramingError, *UNDECODABLE) as error:
            self._server.refusals.add(f"{self._peer}: {error}")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.leave(self)
        self._transport = None

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def answer(self, answer: StoreAnswer) -> None:
        if self._transport is not None:
            self._transport.write(pack_frame(_write(answer)))


class PendingWait:
    """A request that waits for keys."""

    def __init__(self, member: StoreMember, request: StoreRequest, missing: set[str]) -> None:
        self.member = member
        self.request = request
        self.missing = missing
        self.timer: asyncio.TimerHandle | None = None


class StoreServer:
    """Keys, values, and the requests that wait for keys."""

    def __init__(self, credential: JobCredential, *, log: Callable[[str], None]) -> None:
        self._context = credential.server_context()
        self._context.num_tickets = 0  # connections are not resumed
        self.refusals = RefusalLog(lambda why: log(f"refused {why}"))
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._members: set[StoreMember] = set()
        self._values: dict[str, bytes] = {}
        self._pending: dict[str, list[PendingWait]] = {}  # by key
        self._waits: dict[StoreMember, PendingWait] = {}
        self._ranks: set[int] = set()

    # ------------------------------------------------------------ connections

    async def serve(self, listener: socket.socket) -> None:
        """Accept members until cancelled."""
        raise_file_limit()
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor is left, or the caller is gone already
                self.refusals.add(f"a caller: {error}")
                await asyncio.sleep(0.05)
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel("too many callers are in their handshake")
            task = loop.create_task(self._admit(connection, address))
            self._strangers[task] = None
            task.add_done_callback(lambda done: self._strangers.pop(done, None))

    async def _admit(self, connection: socket.socket, address: object) -> None:
        try:
            prepare_connection(connection)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: StoreMember(self),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=1.0,
            )
        except asyncio.CancelledError as cancelled:
            self.refusals.add(f"{address}: {cancelled}")
        except (OSError, ValueError) as error:
            self.refusals.add(f"{address}: {error or type(error).__name__}")

    async def close(self) -> None:
        """Disconnect everybody."""
        for task in self._strangers:
            task.cancel("the store closes")
        for member in self._members:
            member.abort()
        await asyncio.gather(*self._strangers, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close their sockets in the next round

    def join(self, member: StoreMember) -> None:
        self._members.add(member)

    def leave(self, member: StoreMember) -> None:
        self._members.discard(member)
        self._forget_wait(member)

    def _forget_wait(self, member: StoreMember) -> None:
        if (wait := self._waits.pop(member, None)) is not None:
            self._end_wait(wait)

    # ------------------------------------------------------------ requests

    def handle(self, member: StoreMember, request: StoreRequest) -> None:
        if request.what in ("get", "wait"):
            self._wait(member, request)
            return
        try:
            member.answer(self._carry_out(request))
        except (ValueError, IndexError) as error:
            member.answer(StoreAnswer(error=f"{request.what} {list(request.keys)}: {error}"))

    def _carry_out(self, request: StoreRequest) -> StoreAnswer:
        keys, values = request.keys, request.values
        match request.what:
            case "set":
                for key, value in zip(keys, values, strict=True):
                    self._set(key, value)
            case "add":
                total = int(self._values.get(keys[0], b"0")) + request.number
                self._set(keys[0], b"%d" % total)
                return StoreAnswer(number=total)
            case "compare_set":
                return StoreAnswer((self._compare_set(keys[0], *values),))
            case "append":
                self._set(keys[0], self._values.get(keys[0], b"") + values[0])
            case "check":
                return StoreAnswer(number=int(all(key in self._values for key in keys)))
            case "delete_key":
                return StoreAnswer(number=int(self._values.pop(keys[0], None) is not None))
            case "num_keys":
                return StoreAnswer(number=len(self._values))
            case "list_keys":
                return StoreAnswer(keys=tuple(self._values))
            case "hello":
                if request.number >= 0:
                    self._ranks.add(request.number)
        return StoreAnswer()

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set the key if it has the expected value, and return its value; "" creates a missing key."""
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self._set(key, desired)
        return desired

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for wait in self._pending.pop(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                self._finish(wait)

    def _wait(self, member: StoreMember, request: StoreRequest) -> None:
        missing = {key for key in request.keys if key not in self._values}
        wait = PendingWait(member, request, missing)
        if not missing:
            self._finish(wait)
            return
        self._forget_wait(member)  # a client sends one request at a time
        self._waits[member] = wait
        for key in missing:
            self._pending.setdefault(key, []).append(wait)
        seconds = min(max(0.0, request.seconds), MAX_WAIT_SECONDS)
        wait.timer = asyncio.get_running_loop().call_later(seconds, self._expire, wait)

    def _finish(self, wait: PendingWait) -> None:
        self._waits.pop(wait.member, None)
        self._end_wait(wait)
        keys = wait.request.keys if wait.request.what == "get" else ()
        # A key may have been deleted while the request waited for another one.
        if gone := tuple(key for key in keys if key not in self._values):
            wait.member.answer(StoreAnswer(missing=gone, ranks=tuple(sorted(self._ranks))))
        else:
            wait.member.answer(StoreAnswer(tuple(self._values[key] for key in keys)))

    def _expire(self, wait: PendingWait) -> None:
        self._waits.pop(wait.member, None)
        self._end_wait(wait)
        missing = tuple(sorted(wait.missing))
        wait.member.answer(StoreAnswer(missing=missing, ranks=tuple(sorted(self._ranks))))

    def _end_wait(self, wait: PendingWait) -> None:
        if wait.timer is not None:
            wait.timer.cancel()
        for key in wait.missing:
            if wait in (waits := self._pending.get(key, [])):
                waits.remove(wait)
                if not waits:
                    del self._pending[key]


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen on an address of this machine; on all addresses if `host` belongs to a router before it."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server((str(address[0]), port), family=family, backlog=BACKLOG)
    except OSError as error:
        if not is_foreign_address(family, str(address[0])):
            raise OSError(error.errno, f"{host}:{port}: {os.strerror(error.errno or 0)}") from None
        return socket.create_server(("", port), family=family, backlog=BACKLOG)


def is_foreign_address(family: int, address: str) -> bool:
    """Return True if no interface of this machine has the address."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return True
    return False


def prepare_connection(connection: socket.socket) -> None:
    """Send small messages at once, and let the kernel notice within 30 s that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)


def raise_file_limit() -> None:
    """Allow as many connections as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_store(listener: socket.socket, credential: JobCredential, log: Callable[[str], None]) -> None:
    """Serve until the process ends."""
    asyncio.run(StoreServer(credential, log=log).serve(listener))


@contextmanager
def store_in_thread(
    credential: JobCredential, host: str = "127.0.0.1", log: Callable[[str], None] = lambda line: None
) -> Iterator[int]:
    """Serve a store in a thread of this process, and yield its port. Its connections close at the end."""
    listener = listen(host)
    loop = asyncio.new_event_loop()
    server = StoreServer(credential, log=log)
    task = loop.create_task(server.serve(listener))

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(server.close())
        loop.close()

    thread = threading.Thread(target=run, name="varuna-store", daemon=True)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        listener.close()
