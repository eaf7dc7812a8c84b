"""Answers of a real manager while a thousand agents join within a second, and half of them leave at once.

The agents are stubs that speak the real protocol, in the measuring process. `python -m benchmarks.arrivals
PORT CREDENTIAL_FILE` is a third process that requests the status again and again, each time over a new
connection like `varuna status`, and prints how long each answer took.
"""

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from benchmarks.heartbeats import CREDENTIAL, Agent, cpu_seconds, managed
from varuna.morph.protocol.messages import JobStatus, ManagerRequest
from varuna.morph.run.client import send_request
from varuna.secure.credential import JobCredential

STATUS_PAUSE_SECONDS = 0.05
QUIET_SECONDS = 3.0
"""Observe the manager for this long after the agents have left."""


class Arrival(msgspec.Struct, frozen=True):
    """One run."""

    join_seconds: float  # from the first connection to the last welcome
    slowest_status_seconds: float
    num_statuses: int
    cores: float  # the manager's CPU time per second, while they join or after they left: the larger one


def measure_arrivals(machines: int) -> Arrival:
    with managed(machines) as (pid, port, credential, agents, folder):
        command = [sys.executable, "-m", "benchmarks.arrivals", str(port), str(folder / CREDENTIAL)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
            assert probe.stdin is not None and probe.stdout is not None
            probe.stdout.readline()  # its first answer came
            seconds, cores = asyncio.run(join_and_leave(agents, pid, port, credential))
            probe.stdin.close()
            answers = [float(line) for line in probe.stdout]
        if probe.returncode:
            raise RuntimeError("a status request failed")
        return Arrival(seconds, max(answers), len(answers), cores)


async def join_and_leave(
    agents: list[Agent], pid: int, port: int, credential: JobCredential
) -> tuple[float, float]:
    tls = credential.client_context()
    used, began = cpu_seconds(pid), time.monotonic()
    lives = []
    for number, agent in enumerate(agents):
        lives.append(asyncio.create_task(agent.live(port, tls)))
        await asyncio.sleep(max(0.0, began + (number + 1) / len(agents) - time.monotonic()))
    async with asyncio.timeout(60):
        for agent in agents:
            await agent.welcomed.wait()
        joined = time.monotonic() - began
        join_cores = (cpu_seconds(pid) - used) / joined
        for agent in agents:
            await agent.at_work.wait()
    used, left = cpu_seconds(pid), time.monotonic()
    for life in lives[::2]:
        life.cancel()
    await asyncio.sleep(QUIET_SECONDS)
    leave_cores = (cpu_seconds(pid) - used) / (time.monotonic() - left)
    assert not any(life.done() for life in lives[1::2]), "the manager has disconnected an agent"
    for life in lives:
        life.cancel()
    return joined, max(join_cores, leave_cores)


def probe(port: int, credential: JobCredential) -> None:
    """Print the seconds of each answer, until stdin ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(STATUS_PAUSE_SECONDS):
        began = time.monotonic()
        reply = send_request("127.0.0.1", port, credential, ManagerRequest("job", "status"))
        msgspec.json.decode(reply.status, type=JobStatus)
        print(time.monotonic() - began, flush=True)


if __name__ == "__main__":
    _, chosen_port, credential_file = sys.argv
    probe(int(chosen_port), msgspec.json.decode(Path(credential_file).read_bytes(), type=JobCredential))
