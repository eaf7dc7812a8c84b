"""The agent of one machine: `python -m varuna.morph.run.agent`, with its orders as one line on stdin.

It dials in to the manager, and does what that says: starts this machine's workers of a generation,
asks them to save, kills them. It decides nothing but this: a manager that is cut off has given this
machine up, so its workers end; one that is only gone may come back, and they go on for a while.
"""

import asyncio
import http.client
import ipaddress
import json
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from varuna.codec import decode
from varuna.environment import VarunaEnvironment
from varuna.morph.failures import WorkerFailure
from varuna.morph.notices import Notice, Service, service
from varuna.morph.protocol.messages import (
    AskLog,
    Beat,
    Dismiss,
    Ended,
    Failed,
    Hello,
    Kill,
    LogLines,
    Message,
    Noticed,
    Output,
    Release,
    Save,
    Stacks,
    Start,
    StoreOpen,
    Unnoticed,
    Welcome,
    read_to_agent,
    write,
)
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.protocol.wire import Refused, Wire
from varuna.morph.run.cloud_poll import listen, tell_done
from varuna.morph.run.progress_page import Reading
from varuna.morph.run.worker_env import WORKER_DEFAULTS, worker_arguments, worker_environment
from varuna.morph.run.worker_logs import last_lines, read_error
from varuna.morph.state import Outcome, Pulse

REDIAL_SECONDS = 0.25
DIAL_SECONDS = 3.0
NOTICE_SECONDS = 30.0
"""What a SIGTERM leaves, unless somebody says otherwise."""
CLOSE_SECONDS = 5.0
MOST_REFUSALS = 8
"""One after the other, by a manager that answers: it leads another job, with another secret."""
MAX_OUTPUT = 16 * 2**10


class Worker:
    """One process of a generation."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.rank = rank
        self.out = folder / f"rank_{rank}.out"
        self.err = folder / f"rank_{rank}.err"
        self.error = folder / f"rank_{rank}.error.json"
        self.reading = Reading(folder / f"rank_{rank}.progress", rank)
        self.pid: int | None = None
        self.outcome: Outcome | None = None
        self.last_pulse = Pulse(rank)
        self.shown = {False: 0, True: 0}  # bytes of out and of err that were passed on

    def end(self, code: int) -> None:
        error = read_error(self.error)
        failed = bool(code) or error is not None
        self.outcome = Outcome(
            WorkerFailure(self.rank, code, error) if failed else None,
            on_demand=not failed and self.reading.answering,
            last_lines=last_lines(self.err) if failed else "",
        )
        self.last_pulse = self.reading.pulse()
        self.reading.close()

    def news(self) -> list[Output]:
        """What it has written since."""
        found = []
        for error, path in ((False, self.out), (True, self.err)):
            with suppress(OSError), path.open("rb") as file:
                file.seek(self.shown[error])
                data = file.read(MAX_OUTPUT)
                if self.outcome is None:  # the rest of a line comes later
                    data = data[: data.rfind(b"\n") + 1]
                self.shown[error] += len(data)
                if data:
                    found.append(Output(self.rank, data.decode(errors="replace"), error))
        return found


class NurseryLink:
    """The process that forks workers, as its agent sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def ask(self, what: str, **facts: Any) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({what: facts}).encode() + b"\n")

    async def answers(self, on_answer: Callable[[str, dict[str, Any]], None]) -> int:
        """Until it is gone; its exit status."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            ((what, facts),) = json.loads(line).items()
            on_answer(what, facts)
        return await self._process.wait()

    async def close(self) -> None:
        """Its input ends, so it ends whatever is left of the workers, and goes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()


