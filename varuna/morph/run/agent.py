"""The agent of one machine: `python -m varuna.morph.run.agent`, with its orders as one line on stdin.

It connects to the manager and obeys it: starts this machine's workers, makes them save, kills them.
It decides one thing itself. If it cannot reach the manager's machine for `lease_seconds`, the manager
has given this machine up, so it kills the workers. If only the manager's process is gone, the workers
continue, because the manager may be restarted.
"""

import asyncio
import os
import secrets
import signal
import socket
import ssl
import sys
import time
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from varuna.addresses import is_loopback
from varuna.codec import decode
from varuna.environment import VarunaEnvironment
from varuna.morph import commands, events
from varuna.morph.protocol import messages
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.run.cloud_poll import CloudListener
from varuna.morph.run.forkserver import LEASE_SECONDS, PRELOADED
from varuna.morph.run.log_pages import answer
from varuna.morph.run.supervisor import Supervisor, WorkerProcess
from varuna.morph.run.worker_env import make_orders
from varuna.secure.framing import FramingError

RECONNECT_SECONDS = 0.25
CONNECT_SECONDS = 3.0
NOTICE_SECONDS = 30.0
"""Assumed time until the machine is taken away after SIGTERM."""
MORPH_POLL_SECONDS = 0.01
MAX_STORE_ENDS = 10
"""Stores that may end unexpectedly in one generation; one more ends the agent."""
MAX_REFUSALS = 8
"""Unanswered hellos in a row after which the agent exits: the manager does not want it."""


