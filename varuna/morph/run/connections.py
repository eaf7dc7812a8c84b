"""Connections of the manager: accept agents and commands of the job, refuse the rest.

A caller must finish a TLS handshake, in which it proves that it has the job's private key. Until then it is a
stranger: it can send nothing but the handshake, it has a time limit, and the number of strangers is limited.
"""

import asyncio
import math
import socket
import ssl
from collections.abc import Callable

from varuna.codec import UNDECODABLE
from varuna.morph import commands
from varuna.morph.protocol.messages import ManagerMessage, ToManager, read_to_manager, write_message
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.state import WorkerProgress
from varuna.secure.credential import JobCredential
from varuna.secure.framing import FramingError
from varuna.secure.refusals import RefusalLog

HANDSHAKE_SECONDS = 5.0
"""Time limit for the TLS handshake of a caller."""
FIRST_MESSAGE_SECONDS = 5.0
"""Time limit for the first message after the handshake."""
IDLE_SECONDS = 30.0
"""Time limit for the next request of a command."""
SHUTDOWN_SECONDS = 5.0
"""Time limit for a caller to confirm that the connection ends."""
MAX_STRANGERS = 2048
"""Limit for callers without a first message. The oldest one is disconnected in favour of a new one."""
ACCEPT_BATCH = 64
"""Callers that are accepted before other work gets its turn."""
RETRY_SECONDS = 1.0
"""Wait this long after the operating system refused to accept a caller."""


class ManagerConnection(asyncio.Protocol):
    """One caller: a stranger until its first message, then an agent or a command."""

    def __init__(self, server: "ConnectionServer", peer: str) -> None:
        self._server = server
        self._peer = peer
        self._reader = MessageReader()
        self._handshake: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed_because = ""
        self.agent = ""
        self.machine = ""
        self.heard = math.inf  # time of the last heartbeat; infinite: it has sent none
        self.pid = 0
        self.progress: tuple[WorkerProgress, ...] = ()  # of the last heartbeat

    def shake_hands(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """Start the handshake. Refuse the caller if it fails."""

        async def shake_hands() -> None:
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self,
                    sock,
                    ssl=context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=SHUTDOWN_SECONDS,
                )
            except OSError as error:
                self.refuse(explain_handshake(error))

        self._handshake = asyncio.create_task(shake_hands())
        self._handshake.add_done_callback(lambda _: None if self._transport else sock.close())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        why = "it sent no message within the time limit"
        self._timer = asyncio.get_running_loop().call_later(FIRST_MESSAGE_SECONDS, self.refuse, why)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._reader.feed(data):
                message = read_to_manager(payload)
                self._end_probation()
                self._server.on_message(self, message)
        except (FramingError, *UNDECODABLE) as error:
            self.refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end_probation()
        self._server.on_close(self, self._closed_because or (str(error) if error else "it disconnected"))

    def _end_probation(self) -> None:
        self._server.strangers.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def refuse(self, why: str) -> None:
        """Disconnect the caller. The log gets the reason, the caller does not."""
        self._server.refusals.add(f"{self._peer}: {why}")
        self.close(why)

    def send(self, message: ManagerMessage | commands.Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack_message(write_message(message)))

    def close_when_idle(self) -> None:
        """Close the connection of a command that sends no further request."""
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self.close, "idle")

    def close(self, why: str) -> None:
        self._closed_because = why
        self._end_probation()
        if self._transport is not None:
            self._transport.close()
        elif self._handshake is not None:
            self._handshake.cancel()


class ConnectionServer:
    """Listens on one port of one or more addresses."""

    def __init__(
        self,
        credential: JobCredential,
        port: int,
        *,
        on_message: Callable[[ManagerConnection, ToManager], None],
        on_close: Callable[[ManagerConnection, str], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.on_message = on_message
        self.on_close = on_close
        self.strangers: dict[ManagerConnection, None] = {}  # in order of arrival
        self._context = credential.server_context()
        self._context.num_tickets = 0  # no caller resumes a TLS session
        self._port = port
        self._log = log
        self.refusals = RefusalLog(lambda why: log("caller refused", why))
        self._listeners: dict[str, socket.socket] = {}

    async def listen(self, address: str, listener: socket.socket | None = None) -> None:
        """Listen on an address, unless the server already does."""
        if address not in self._listeners:
            sock = listener or socket.create_server((address, self._port), backlog=1024)
            sock.setblocking(False)
            self._listeners[address] = sock
            self._resume(sock)
            self._log("listening", f"{address}:{self._port}")

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPT_BATCH):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # such as too many open files
                self.refusals.add(f"cannot accept a caller: {error.strerror}")
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(RETRY_SECONDS, self._resume, listener)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self.strangers) >= MAX_STRANGERS:
                next(iter(self.strangers)).refuse("too many callers are in the handshake, this one longest")
            connection = ManagerConnection(self, f"{peer[0]}:{peer[1]}")
            self.strangers[connection] = None
            connection.shake_hands(sock, self._context)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners.values():
            loop.remove_reader(listener)
            listener.close()
        for stranger in list(self.strangers):
            stranger.close("the job is over")


def explain_handshake(error: OSError) -> str:
    """Explain why the handshake with a caller failed."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not the job's (it belongs to another job)"
    if isinstance(error, ssl.SSLError):
        if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return "it has no certificate of the job"
        return f"it did not complete a TLS 1.3 handshake ({error.reason or error})"
    if isinstance(error, ConnectionAbortedError):
        return f"it did not complete a TLS 1.3 handshake within {HANDSHAKE_SECONDS:.0f} s"
    return f"it disconnected during the TLS handshake ({error or type(error).__name__})"
