"""Starts agents as Ray actors, one for each machine, on an existing Ray cluster (the extra `ray`).

An actor only holds its agent: the agent dies with it, and it goes when the agent ends. It is detached: the
manager may be killed and started again while the job goes on.
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


class Holder:
    """Runs on the other machine, in a process of Ray's; sent by value, so it needs nothing of ours there."""

    def hold(self, python: str, program: str, handover: bytes, linger_seconds: float) -> tuple[int, str]:
        """Until the agent ends: its exit status and its last words. Then this process goes too."""
        try:
            guard = subprocess.Popen(
                [python or sys.executable, "-c", program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            return 127, str(error)
        assert guard.stdin is not None and guard.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            guard.stdin.write(handover)
            guard.stdin.flush()  # and left open: it closes when this process dies
        said = b""
        for line in guard.stdout:
            sys.stdout.buffer.write(line)  # to Ray's own logs
            sys.stdout.flush()
            said = (said + line)[-4096:]
        status = guard.wait()
        # Whoever started us may be dead, and then nobody takes the answer and lets us go.
        threading.Timer(linger_seconds, os._exit, (0,)).start()
        return status, said.decode(errors="replace")


class RayAgent:
    def __init__(self, machine: str, holder: Any, end: Any) -> None:
        self._machine = machine
        self._holder = holder
        self._end = end.future()

    def ended(self) -> str | None:
        if not self._end.done():
            return None
        self.kill()  # its place is free again
        if (error := self._end.exception()) is not None:
            return f"{self._machine}: Ray lost the agent: {str(error).strip().splitlines()[0]}"
        status, said = self._end.result()
        return explain_end(self._machine, status, said)

    def kill(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self._holder)


class RayStarter:
    """A machine of the list that is the address of a Ray node runs there; any other name is Ray's choice."""

    def __init__(
        self,
        *,
        address: str = "auto",
        folder: str = "",
        python: str = "",
        resources: Mapping[str, float] | None = None,
        agent: Sequence[str] = AGENT,
    ) -> None:
        """`python` is that of the nodes, by default Ray's own. `resources` are those of one machine."""
        self._address = address
        self._python = python
        self._resources = dict(resources or {"CPU": 1})
        self._preamble = preamble(folder=folder, agent=agent, ends_with_stdin=True)
        self._lock = threading.Lock()

    def start(self, orders: AgentOrders) -> RayAgent:
        machine = check_machine(orders.machine)
        ray = self._connect()
        resources = dict(self._resources)
        holder = (
            ray.remote(Holder)
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
        return RayAgent(machine, holder, holder.hold.remote(self._python, PROGRAM, handover, LINGER_SECONDS))

    def _connect(self) -> Any:
        try:
            import ray
        except ImportError:
            raise ValueError("Ray is not installed here (pip install 'varuna[ray]')") from None
        with self._lock:
            if not ray.is_initialized():
                ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
                # Raises ConnectionError, in Ray's own words, where there is no cluster.
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False)
        return ray


def _placement(ray: Any, machine: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    for node in ray.nodes():
        if node["Alive"] and machine in (node["NodeManagerAddress"], node["NodeName"]):
            return NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return "SPREAD"
