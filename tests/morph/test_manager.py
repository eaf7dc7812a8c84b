"""A real manager on a loopback port, with agents of the test and with unknown callers."""

import asyncio
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.jobs import ROOT
from varuna.morph import events
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.journal import Journal
from varuna.morph.protocol.messages import (
    AgentHello,
    ManagerReply,
    ManagerRequest,
    Welcome,
    read_from_manager,
    write_message,
)
from varuna.morph.protocol.orders import AGENT_COMMAND, AgentOrders, StartedAgent
from varuna.morph.protocol.wire import Wire
from varuna.morph.run.client import send_request
from varuna.morph.run.job_folder import ManagerContact
from varuna.morph.run.manager import Manager
from varuna.morph.state import JobState, MachinePlan
from varuna.types import JobSpec

SECRET = b"s" * 32


class NoStarter:
    """Starts no agents."""

    def start(self, orders: AgentOrders) -> StartedAgent:
        raise OSError("this machine is far away")


class BrokenStarter:
    """Starts agents whose state cannot be read."""

    def start(self, orders: AgentOrders) -> StartedAgent:
        return self  # type: ignore[return-value]

    def ended(self) -> str | None:
        raise RuntimeError("the scheduler failed")


class RunningManager:
    """A manager that runs in its own thread."""

    def __init__(
        self, folder: Path, *, secret: bytes = SECRET, starter: NoStarter | BrokenStarter | None = None
    ) -> None:
        (folder / "machines").write_text("10.9.9.9\n")
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.folder = folder
        job = JobSpec(
            script="script.py",
            code_dir=str(folder),
            log_dir=str(folder),
            devices_per_machine=1,
            environment={"COLOUR": "green"},
            machine_list=str(folder / "machines"),
            slow_file=str(folder / "slow"),
        )
        contact = ManagerContact("job", os.getpid(), "127.0.0.1", self.port, secret.hex(), str(folder))

        async def lead() -> None:
            clock = SuspendAwareClock(time.monotonic)
            manager = Manager(
                job,
                contact,
                JobState(since=clock.now()),
                planner=lambda machines: MachinePlan(machines, problem="no plan"),
                starter_of=lambda machine: starter or NoStarter(),
                newest=lambda store: None,
                address_for=lambda machine: "127.0.0.1",
                journal=Journal(folder / "journal"),
                clock=clock,
                say=lambda text: None,
            )
            await manager.run(self.listener, signals=False)

        self.lead = lead
        self.thread = threading.Thread(target=lambda: asyncio.run(lead()))

    def ask(self, what: str, *, secret: bytes = SECRET, **facts: object) -> ManagerReply:
        return send_request("127.0.0.1", self.port, secret, ManagerRequest("job", what, **facts))  # type: ignore[arg-type]

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def refusals(self) -> list[str]:
        lines = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [line["why"] for line in lines if line["what"] == "caller refused"]


@contextmanager
def led(folder: Path) -> Iterator[RunningManager]:
    manager = RunningManager(folder)
    manager.thread.start()
    try:
        yield manager
    finally:
        manager.ask("stop", save=False)
        manager.thread.join()


def rest(connection: socket.socket) -> bytes:
    """Return all bytes until the other side disconnects."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_unknown_callers_are_refused_and_logged(tmp_path: Path) -> None:
    """V46: invalid bytes, another secret, a replayed message, a too long message, and silence."""
    with led(tmp_path) as manager, manager.dial() as silent:
        with manager.dial() as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            rest(stranger)
        with pytest.raises(ConnectionResetError):
            manager.ask("stop", secret=b"t" * 32)
        recorded = b""
        friend = Wire(SECRET, is_caller=True)
        with manager.dial() as connection:
            connection.sendall(friend.greeting)
            while not friend.greeted:
                friend.feed(connection.recv(65536))
            recorded = friend.greeting + friend.pack(write_message(ManagerRequest("job", "status")))
        with manager.dial() as thief:
            thief.sendall(recorded)
            rest(thief)
        with manager.dial() as glutton:
            glutton.sendall(Wire(SECRET, is_caller=True).greeting + b"\xff" * 100)
            rest(glutton)
        status = json.loads(bytes(manager.ask("status").status))
        assert status["phase"] == "gathering" and status["machines"][0]["machine"] == "10.9.9.9"
        reasons = [why.split(": ", 1)[1] for why in manager.refusals()]
        assert [reason.split(" ")[0] for reason in reasons] == ["expected", "message", "message", "a"]
        silent.settimeout(30)
        rest(silent)  # the manager closes it after a time
        assert "did not prove" in manager.refusals()[-1]


def test_an_agent_gets_the_environment_and_is_dismissed_if_its_machine_is_not_listed(
    tmp_path: Path,
) -> None:
    with led(tmp_path) as manager:
        for machine, answers in [("10.9.9.9", ["Welcome"]), ("10.8.8.8", ["Welcome", "Dismiss"])]:
            wire, heard = Wire(SECRET, is_caller=True), list[object]()
            with manager.dial() as connection:
                connection.sendall(wire.greeting)
                while not wire.greeted:
                    wire.feed(connection.recv(65536))
                hello = AgentHello("job", 1, events.AgentJoined(machine, "agent", None, "127.0.0.1"))
                connection.sendall(wire.pack(write_message(hello)))
                while len(heard) < len(answers):
                    heard += [read_from_manager(payload) for payload in wire.feed(connection.recv(65536))]
            assert [type(message).__name__ for message in heard] == answers
            assert heard[0] == Welcome({"COLOUR": "green"})


def test_invalid_requests_get_an_error_reply(tmp_path: Path) -> None:
    with led(tmp_path) as manager:
        assert not manager.ask("dance").ok
        assert "not a machine of this job" in manager.ask("drain", machine="10.1.1.1").text
        assert "not on a connected machine" in manager.ask("logs", rank=7).text


def test_an_agent_of_an_earlier_job_exits_when_the_manager_does_not_know_its_secret(
    tmp_path: Path,
) -> None:
    """V46: each job has its own secret."""
    with led(tmp_path) as manager:
        orders = AgentOrders(
            job="before", machine="10.9.9.9", manager=f"127.0.0.1:{manager.port}", secret="ab" * 32
        )
        agent = subprocess.run(
            AGENT_COMMAND, input=orders.line(), env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
        )
        assert agent.returncode == 0
        assert all("wrong signature" in why for why in manager.refusals())


def test_a_manager_whose_starter_fails_raises(tmp_path: Path) -> None:
    manager = RunningManager(tmp_path, starter=BrokenStarter())
    with pytest.raises(RuntimeError, match="the scheduler failed"):
        asyncio.run(manager.lead())


def test_a_full_disk_of_the_event_log_does_not_end_the_manager(tmp_path: Path) -> None:
    """V45"""
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with led(tmp_path) as manager:
        assert json.loads(bytes(manager.ask("status").status))["job"] == "job"
