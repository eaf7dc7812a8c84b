"""Connections of the manager: accept agents and commands that know the job's secret, refuse the rest."""

import asyncio
import socket
from collections.abc import Callable

import msgspec

from varuna.morph import commands
from varuna.morph.protocol.messages import ManagerMessage, ToManager, read_to_manager, write_message
from varuna.morph.protocol.wire import Wire, WireError
from varuna.morph.state import WorkerProgress

FIRST_MESSAGE_SECONDS = 5.0
"""Time limit for the first message of a caller."""
MAX_STRANGERS = 2048
"""Limit for callers without a verified message; more are disconnected at once."""


class ManagerConnection(asyncio.Protocol):
    """One caller: a stranger until its first verified message, then an agent or a command."""

    def __init__(self, server: "ConnectionServer") -> None:
        self._server = server
        self._wire = Wire(server.secret, is_caller=False)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed_because = ""
        self.agent = ""
        self.machine = ""
        self.pid = 0
        self.progress: tuple[WorkerProgress, ...] = ()  # of the last heartbeat

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._server.strangers) >= MAX_STRANGERS:
            self.close("too many callers without a first message")
            return
        self._server.strangers.add(self)
        transport.write(self._wire.greeting)
        why = "it did not prove within the time limit that it knows the job's secret"
        self._timer = asyncio.get_running_loop().call_later(FIRST_MESSAGE_SECONDS, self.refuse, why)

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._wire.feed(data):
                message = read_to_manager(payload)
                self._end_probation()
                self._server.on_message(self, message)
        except (WireError, msgspec.DecodeError) as error:
            self.refuse(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._end_probation()
        self._server.on_close(self, self._closed_because or (str(error) if error else "it disconnected"))

    def _end_probation(self) -> None:
        self._server.strangers.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def refuse(self, why: str) -> None:
        """Disconnect the caller. The log gets the reason, the caller does not."""
        peer = self._transport.get_extra_info("peername") if self._transport is not None else None
        self._server.log_refusal(f"{peer}: {why}")
        self.close(why)

    def send(self, message: ManagerMessage | commands.Command) -> None:
        if self._transport is not None and not self._transport.is_closing() and self._wire.greeted:
            self._transport.write(self._wire.pack(write_message(message)))

    def close(self, why: str) -> None:
        self._closed_because = why
        if self._transport is not None:
            self._transport.close()


class ConnectionServer:
    """Listens on one port of one or more addresses."""

    def __init__(
        self,
        secret: bytes,
        port: int,
        *,
        on_message: Callable[[ManagerConnection, ToManager], None],
        on_close: Callable[[ManagerConnection, str], None],
        log: Callable[[str, str], None],
    ) -> None:
        self.secret = secret
        self.on_message = on_message
        self.on_close = on_close
        self.strangers: set[ManagerConnection] = set()
        self._port = port
        self._log = log
        self._num_refused = 0
        self._servers: dict[str, asyncio.Server] = {}

    async def listen(self, address: str, listener: socket.socket | None = None) -> None:
        """Listen on an address, unless the server already does."""
        if address not in self._servers:
            sock = listener or socket.create_server((address, self._port))
            loop = asyncio.get_running_loop()
            self._servers[address] = await loop.create_server(lambda: ManagerConnection(self), sock=sock)
            self._log("listening", f"{address}:{self._port}")

    def log_refusal(self, why: str) -> None:
        """Log the first ten refusals, then ever fewer: endless callers must not fill the disk."""
        self._num_refused = count = self._num_refused + 1
        if count <= 10 or not count & (count - 1):
            self._log("caller refused", why + (f" (refusal {count})" if count > 10 else ""))

    def close(self) -> None:
        for server in self._servers.values():
            server.close()
