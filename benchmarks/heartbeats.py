"""CPU time of a real manager with a thousand machines, whose stub agents only send heartbeats.

`python -m benchmarks.heartbeats FOLDER PORT` is the manager. The agents share the measuring process. Each
has its own connection, and reports the progress of its machine's workers with each heartbeat.
"""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from varuna.codec import encode
from varuna.files import write_atomic
from varuna.morph import events
from varuna.morph.clock import SuspendAwareClock
from varuna.morph.journal import Journal
from varuna.morph.protocol import messages
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.protocol.stream import MessageReader, pack_message
from varuna.morph.run.job_folder import ManagerContact
from varuna.morph.run.manager import Manager
from varuna.morph.run.worker_env import ranks_of_machine
from varuna.morph.state import JobState, MachinePlan, WorkerProgress
from varuna.plan.search.choose import lay_out
from varuna.secure.credential import JobCredential, make_credential
from varuna.types import JobSpec

DEVICES, STAGES = 4, 8
BEAT_SECONDS = 0.5
CREDENTIAL = "credential.json"
"""File in the manager's folder."""


# ---------------------------------------------------------------- the manager


class Running:
    """An agent that was started, or so it is said."""

    def ended(self) -> None:
        return None

    def kill(self) -> None:
        pass


class Elsewhere:
    """Starts nothing: the agents connect by themselves."""

    def start(self, orders: AgentOrders) -> Running:
        return Running()


def plan(machines: tuple[str, ...], devices: int = 0) -> MachinePlan:
    devices = devices or DEVICES
    layout = lay_out(len(machines) * devices, STAGES, batch_size=2**16, microbatch_size=1)
    ranks = tuple(ranks_of_machine(layout, i, devices_per_machine=devices) for i in range(len(machines)))
    return MachinePlan(machines, machines, ranks, layout)


def lead(folder: Path, port: int) -> None:
    job = JobSpec(
        script="train.py",
        code_dir=str(folder),
        log_dir=str(folder),
        devices_per_machine=DEVICES,
        machine_list=str(folder / "machines"),
        slow_file=str(folder / "slow"),
    )
    credential = msgspec.json.decode((folder / CREDENTIAL).read_bytes(), type=JobCredential)
    contact = ManagerContact("job", os.getpid(), "127.0.0.1", port, credential, str(folder))

    async def run() -> None:
        clock = SuspendAwareClock(time.monotonic)
        manager = Manager(
            job,
            contact,
            JobState(since=clock.now()),
            planner=plan,
            starter_of=lambda machine: Elsewhere(),
            newest=lambda store: None,
            address_for=lambda machine: "127.0.0.1",
            journal=Journal(folder / "journal"),
            clock=clock,
            say=lambda text: None,
        )
        await manager.run(socket.create_server(("127.0.0.1", port), backlog=1024))

    asyncio.run(run())


# ---------------------------------------------------------------- agents


class Agent:
    """A stub agent: connects, and sends heartbeats."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self.welcomed = asyncio.Event()
        self.at_work = asyncio.Event()
        self.start: messages.StartWorkers | None = None
        self.step = 0

    async def live(self, port: int, tls: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        frames = MessageReader()

        def send(message: messages.ManagerMessage | events.Event) -> None:
            writer.write(pack_message(messages.write_message(message)))

        joined = events.AgentJoined(self.machine, self.machine, None, "127.0.0.1", 0)
        send(messages.AgentHello("job", 1, joined))
        send(events.StoreReady(self.machine, self.machine, 1))
        beating = asyncio.create_task(self.beat(send))
        try:
            while data := await reader.read(65536):
                for payload in frames.feed(data):
                    message = messages.read_from_manager(payload)
                    if isinstance(message, messages.Welcome):
                        self.welcomed.set()
                    elif isinstance(message, messages.StartWorkers):
                        self.start = message
                        self.at_work.set()
        finally:
            beating.cancel()
            writer.close()

    async def beat(self, send: Callable[[messages.ManagerMessage], None]) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self.step += 1
            ranks = self.start.workers.ranks if self.start is not None else ()
            generation = self.start.generation if self.start is not None else None
            send(messages.AgentHeartbeat(generation, tuple(self.progress(rank) for rank in ranks)))

    def progress(self, rank: int) -> WorkerProgress:
        return WorkerProgress(
            rank,
            pid=1000 + rank,
            iteration=self.step,
            steps=self.step,
            activity=self.step,
            in_step=True,
            compute_seconds=0.3,
            step_seconds=0.5,
            store="/checkpoints",
        )


async def share_of_a_core(
    pid: int, agents: list[Agent], port: int, tls: ssl.SSLContext, *, seconds: float, repeats: int
) -> list[float]:
    """Return the share of a core that the process uses, in several intervals, while all agents run."""
    lives = []
    for agent in agents:
        lives.append(asyncio.create_task(agent.live(port, tls)))
        await asyncio.sleep(0.5 / len(agents))  # spreads their heartbeats
    async with asyncio.timeout(60):
        for agent in agents:
            await agent.at_work.wait()
    found = []
    for _ in range(repeats):
        used, began = cpu_seconds(pid), time.monotonic()
        await asyncio.sleep(seconds)
        found.append((cpu_seconds(pid) - used) / (time.monotonic() - began))
    assert not any(life.done() for life in lives), "the manager has disconnected an agent"
    for life in lives:
        life.cancel()
    return found


@contextmanager
def managed(machines: int) -> Iterator[tuple[int, int, JobCredential, list[Agent], Path]]:
    """Start a manager. Yield its process id, port, credential, an agent of each machine, and its folder."""
    with tempfile.TemporaryDirectory(prefix="varuna-benchmark-") as folder:
        names = [f"10.{n // 250}.{n % 250}.1" for n in range(machines)]
        (Path(folder) / "machines").write_text("".join(f"{name}\n" for name in names))
        credential = make_credential("job")
        write_atomic(Path(folder) / CREDENTIAL, encode(credential), private=True)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with subprocess.Popen([sys.executable, "-m", "benchmarks.heartbeats", folder, str(port)]) as manager:
            try:
                wait_until_it_listens(port)
                yield manager.pid, port, credential, [Agent(name) for name in names], Path(folder)
            finally:
                manager.kill()


def manager_share(machines: int, *, seconds: float, repeats: int) -> list[float]:
    """Return the manager's share of one core."""
    with managed(machines) as (pid, port, credential, agents, _):
        tls = credential.client_context()
        return asyncio.run(share_of_a_core(pid, agents, port, tls, seconds=seconds, repeats=repeats))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, in user code and in the kernel.

    It reads Linux' clock of that process, because /proc counts in ticks that are too coarse.
    """
    return time.clock_gettime((~pid << 3) | 2)


def wait_until_it_listens(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.02)
        else:
            return


if __name__ == "__main__":
    lead(Path(sys.argv[1]), int(sys.argv[2]))
