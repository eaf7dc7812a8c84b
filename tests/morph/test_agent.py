"""Agents: a manager that is away, and orders that come too late."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from varuna.morph import events
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.run import agent
from varuna.morph.run.supervisor import Supervisor, WorkerProcess
from varuna.secure.credential import make_credential
from varuna.types import Layout, MorphOrder


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


def order_to(generation: int, *, old: int, rank: int | None) -> MorphOrder:
    return MorphOrder(
        generation=generation,
        layout=Layout(((0,),), 2, 1),
        last_layout=Layout(((0, 1),), 2, 1),
        rank=rank,
        previous=(0,),
        leaving=(1,),
        old_rank=old,
        master_addr="127.0.0.1",
        master_port=1,
    )


def test_the_manager_hears_of_a_worker_that_is_killed_while_it_leaves(tmp_path: Path) -> None:
    """HOT-3: another worker of its machine stays; the ranks that stay may wait for its state.

    A manager that is restarted hears of it, too.
    """
    sent: list[Any] = []
    own = agent.Agent(
        AgentOrders(job="job", machine="a", manager="127.0.0.1:1", credential=make_credential("job"))
    )
    own.send = sent.append  # type: ignore[method-assign]
    workers = [WorkerProcess(rank, tmp_path, key=f"2/{rank}", shows_progress=True) for rank in (0, 1)]
    own.supervisor.workers = dict(enumerate(workers))
    orders = {old: order_to(3, old=old, rank=rank) for old, rank in ((0, 0), (1, None))}
    own.supervisor.morph_workers(orders, tmp_path / "generation_3")
    assert own.supervisor.leaving == [workers[1]]
    own.supervisor._handle_answer("ended", {"key": "2/1", "code": -9})
    start: Any = SimpleNamespace(
        generation=3, joins=False, workers=SimpleNamespace(ranks=(1,), master_port=1)
    )
    own.start = start
    own.send_hello()
    first, again = [one for one in sent if isinstance(one, events.LeaverFailed)]
    assert first == again and first.generation == 3 and first.outcome == workers[1].outcome
    workers[0].end(0)


@pytest.mark.parametrize("stays", [False, True])
def test_a_worker_without_an_order_is_given_up_and_killed(tmp_path: Path, stays: bool) -> None:
    """HOT-3: a joiner that did not enter in time still runs when the order without it comes."""
    requests: list[tuple[str, str]] = []
    sent = SupervisorWithRequests(requests)
    workers = [WorkerProcess(rank, tmp_path, key=f"2/{rank}", shows_progress=True) for rank in (0, 1)]
    sent.workers = dict(enumerate(workers)) if stays else {1: workers[1]}
    orders = {0: order_to(3, old=0, rank=0)} if stays else {}
    sent.morph_workers(orders, tmp_path / "generation_3")
    assert requests == [("signal", "2/1")]
    assert sent.leaving == ([workers[1]] if stays else [])
    assert list(sent.workers) == ([0] if stays else [1]), "their end is that of the generation"
    for worker in workers:
        worker.end(0)


class SupervisorWithRequests(Supervisor):
    """A supervisor that keeps its requests to the fork server."""

    def __init__(self, requests: list[tuple[str, str]]) -> None:
        super().__init__()
        self._kept = requests

    def _request(self, what: str, **facts: Any) -> None:
        self._kept.append((what, facts["key"]))
