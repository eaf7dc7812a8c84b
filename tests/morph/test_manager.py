"""A real manager on a loopback port, with agents of the test and with unknown callers."""

import asyncio
import errno
import json
import math
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.jobs import ROOT, environment
from varuna.morph import events
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.journal import Journal
from varuna.morph.protocol.generations import MACHINES
from varuna.morph.protocol.messages import (
    AgentHello,
    LogPage,
    LogReply,
    LogRequest,
    ManagerReply,
    ManagerRequest,
    Welcome,
    read_from_manager,
    write_message,
)
from varuna.morph.protocol.orders import AGENT_COMMAND, AgentOrders, StartedAgent
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.run import connections
from varuna.morph.run import manager as manager_module
from varuna.morph.run.client import send_request
from varuna.morph.run.job_folder import JobFolder, ManagerContact, saved_path
from varuna.morph.run.manager import Manager
from varuna.morph.run.requests import RequestHandler
from varuna.morph.state import JobState, MachinePlan, WorkerProgress
from varuna.secure.credential import JobCredential, make_credential
from varuna.types import JobSpec

CREDENTIAL = make_credential("job")
OTHER = make_credential("job")


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
        self,
        folder: Path,
        *,
        machines: str = "10.9.9.9\n",
        starter: NoStarter | BrokenStarter | None = None,
        resumes: bool = False,
    ) -> None:
        (folder / "machines").write_text(machines)
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
        self.contact = contact = ManagerContact(
            "job", os.getpid(), "127.0.0.1", self.port, CREDENTIAL, str(folder)
        )

        async def lead() -> None:
            clock = SuspendAwareClock(time.monotonic)
            self.manager = manager = Manager(
                job,
                contact,
                JobState(since=clock.now(), attach_until=clock.now() * resumes),
                planner=lambda machines, devices=0: MachinePlan(machines, problem="no plan"),
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

    def ask(self, what: str, *, credential: JobCredential = CREDENTIAL, **facts: object) -> ManagerReply:
        request = ManagerRequest("job", what, **facts)  # type: ignore[arg-type]
        return send_request("127.0.0.1", self.port, credential, request)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def wait_for_refusals(self, count: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(found := self.refusals()) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def refusals(self) -> list[str]:
        lines = [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]
        return [line["why"] for line in lines if line["what"] == "caller refused"]


@contextmanager
def led(folder: Path, *, machines: str = "10.9.9.9\n", resumes: bool = False) -> Iterator[RunningManager]:
    manager = RunningManager(folder, machines=machines, resumes=resumes)
    manager.thread.start()
    manager.ask("status")  # it runs
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


def careless(credential: JobCredential | None) -> ssl.SSLContext:
    """Return a context that trusts any server, with the certificate of a job or without one."""
    context = credential.client_context() if credential else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def dismissed(connection: socket.socket, data: bytes, context: ssl.SSLContext | None = None) -> None:
    """Send bytes, over TLS if there is a context, and wait until the manager disconnects without a reply."""
    with suppress(ssl.SSLError, ConnectionError, BrokenPipeError):
        if context is not None:
            connection = context.wrap_socket(connection)
        connection.sendall(data)
        assert rest(connection) == b"" or context is None
    connection.close()


def record(manager: RunningManager) -> bytes:
    """Return the bytes that a member of the job sends for a request, as seen on the network."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    friend = CREDENTIAL.client_context().wrap_bio(incoming, outgoing)
    recorded = b""
    with manager.dial() as connection:
        sent = False
        while not sent:
            try:
                friend.do_handshake()
                friend.write(pack_message(write_message(ManagerRequest("job", "stop"))))
                sent = True
            except ssl.SSLWantReadError:
                pass
            recorded += (data := outgoing.read())
            if not sent:
                connection.sendall(data)
                incoming.write(connection.recv(65536))
    return recorded


def test_unknown_callers_are_refused_and_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """V46, SEC-4: whoever does not prove that it has the job's key gets no reply, and the log names it."""
    request = pack_message(write_message(ManagerRequest("job", "stop")))
    attacks: list[tuple[str, bytes, ssl.SSLContext | None]] = [
        ("TLS 1.3 handshake", b"GET / HTTP/1.1\r\n\r\n", None),
        ("TLS 1.3 handshake", os.urandom(300), None),
        ("TLS 1.3 handshake", b"\xff\xff\xff\xff" + bytes(1000), None),
        ("TLS 1.3 handshake", request, None),
        ("no certificate of the job", request, careless(None)),
        ("not the job's", request, careless(OTHER)),
        ("4294967295 bytes, but the limit is", b"\xff\xff\xff\xff", CREDENTIAL.client_context()),
        ("JSON is malformed", pack_message(b"hello"), CREDENTIAL.client_context()),
    ]
    with led(tmp_path) as manager:
        for reason, data, context in attacks:
            before = len(manager.refusals())
            connection = manager.dial()
            peer = "{}:{}".format(*connection.getsockname())
            dismissed(connection, data, context)
            (refusal,) = manager.wait_for_refusals(before + 1)[before:]
            assert refusal.startswith(f"{peer}: ") and reason in refusal
        with pytest.raises(ssl.SSLCertVerificationError):
            manager.ask("stop", credential=OTHER)
        status = json.loads(bytes(manager.ask("status").status))
        assert status["phase"] == "gathering" and status["machines"][0]["machine"] == "10.9.9.9"
    assert "Traceback" not in "".join(capfd.readouterr())


def test_replayed_bytes_of_a_member_are_refused(tmp_path: Path) -> None:
    """V46, SEC-4"""
    with led(tmp_path) as manager:
        recorded = record(manager)
        before = len(manager.wait_for_refusals(1))  # the recorded request did not reach the manager
        dismissed(manager.dial(), recorded)
        assert "TLS 1.3 handshake" in manager.wait_for_refusals(before + 1)[-1]
        assert json.loads(bytes(manager.ask("status").status))["phase"] == "gathering"


def test_silent_and_slow_callers_are_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-4: a caller cannot keep a connection without proving that it belongs to the job."""
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(connections, "FIRST_MESSAGE_SECONDS", 0.5)
    with led(tmp_path) as manager:
        with manager.dial() as silent, manager.dial() as slow:
            for byte in record(manager):
                slow.sendall(bytes([byte]))
                if select.select([slow], [], [], 0.1)[0]:
                    break  # the manager has disconnected it
            else:
                raise AssertionError("it sent everything")
            assert rest(silent) == rest(slow) == b""
        with CREDENTIAL.client_context().wrap_socket(manager.dial()) as mute:
            assert rest(mute) == b""
        reasons = manager.wait_for_refusals(4)
        assert sum("did not complete a TLS 1.3 handshake within" in why for why in reasons) == 2
        assert "it sent no message within the time limit" in reasons[-1]


def test_idle_connections_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-4: with too many callers in the handshake, the oldest is disconnected."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 20)
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 600.0)
    with led(tmp_path) as manager, ExitStack() as stack:
        idle = [stack.enter_context(manager.dial()) for _ in range(50)]
        assert json.loads(bytes(manager.ask("status").status))["phase"] == "gathering"
        assert [rest(connection) for connection in idle[:30]] == [b""] * 30
        assert "this one longest" in manager.refusals()[0] and len(manager.refusals()) < 20
        idle[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            idle[-1].recv(1)


def test_no_free_file_descriptor_is_logged_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEC-4"""
    monkeypatch.setattr(connections, "RETRY_SECONDS", 0.05)
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def accept_later(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(listener)

    with led(tmp_path) as manager:
        monkeypatch.setattr(socket.socket, "accept", accept_later)
        assert json.loads(bytes(manager.ask("status").status))["phase"] == "gathering"
        assert manager.refusals() == ["cannot accept a caller: Too many open files"]


def test_an_agent_gets_the_environment_and_is_dismissed_if_its_machine_is_not_listed(
    tmp_path: Path,
) -> None:
    with led(tmp_path) as manager:
        for machine, answers in [("10.9.9.9", ["Welcome"]), ("10.8.8.8", ["Welcome", "Dismiss"])]:
            frames, heard = MessageReader(), list[object]()
            with CREDENTIAL.client_context().wrap_socket(manager.dial()) as connection:
                hello = AgentHello("job", 1, events.AgentJoined(machine, "agent", None, "127.0.0.1"))
                connection.sendall(pack_message(write_message(hello)))
                while len(heard) < len(answers):
                    heard += [read_from_manager(payload) for payload in frames.feed(connection.recv(65536))]
            assert [type(message).__name__ for message in heard] == answers
            assert heard[0] == Welcome({"COLOUR": "green"})


def test_the_contact_file_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manager.json").write_text(
        '{"job": "a", "pid": 1, "address": "127.0.0.1", "port": 1, "secret": "00", "log_dir": ""}'
    )
    with pytest.raises(ValueError, match=r"an earlier version of varuna, .* wrote .*/manager.json"):
        JobFolder(tmp_path).read_contact()


def test_the_status_of_a_thousand_machines_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REL-5: with four workers each, in the client and in `varuna status`."""
    monkeypatch.setattr(manager_module, "EXIT_SECONDS", 0.0)
    names = [f"10.{n // 250}.{n % 250}.1" for n in range(1000)]
    workers = tuple(WorkerProgress(rank, pid=1000 + rank, iteration=7, store="s" * 500) for rank in range(4))
    folder = JobFolder(saved_path(tmp_path / "home", tmp_path).with_suffix(""))
    with led(tmp_path, machines="\n".join(names)) as running:
        for name in names:
            stub = SimpleNamespace(
                heard=math.inf,
                agent=name,
                machine=name,
                pid=1,
                progress=workers,
                send=lambda message: None,
                close=lambda why: None,
            )
            running.manager.agents[name] = stub  # type: ignore[assignment]
        found = json.loads(bytes(running.ask("status").status))
        assert [machine["machine"] for machine in found["machines"]] == names
        assert {len(machine["workers"]) for machine in found["machines"]} == {4}
        folder.write_contact(running.contact)
        for options in ([], ["--json"]):
            shown = subprocess.run(
                [sys.executable, "-m", "varuna", "status", *options],
                cwd=tmp_path,
                env=environment(tmp_path),
                capture_output=True,
                text=True,
            )
            assert shown.returncode == 0 and all(name in shown.stdout for name in names), shown.stderr


def test_invalid_requests_get_an_error_reply(tmp_path: Path) -> None:
    with led(tmp_path) as manager:
        assert not manager.ask("dance").ok
        assert "not a machine of this job" in manager.ask("drain", machine="10.1.1.1").text
        assert "not on a connected machine" in manager.ask("logs", rank=7).text


class AnsweringAgent:
    """Answers each request for a log with the name of its machine."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.handler: RequestHandler | None = None

    def send(self, message: LogRequest) -> None:
        assert self.handler is not None
        self.handler.forward_log(LogReply(message.request, LogPage(0, 1, data=self.machine.encode())))


class Caller:
    def __init__(self) -> None:
        self.replies: list[ManagerReply] = []
        self.send = self.replies.append

    def close_when_idle(self) -> None:
        pass


def test_the_log_of_an_earlier_generation_comes_from_the_machine_that_ran_it(tmp_path: Path) -> None:
    """SEE-2: ranks change their machines with each generation."""
    folder = tmp_path / "generation_1"
    folder.mkdir()
    (folder / MACHINES).write_text('{"a": [0], "b": [1], "c": [2]}')
    agents = {name: AnsweringAgent(name) for name in ("a", "b")}

    async def ask(present: object, **fields: object) -> ManagerReply:
        handler: Any = RequestHandler(
            "job",
            log_dir=str(tmp_path),
            agents=agents,  # type: ignore[arg-type]
            slow_machines=(),
            ledger=lambda: None,  # type: ignore[arg-type,return-value]
            view=lambda: None,  # type: ignore[arg-type,return-value]
            put_event=lambda event: None,
        )
        for agent in agents.values():
            agent.handler = handler
        caller = Caller()
        request = ManagerRequest("job", "logs", **fields)  # type: ignore[arg-type]
        handler.handle(caller, request, SimpleNamespace(generation=present), now=0.0)
        (reply,) = caller.replies
        return reply

    present = SimpleNamespace(number=3, machine_of={1: "a"}.get)
    for running in (present, None):
        found = asyncio.run(ask(running, rank=1, generation=1))
        assert found.log is not None
        assert (found.log.data, found.machine, found.generation) == (b"b", "b", 1)
        refused = asyncio.run(ask(running, rank=2, generation=1))
        assert refused.text == "rank 2 of generation 1 is on c, which is not connected"
    for number in (None, 3, 2):  # the machines of generation 2 are not known
        found = asyncio.run(ask(present, rank=1, generation=number))
        assert (found.machine, found.generation) == ("a", number or 3)


def test_an_agent_of_an_earlier_job_exits_when_its_patience_ends(tmp_path: Path) -> None:
    """V46: each job has its own credential."""
    with led(tmp_path) as manager:
        orders = AgentOrders(
            job="before",
            machine="10.9.9.9",
            manager=f"127.0.0.1:{manager.port}",
            credential=OTHER,
            patience_seconds=2.0,
        )
        agent = subprocess.run(
            AGENT_COMMAND, input=orders.line(), env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
        )
        assert agent.returncode == 0
        assert manager.refusals() and all("handshake" in why for why in manager.refusals())


def test_a_manager_whose_starter_fails_raises(tmp_path: Path) -> None:
    manager = RunningManager(tmp_path, starter=BrokenStarter())
    with pytest.raises(RuntimeError, match="the scheduler failed"):
        asyncio.run(manager.lead())


def test_a_full_disk_of_the_event_log_does_not_end_the_manager(tmp_path: Path) -> None:
    """V45"""
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    with led(tmp_path) as manager:
        assert json.loads(bytes(manager.ask("status").status))["job"] == "job"


def test_a_resumed_manager_reports_a_damaged_ledger(tmp_path: Path) -> None:
    """PRO-4: once, as an event that says from when the ledger counts."""
    (tmp_path / "ledger.json").write_text('{"begun_at": 17')
    with led(tmp_path, resumes=True):
        lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (why,) = [line["why"] for line in lines if line["what"] == "ledger"]
    assert (
        "is not a valid Ledger" in why and "(kept as ledger.json.damaged); the ledger counts from 20" in why
    )
    assert (tmp_path / "ledger.json.damaged").read_text() == '{"begun_at": 17'