class Agent:
    def __init__(self, orders: AgentOrders) -> None:
        self.orders = orders
        self.name = secrets.token_hex(8)
        self.address = "127.0.0.1"  # of this machine, as the manager sees it
        self.start: messages.StartWorkers | None = None
        self.reported_end = False
        self.leaver: events.LeaverFailed | None = None  # the last one
        self.num_store_ends = 0  # since the last generation
        self.supervisor = Supervisor(
            orders.credential,
            on_worker_end=self.worker_ended,
            on_ready=lambda: self.supervisor.open_store(self.address),
            on_store=self.store_opened,
            on_store_end=self.store_ended,
            on_exit=self.end,
            on_worker_left=lambda worker: report_leaver(self, worker),
        )
        self.cloud = CloudListener(orders, self.send) if orders.cloud else None
        self.tls = orders.credential.client_context()
        self.writer: asyncio.StreamWriter | None = None
        self.heard = time.monotonic()  # last sign of life of the manager's machine
        self.connected_at = time.monotonic()  # last contact with the manager
        self.num_refusals = 0  # since the last message from the manager
        self.over = asyncio.Event()
        self.socket_name = f"varuna-{secrets.token_hex(8)}"
        self.got_sigterm = False
        self.tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ start and end

    async def live(self) -> int:
        """Run until the agent is dismissed; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.terminated)
        notice_server = await self.listen_for_notices()
        tasks = [asyncio.create_task(job()) for job in (self.stay_connected, self.send_heartbeats)]
        if self.cloud is not None:
            tasks.append(asyncio.create_task(self.cloud.poll()))
        over = asyncio.create_task(self.over.wait())
        done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        crashed = [task.exception() for task in done if task is not over]
        if notice_server is not None:
            notice_server.close()
        self.over.set()
        self.supervisor.signal_workers(signal.SIGKILL)
        await self.supervisor.close()
        for error in crashed:
            traceback.print_exception(error)
        return 1 if crashed else 0

    def end(self, why: str) -> None:
        self.over.set()
        with suppress(OSError):  # its log may be on a full disk
            print(f"the agent exits: {why}", flush=True)

    def terminated(self) -> None:
        """Report SIGTERM as a notice; exit at the second one, or if no worker runs."""
        if self.got_sigterm or self.writer is None or not self.supervisor.live_workers:
            self.end("SIGTERM")
        self.got_sigterm = True
        self.send(messages.PreemptionReport(NOTICE_SECONDS, "the agent got SIGTERM"))

    async def listen_for_notices(self) -> asyncio.AbstractServer | None:
        """Accept notices as JSON lines on a local socket, from processes of the same user."""
        if sys.platform != "linux":
            return None

        async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(Exception):  # invalid input must not end the agent
                peer = writer.get_extra_info("socket")
                credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if int.from_bytes(credentials[4:8], sys.byteorder) == os.getuid():
                    line = await asyncio.wait_for(reader.readline(), 5)
                    self.send(decode(line, messages.PreemptionReport, "a notice"))
                    writer.write(b"ok\n" if self.writer is not None else b"no manager\n")
            writer.close()

        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.socket_name)
        return await asyncio.start_unix_server(receive, sock=listener, limit=4096)

    # ------------------------------------------------------------ connection to the manager

    async def stay_connected(self) -> None:
        host, _, port = self.orders.manager.rpartition(":")
        while True:
            try:
                await self.talk_to(host.strip("[]"), int(port))
            except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, ssl.SSLError):
                # Its machine lives, and the manager may be restarted. A stranger that takes the manager's
                # port meanwhile must not end the agent.
                self.heard = time.monotonic()
            except (OSError, FramingError, ValueError):
                pass
            finally:
                self.writer = None
            now = time.monotonic()
            if now - self.heard > self.orders.lease_seconds:
                self.supervisor.signal_workers(signal.SIGKILL)
            if now - self.connected_at > self.orders.patience_seconds:
                self.end("no manager")
            if self.num_refusals >= MAX_REFUSALS:
                self.end("the manager does not answer its hello")
            await asyncio.sleep(RECONNECT_SECONDS)
            while self.over.is_set():  # do not reconnect while exiting
                await asyncio.sleep(RECONNECT_SECONDS)

    async def talk_to(self, host: str, port: int) -> None:
        """Connect, and obey the manager until the connection ends."""
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port, ssl=self.tls), CONNECT_SECONDS
        )
        frames = MessageReader()
        try:
            self.set_up(writer.get_extra_info("socket"))
            self.writer = writer
            self.send_hello()
            self.num_refusals += 1
            while data := await reader.read(65536):
                self.heard = self.connected_at = time.monotonic()
                for payload in frames.feed(data):
                    self.num_refusals = 0
                    await self.obey(messages.read_from_manager(payload))
            self.heard = time.monotonic()
        finally:
            writer.close()

    def set_up(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # else the kernel retries for 15 minutes
            lease = int(self.orders.lease_seconds * 1000)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lease)
        own = connection.getsockname()[0]
        both_loopback = is_loopback(own) and is_loopback(self.orders.machine)
        self.address = self.orders.machine if both_loopback else own

    def send_hello(self) -> None:
        joined = events.AgentJoined(
            self.orders.machine,
            self.name,
            self.start.generation if self.start is not None else None,
            self.address,
            self.supervisor.store_port,
        )
        self.send(messages.AgentHello(self.orders.job, os.getpid(), joined))
        self.send_output(again=True)
        if self.reported_end:
            self.report_end()
        elif self.start is not None and not self.start.joins:
            self.check_store(self.start)
            for worker in self.supervisor.workers.values():  # an earlier manager may not have heard of it
                report_failure(self, worker)
            if self.leaver is not None:
                self.send(self.leaver)

    def send(self, message: messages.ManagerMessage | events.Event) -> None:
        if self.writer is not None:
            self.writer.write(pack_message(messages.write_message(message)))
            self.connected_at = time.monotonic()

    async def send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self.orders.heartbeat_seconds)
            self.supervisor.send_heartbeat()
            self.send_output()
            report_progress(self)

    async def obey(self, message: messages.FromManager) -> None:
        if isinstance(message, messages.Welcome):
            if not self.supervisor.is_open:
                ours = VarunaEnvironment(job_id=self.orders.job).write()
                environment = {**ours, **os.environ, **message.environment}
                await self.supervisor.open(environment, options=(str(LEASE_SECONDS), *PRELOADED))
        elif isinstance(message, messages.StartWorkers):
            self.start_workers(message)
        elif isinstance(message, messages.MorphWorkers):
            self.morph_workers(message)
        elif isinstance(message, commands.SaveAndEnd):
            self.signal_workers(message.generation, signal.SIGUSR1)
        elif isinstance(message, commands.DumpStacks):
            self.signal_workers(message.generation, signal.SIGUSR2)
        elif isinstance(message, commands.KillWorkers):
            if self.start is None or self.start.generation > message.generation:
                self.send(events.WorkersEnded(self.orders.machine, self.name, message.generation, ()))
            elif self.reported_end:
                self.report_end()
            else:
                self.signal_workers(message.generation, signal.SIGKILL)
        elif isinstance(message, messages.LogRequest):
            self.spawn(self.send_log(message))
        elif isinstance(message, commands.ReleaseMachines):
            if self.got_sigterm:
                self.end("SIGTERM")
            elif self.cloud is not None:
                self.cloud.approve()
        elif isinstance(message, messages.Dismiss):
            self.end(message.why)

    # ------------------------------------------------------------ stores

    def store_opened(self, port: int, error: str) -> None:
        if error:
            self.end(f"no store can be opened: {error}")
        else:
            self.send(events.StoreReady(self.orders.machine, self.name, port))

    def store_ended(self, port: int, why: str) -> None:
        """Report the end of a store; open another one if it was the store for the next generation."""
        self.report_store_end(port, why)
        self.num_store_ends += 1
        if self.num_store_ends > MAX_STORE_ENDS:
            self.end(f"{self.num_store_ends} stores have ended; last, {why}")
        elif not self.supervisor.store_port:
            self.supervisor.open_store(self.address)

    def check_store(self, start: messages.StartWorkers) -> None:
        """Report the end of the workers' store, which the manager may not know."""
        port = start.workers.master_port
        if 0 in start.workers.ranks and port not in self.supervisor.store_ports:
            self.report_store_end(port, "it was gone before this message")

    def report_store_end(self, port: int, why: str) -> None:
        print(f"the store at port {port} has ended: {why}", flush=True)
        trains = any(worker.progress().steps for worker in self.supervisor.live_workers)
        self.send(events.StoreEnded(self.orders.machine, self.name, port, why, trains))

    # ------------------------------------------------------------ workers

    def start_workers(self, start: messages.StartWorkers) -> None:
        if self.start is not None and start.generation <= self.start.generation:
            return  # an outdated message
        if not start.joins:  # the store of joiners is the one that their order names
            self.supervisor.close_old_stores()
            if start.workers.master_port == self.supervisor.store_port:
                self.supervisor.open_store(self.address)
        self.start, self.reported_end, self.num_store_ends = start, False, 0
        ours = VarunaEnvironment(
            generation=start.generation,
            machine=self.orders.machine,
            agent_socket=self.socket_name,
            joins="1" if start.joins else None,
        )
        environment = {"TORCHELASTIC_USE_AGENT_STORE": "True", **ours.write()}
        try:
            self.supervisor.start_workers(
                start.workers,
                self.log_folder(start.generation),
                generation=start.generation,
                environment=environment,
                shows_progress=True,
            )
        except OSError as error:  # a full disk: the job continues without this machine
            self.end(f"no worker can be started: {error}")
        if not start.joins:
            self.check_store(start)

    def morph_workers(self, morph: messages.MorphWorkers) -> None:
        """Order the workers into the next generation; those that stay keep their processes."""
        uses_store = bool(morph.workers.ranks) and morph.workers.master_port == self.supervisor.store_port
        if self.start is None or self.start.generation > morph.generation or self.reported_end:
            if uses_store:  # the manager counts it as used
                self.supervisor.open_store(self.address)
            return  # an outdated message, or its workers have ended meanwhile
        if self.start.generation == morph.generation and not self.start.joins:
            return  # a restarted manager has sent it again
        last, workers = self.start.workers, morph.workers
        self.supervisor.close_old_stores(used=last.master_port)
        if uses_store:
            self.supervisor.open_store(self.address)
        orders = make_orders(morph, last.ranks, joins=self.start.joins)
        try:
            self.supervisor.morph_workers(orders, self.log_folder(morph.generation))
        except OSError as error:  # a full disk: the job continues without this machine
            self.end(f"no worker can morph: {error}")
        if workers.ranks:
            self.start = messages.StartWorkers(morph.generation, workers)
            self.check_store(self.start)
            self.spawn(report_morph(self, morph.generation))

    def log_folder(self, generation: int) -> Path:
        assert self.start is not None
        return Path(self.start.workers.job.log_dir) / f"generation_{generation}"

    def worker_ended(self, worker: WorkerProcess) -> None:
        assert self.start is not None and worker.outcome is not None
        self.send_output()
        if not self.supervisor.live_workers:
            self.report_end()
        else:
            report_failure(self, worker)

    def report_end(self) -> None:
        assert self.start is not None
        self.reported_end = True
        workers = self.supervisor.workers.values()
        outcomes = tuple(worker.outcome for worker in workers if worker.outcome is not None)
        progress = tuple(worker.last_progress for worker in workers)
        number = self.start.generation
        self.send(events.WorkersEnded(self.orders.machine, self.name, number, outcomes, progress))

    def signal_workers(self, generation: int, number: int) -> None:
        """Send a signal to the workers, unless they belong to a newer generation."""
        if self.start is not None and self.start.generation <= generation:
            self.supervisor.signal_workers(number)

    def send_output(self, *, again: bool = False) -> None:
        """Send new output of rank 0, and all new records; keep them while disconnected.

        `again`: send the last records again, because the manager may be a new one.
        """
        worker = self.supervisor.workers.get(0)
        if worker is not None and self.writer is not None:
            for is_stderr, text in worker.new_output():
                self.send(messages.WorkerOutput(worker.rank, text, is_stderr))
        for metrics in self.supervisor.collect_metrics(again=again):
            while self.writer is not None and (found := metrics.take()) is not None:
                self.send(found)

    async def send_log(self, request: messages.LogRequest) -> None:
        """Read a page of a log in a thread: a slow disk must not delay heartbeats."""
        page = None
        if self.start is not None:
            with suppress(OSError):
                page = await asyncio.to_thread(answer, Path(self.start.workers.job.log_dir), request)
        self.send(messages.LogReply(request.request, page))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