class Agent:
    def __init__(self, orders: AgentOrders) -> None:
        self.orders = orders
        self.name = secrets.token_hex(8)
        self.secret = bytes.fromhex(orders.secret)
        self.address = "127.0.0.1"
        self.start: Start | None = None
        self.workers: dict[int, Worker] = {}  # by rank
        self.told_end = False
        self.stores: list[str] = []  # their keys; the last one is for the next generation
        self.num_stores = 0
        self.store_port = 0  # of the last
        self.nursery: NurseryLink | None = None
        self.wire: Wire | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.heard = time.monotonic()  # of the manager, or at least of its machine
        self.connected_at = time.monotonic()  # or last was
        self.num_refusals = 0  # since it was last welcome
        self.over = asyncio.Event()
        self.why_over = ""
        self.socket_name = f"varuna-{secrets.token_hex(8)}"
        self.noticed = False  # by SIGTERM
        self.cloud = service(orders.cloud) if orders.cloud else None
        self.cloud_notice: Notice | None = None
        self.approved = ""  # the cloud's own name for what it need not wait for any more

    # ------------------------------------------------------------ its life

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.terminated)
        local = await self.listen_locally()
        tasks = [asyncio.create_task(job()) for job in (self.stay_in_touch, self.beat)]
        if self.cloud is not None:
            tasks.append(asyncio.create_task(self.listen_to_the_cloud(self.cloud)))
        over = asyncio.create_task(self.over.wait())
        done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
        crashed = [task.exception() for task in done if task is not over]
        if local is not None:
            local.close()
        await self.clear_up()
        for error in crashed:
            traceback.print_exception(error)
        return 1 if crashed else 0

    async def clear_up(self) -> None:
        self.over.set()
        self.kill_workers()
        if self.nursery is not None:
            await self.nursery.close()
        for worker in self.workers.values():
            if worker.outcome is None:
                worker.reading.close()

    def end(self, why: str) -> None:
        self.why_over = why
        self.over.set()

    def terminated(self) -> None:
        """Somebody takes this machine away: the first time it is told on, the second time obeyed."""
        idle = all(worker.outcome is not None for worker in self.workers.values())
        if self.noticed or self.writer is None or idle:
            self.end("SIGTERM")
        self.noticed = True
        self.send(Noticed(NOTICE_SECONDS, "the agent got SIGTERM"))

    async def listen_locally(self) -> asyncio.AbstractServer | None:
        """Workers and hooks on this machine, of the same user, may tell of a notice: one JSON line."""
        if sys.platform != "linux":
            return None

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(Exception):  # a stranger's nonsense is its own business
                asked = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                if int.from_bytes(asked[4:8], sys.byteorder) == os.getuid():
                    line = await asyncio.wait_for(reader.readline(), 5)
                    notice = decode(line, Noticed, "a notice")
                    self.send(notice)
                    writer.write(b"ok\n" if self.writer is not None else b"no manager\n")
            writer.close()

        listener = socket.socket(socket.AF_UNIX)
        listener.bind("\0" + self.socket_name)
        return await asyncio.start_unix_server(hear, sock=listener, limit=4096)

    def released(self) -> None:
        """All is saved, and nothing more is asked of this machine: whoever wants it may have it."""
        if self.noticed:
            self.end("SIGTERM")
        elif self.cloud is not None and self.cloud_notice is not None:
            self._approving = asyncio.create_task(self.approve(self.cloud, self.cloud_notice))

    async def approve(self, cloud: Service, notice: Notice) -> None:
        if notice.event == self.approved:
            return
        self.approved = notice.event
        try:
            await tell_done(cloud, notice, url=self.orders.cloud_url)
        except (OSError, ValueError, http.client.HTTPException) as error:  # it will wait for its deadline
            print(f"the cloud was not told that this machine may go: {error}", flush=True)

    async def listen_to_the_cloud(self, cloud: Service) -> None:
        def tell(notice: Notice | None) -> None:
            self.cloud_notice = notice
            if notice is None:
                self.send(Unnoticed())
            else:
                self.send(Noticed(notice.deadline - time.time(), notice.reason))

        await listen(cloud, tell, warn=lambda text: print(text, flush=True), url=self.orders.cloud_url)

    # ------------------------------------------------------------ the manager

    async def stay_in_touch(self) -> None:
        while True:
            for manager in self.orders.managers:
                host, _, port = manager.rpartition(":")
                try:
                    await self.talk_to(host.strip("[]"), int(port))
                except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                    self.heard = time.monotonic()  # its machine lives: it may be started again
                except (OSError, Refused, ValueError):
                    pass
                finally:
                    self.writer = self.wire = None
            now = time.monotonic()
            if now - self.heard > self.orders.lease_seconds and self.workers:
                self.kill_workers()
            if now - self.connected_at > self.orders.patience_seconds:
                self.end("no manager")
            if self.num_refusals >= MOST_REFUSALS:
                self.end("the manager there does not know this job")
            await asyncio.sleep(REDIAL_SECONDS)
            while self.over.is_set():  # who goes does not dial again
                await asyncio.sleep(REDIAL_SECONDS)

    async def talk_to(self, host: str, port: int) -> None:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), DIAL_SECONDS)
        try:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # else the kernel tries for a quarter of an hour
                lease = int(self.orders.lease_seconds * 1000)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, lease)
            own = connection.getsockname()[0]
            self.address = self.orders.machine if _both_loopback(own, self.orders.machine) else own
            wire = Wire(self.secret, calls=True)
            writer.write(wire.greeting)
            while not wire.greeted:
                data = await asyncio.wait_for(reader.read(65536), DIAL_SECONDS)
                if not data:
                    raise ConnectionResetError
                wire.feed(data)
            self.wire, self.writer = wire, writer
            generation = self.start.generation if self.start is not None else None
            self.send(
                Hello(
                    job=self.orders.job,
                    machine=self.orders.machine,
                    agent=self.name,
                    pid=os.getpid(),
                    address=self.address,
                    generation=generation,
                    store_port=self.store_port,
                )
            )
            for worker in self.workers.values():
                self.show(worker)
            if self.told_end:
                self.tell_end()
            self.num_refusals += 1
            while data := await reader.read(65536):
                self.heard = self.connected_at = time.monotonic()
                for payload in wire.feed(data):
                    self.num_refusals = 0
                    await self.obey(read_to_agent(payload))
            self.heard = time.monotonic()
        finally:
            writer.close()

    def send(self, message: Message) -> None:
        if self.writer is not None and self.wire is not None:
            self.writer.write(self.wire.pack(write(message)))
            self.connected_at = time.monotonic()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(self.orders.heartbeat_seconds)
            alive = [worker for worker in self.workers.values() if worker.outcome is None]
            if self.nursery is not None:
                self.nursery.ask("beat")
            for worker in alive:
                self.show(worker)
            generation = self.start.generation if self.start is not None and alive else None
            self.send(Beat(generation, tuple(worker.reading.pulse(worker.pid or 0) for worker in alive)))

    async def obey(self, message: object) -> None:
        if isinstance(message, Welcome):
            if self.nursery is None:
                await self.open_nursery(dict(message.environment))
        elif isinstance(message, Start):
            self.start_workers(message)
        elif isinstance(message, Save):
            self.signal_workers(message.generation, signal.SIGUSR1)
        elif isinstance(message, Stacks):
            self.signal_workers(message.generation, signal.SIGUSR2)
        elif isinstance(message, Kill):
            if self.start is None or self.start.generation > message.generation:
                self.send(Ended(message.generation, ()))
            elif self.told_end:
                self.tell_end()
            else:
                self.kill_workers()
        elif isinstance(message, AskLog):
            self.send(LogLines(message.question, self.read_log(message)))
        elif isinstance(message, Release):
            self.released()
        elif isinstance(message, Dismiss):
            self.end(message.why)

    # ------------------------------------------------------------ workers

    async def open_nursery(self, environment: dict[str, str]) -> None:
        defaults = {**WORKER_DEFAULTS, **VarunaEnvironment(job_id=self.orders.job).write()}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(Path(__file__).with_name("forkserver.py")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**defaults, **os.environ, **environment},
            start_new_session=True,
        )
        self.nursery = NurseryLink(process)
        self._watching = asyncio.create_task(self.watch_nursery(self.nursery))

    async def watch_nursery(self, nursery: NurseryLink) -> None:
        code = await nursery.answers(self.nursery_says)
        for worker in self.workers.values():  # they died with it, but not what they had started
            if worker.pid is not None and worker.outcome is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
        self.end(f"the process that starts workers ended with status {code}")

    def nursery_says(self, what: str, facts: dict[str, Any]) -> None:
        if what == "ready":
            self.open_store()
        elif what == "store":
            self.stores.append(facts["key"])
            self.store_port = facts["port"]
            self.send(StoreOpen(self.store_port))
        elif what == "forked":
            if worker := self.worker_of(facts["key"]):
                worker.pid = facts["pid"]
        elif what == "ended" and (worker := self.worker_of(facts["key"])):
            self.worker_ended(worker, facts["code"])

    def key_of(self, rank: int) -> str:
        assert self.start is not None
        return f"{self.start.generation}/{rank}"

    def worker_of(self, key: str) -> Worker | None:
        return next((worker for rank, worker in self.workers.items() if self.key_of(rank) == key), None)

    def open_store(self) -> None:
        assert self.nursery is not None
        self.store_port = 0
        self.num_stores += 1
        self.nursery.ask("store", key=f"store {self.num_stores}", host=self.address)

    def start_workers(self, start: Start) -> None:
        if self.start is not None and start.generation <= self.start.generation:
            return  # an old word
        assert self.nursery is not None
        for key in self.stores[:-1]:
            self.nursery.ask("signal", key=key, number=int(signal.SIGKILL))
            self.stores.remove(key)
        workers = start.workers
        if workers.master_port == self.store_port:
            self.open_store()
        self.start, self.told_end = start, False
        folder = Path(workers.job.log_dir) / f"generation_{start.generation}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.workers = {rank: Worker(rank, folder) for rank in workers.ranks}
        except OSError as error:  # a full disk: the job can do without this machine, but not with half of it
            print(f"no worker can be started: {error}", flush=True)
            self.end("no worker can be started")
            return
        for local_rank, (rank, worker) in enumerate(self.workers.items()):
            ours = VarunaEnvironment(
                generation=start.generation,
                machine=self.orders.machine,
                agent_socket=self.socket_name,
                progress_file=str(worker.reading.path),
            )
            elastic = {
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_ERROR_FILE": str(worker.error),
            }
            self.nursery.ask(
                "fork",
                key=self.key_of(rank),
                environment={**worker_environment(workers, local_rank), **ours.write(), **elastic},
                out=str(worker.out),
                err=str(worker.err),
                code_dir=workers.job.code_dir,
                script=workers.job.script,
                arguments=worker_arguments(workers, local_rank),
            )

    def worker_ended(self, worker: Worker, code: int) -> None:
        assert self.start is not None
        worker.end(code)
        self.show(worker)
        assert worker.outcome is not None
        if all(other.outcome is not None for other in self.workers.values()):
            self.tell_end()
        elif worker.outcome.failure is not None:
            self.send(Failed(self.start.generation, worker.outcome))

    def tell_end(self) -> None:
        assert self.start is not None
        self.told_end = True
        ended = [worker for worker in self.workers.values() if worker.outcome is not None]
        outcomes = tuple(worker.outcome for worker in ended if worker.outcome is not None)
        self.send(Ended(self.start.generation, outcomes, tuple(worker.last_pulse for worker in ended)))

    def signal_workers(self, generation: int, number: int) -> None:
        if self.start is None or self.start.generation > generation or self.nursery is None:
            return
        for rank, worker in self.workers.items():
            if worker.outcome is None:
                self.nursery.ask("signal", key=self.key_of(rank), number=int(number))

    def kill_workers(self) -> None:
        if self.start is not None:
            self.signal_workers(self.start.generation, signal.SIGKILL)

    # ------------------------------------------------------------ what workers say

    def show(self, worker: Worker) -> None:
        """What the first rank writes, to whoever watches the manager; it waits for one who is away."""
        news = worker.news() if worker.rank == 0 and self.writer is not None else []
        while news:
            for output in news:
                self.send(output)
            news = worker.news() if worker.outcome is not None else []  # the rest of it, all at once

    def read_log(self, asked: AskLog) -> str:
        if self.start is None:
            return ""
        folder = Path(self.start.workers.job.log_dir) / f"generation_{asked.generation}"
        parts = []
        for kind in ("out", "err"):
            if text := last_lines(folder / f"rank_{asked.rank}.{kind}", asked.lines):
                parts.append(f"==> rank_{asked.rank}.{kind} of generation {asked.generation} <==\n{text}")
        return "\n".join(parts)[-(2**20) :]


def _both_loopback(*addresses: str) -> bool:
    try:
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)
    except ValueError:
        return False


def main() -> None:
    line = sys.stdin.buffer.readline()
    if not line:
        sys.exit("varuna: the agent was given no orders (the manager starts it; see `varuna run --help`)")
    orders = decode(line, AgentOrders, "the agent's orders")
    asyncio.run(live(orders))


async def live(orders: AgentOrders) -> None:
    code = await Agent(orders).live()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # with the connection open: when the manager sees its end, this process is gone


if __name__ == "__main__":
    main()
