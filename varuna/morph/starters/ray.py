"""Start agents as Ray actors, one per machine, on an existing Ray cluster (the extra `ray`).

The agent dies with its actor, and the actor exits when the agent ends. Actors are detached, so the job
continues while the manager is killed and restarted.
"""

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.handover import AGENT, PROGRAM, check_machine, explain_end, preamble

NAMESPACE = "varuna"
LINGER_SECONDS = 60.0


class AgentActor:
    """Runs in a Ray process on the other machine; sent by value, so it needs no varuna there."""

    def run_agent(self, python: str, program: str, handover: bytes, linger_seconds: float) -> tuple[int, str]:
        """Run the agent; return its exit status and its last output. Then this process exits too."""
        try:
            agent = subprocess.Popen(
                [python or sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return 127, str(error)
        assert agent.stdin is not None and agent.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            agent.stdin.write(handover)
            agent.stdin.flush()  # it stays open: it closes when this process dies
        output = b""
        for line in agent.stdout:
            sys.stdout.buffer.write(line)  # to Ray's logs
            sys.stdout.flush()
            output = (output + line)[-4096:]
        status = agent.wait()
        # If the manager is dead, nobody ends this process.
        threading.Timer(linger_seconds, os._exit, (0,)).start()
        return status, output.decode(errors="replace")


class RayAgent:
    def __init__(self, machine: str, actor: Any, end: Any) -> None:
        self._machine = machine
        self._actor = actor
        self._end = end.future()

    def ended(self) -> str | None:
        if not self._end.done():
            return None
        self.kill()  # frees its resources
        if (error := self._end.exception()) is not None:
            return f"{self._machine}: Ray lost the agent: {str(error).strip().splitlines()[0]}"
        status, output = self._end.result()
        return explain_end(self._machine, status, output)

    def kill(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._actor)


class RayStarter:
    """Starts an agent on the Ray node with the machine's address, or on any node if none has it."""

    def __init__(
        self,
        *,
        address: str = "auto",
        folder: str = "",
        python: str = "",
        resources: Mapping[str, float] | None = None,
        agent: Sequence[str] = AGENT,
    ) -> None:
        """`python` is its path on the nodes (default: Ray's); `resources` are those of one machine."""
        self._address = address
        self._python = python
        self._resources = dict(resources or {"CPU": 1})
        self._preamble = preamble(folder=folder, agent=agent, ends_with_stdin=True)
        self._lock = threading.Lock()

    def start(self, orders: AgentOrders) -> RayAgent:
        machine = check_machine(orders.machine)
        ray = self._connect()
        resources = dict(self._resources)
        actor = (
            ray.remote(AgentActor)
            .options(
                name=f"{orders.job}/{machine}/{secrets.token_hex(4)}",
                lifetime="detached",
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                max_restarts=0,
                scheduling_strategy=_placement(ray, machine),
            )
            .remote()
        )
        handover = self._preamble + orders.line()
        end = actor.run_agent.remote(self._python, PROGRAM, handover, LINGER_SECONDS)
        return RayAgent(machine, actor, end)

    def _connect(self) -> Any:
        try:
            import ray
        except ImportError:
            raise ValueError("Ray is not installed (pip install 'varuna-torch[ray]')") from None
        with self._lock:
            if not ray.is_initialized():
                ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
                # Raises ConnectionError if there is no cluster.
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False)
        return ray


def _placement(ray: Any, machine: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in ray.nodes():
        if node["Alive"] and machine in (node["NodeManagerAddress"], node["NodeName"]):
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return "SPREAD"
