"""A stub manager for tests of starters: accepts stub agents and sends them commands."""

import contextlib
import hashlib
import json
import socket
from types import TracebackType
from typing import Any, Self

from varuna.morph.protocol.orders import AgentOrders
from varuna.secure.credential import make_credential


class StubConnection:
    """The connection of one stub agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._heard, self._told = connection.makefile("r"), connection.makefile("w")
        self.hello = self.hear()

    def hear(self) -> dict[str, Any]:
        return json.loads(self._heard.readline())  # type: ignore[no-any-return]

    def tell(self, line: str) -> None:
        print(line, file=self._told, flush=True)

    def wait_until_gone(self) -> None:
        with contextlib.suppress(ConnectionError):  # killed with something unread
            assert self._heard.readline() == ""

    def hear_until_gone(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        with contextlib.suppress(ConnectionError):
            while line := self._heard.readline():
                lines.append(json.loads(line))
        return lines

    def close(self) -> None:
        self._heard.close()
        with contextlib.suppress(OSError):
            self._told.close()
        self._connection.close()


class StubManager:
    def __init__(self, address: str) -> None:
        self.credential = make_credential("job")
        self.secret = self.credential.key.splitlines()[1]  # a line of the private key
        self._server = socket.create_server((address, 0))
        self._server.settimeout(60)
        self.dialled_in: list[StubConnection] = []

    def orders(self, machine: str) -> AgentOrders:
        host, port = self._server.getsockname()
        return AgentOrders(job="job", machine=machine, manager=f"{host}:{port}", credential=self.credential)

    def accept(self) -> StubConnection:
        connection, _ = self._server.accept()
        agent = StubConnection(connection)
        assert agent.hello["proof"] == hashlib.sha256(self.credential.key.encode()).hexdigest()
        self.dialled_in.append(agent)
        return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.dialled_in:
            agent.close()
        self._server.close()