def report_progress(agent: Agent, *, morphed: bool = False) -> None:
    live = agent.supervisor.live_workers
    generation = agent.start.generation if agent.start is not None and live else None
    progress = tuple(worker.progress() for worker in live)
    agent.send(messages.AgentHeartbeat(generation, progress, morphed))


async def report_morph(agent: Agent, generation: int) -> None:
    """Report at once that all workers have entered the generation."""
    while agent.start is not None and agent.start.generation == generation:
        await asyncio.sleep(MORPH_POLL_SECONDS)
        live = agent.supervisor.live_workers
        if not live or all(worker.progress().generation == generation for worker in live):
            agent.supervisor.close_old_stores(used=agent.start.workers.master_port)  # all ranks have left it
            report_progress(agent, morphed=True)
            return


def report_failure(agent: Agent, worker: WorkerProcess) -> None:
    if agent.start is not None and worker.outcome is not None and worker.outcome.failure is not None:
        number = agent.start.generation
        agent.send(events.WorkerFailed(agent.orders.machine, agent.name, number, worker.outcome))


def report_leaver(agent: Agent, worker: WorkerProcess) -> None:
    """Report a failure of a worker that leaves: the others may wait for its state."""
    assert worker.outcome is not None
    agent.send_output()
    if worker.outcome.failure is not None:
        number = worker.leaves_in
        agent.leaver = events.LeaverFailed(agent.orders.machine, agent.name, number, worker.outcome)
        agent.send(agent.leaver)


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("varuna: the agent got no orders on stdin (the manager starts it; see `varuna run --help`)")
    asyncio.run(live(decode(line, AgentOrders, "the agent's orders")))


async def live(orders: AgentOrders) -> None:
    code = await Agent(orders).live()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with the connection open: when the manager sees its end, this process is gone


if __name__ == "__main__":
    main()
