"""Agents: a manager that is away, and orders that come too late."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.run import agent
from varuna.secure.credential import make_credential


def test_a_stranger_on_the_managers_port_does_not_end_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-2: the manager is away, and another program listens at its address."""
    monkeypatch.setattr(agent, "RECONNECT_SECONDS", 0.001)
    strangers = make_credential("another job").server_context()

    async def knock() -> bool:
        calls = asyncio.Queue[None]()
        listener = socket.create_server(("127.0.0.1", 0))
        loop = asyncio.get_running_loop()

        async def accept() -> None:
            listener.setblocking(False)
            while True:
                connection, _ = await loop.sock_accept(listener)
                calls.put_nowait(None)
                try:
                    await loop.connect_accepted_socket(asyncio.Protocol, connection, ssl=strangers)
                except OSError:
                    connection.close()

        accepting = asyncio.create_task(accept())
        own = agent.Agent(
            AgentOrders(
                job="job",
                machine="127.0.0.1",
                manager=f"127.0.0.1:{listener.getsockname()[1]}",
                credential=make_credential("job"),
            )
        )
        connecting = asyncio.create_task(own.stay_connected())
        for _ in range(3 * agent.MAX_REFUSALS):
            await asyncio.wait_for(calls.get(), 30)
        for task in (connecting, accepting):
            task.cancel()
        listener.close()
        return own.over.is_set()

    assert not asyncio.run(knock())


def test_an_agent_opens_another_store_if_an_order_used_it_after_its_workers_had_ended() -> None:
    """REL-2: the manager counts the store as used, and waits for another one before it starts workers."""
    opened: list[str] = []
    late: Any = SimpleNamespace(
        address="127.0.0.1",
        start=SimpleNamespace(generation=1),
        reported_end=True,
        supervisor=SimpleNamespace(store_port=4000, open_store=opened.append),
    )
    for port, ranks in ((4000, (0,)), (4001, (0,)), (4000, ())):
        order: Any = SimpleNamespace(generation=2, workers=SimpleNamespace(ranks=ranks, master_port=port))
        agent.Agent.morph_workers(late, order)
    assert opened == ["127.0.0.1"]  # its own store, for workers of its own
