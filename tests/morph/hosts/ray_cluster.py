"""A real Ray cluster on test hosts with one CPU each; the first host is its head."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.environments import environment
from varuna.chaos.hosts.lab import Host, Lab
from varuna.morph.protocol.orders import AgentOrders

PINNED = Path(__file__).with_name("ray-constraints.txt")
DRIVER = Path(__file__).with_name("ray_driver.py")


class RayCluster:
    def __init__(self, num_nodes: int) -> None:
        self._bin = environment("ray", PINNED) / "bin"
        self.lab = Lab(num_nodes)
        self._folder = Path(tempfile.mkdtemp(prefix="vray-"))  # short: Ray puts sockets deep into it
        self._clients: list[subprocess.Popen[str]] = []
        self._environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._folder),
            # A node that dies is to be missed in seconds.
            "RAY_health_check_initial_delay_ms": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_timeout_ms": "500",
            "RAY_health_check_failure_threshold": "3",
        }
        try:
            self._boot()
        except BaseException:
            self.close()
            raise

    def _boot(self) -> None:
        head, *others = self.lab.hosts
        self.address = f"{head.address}:6379"
        self._start(head, "--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self._folder}")
        for host in others:
            self._start(host, f"--address={self.address}")

    def _start(self, host: Host, *arguments: str) -> None:
        small = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats"]
        argv = [str(self._bin / "ray"), "start", f"--node-ip-address={host.address}", *small, *arguments]
        log = self._folder / f"{host.name}.log"
        # What it starts keeps its output open, and would keep ssh waiting.
        apart = ["sh", "-c", 'exec "$@" >"$0" 2>&1 </dev/null', str(log), *argv]
        if subprocess.run(host.command(apart, self._environment)).returncode:
            raise RuntimeError(f"Ray did not start on {host.name}: {log.read_text()}")

    def client(self, agent: str) -> "RayClient":
        """Return a client in its own process on the first host."""
        argv = [str(self._bin / "python"), str(DRIVER), self.address, sys.executable, agent]
        process = subprocess.Popen(
            self.lab.hosts[0].command(argv, self._environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._clients.append(process)
        return RayClient(process)

    def manager(self, folder: Path, environment: Mapping[str, str]) -> list[str]:
        """Return the command that manages a job from the first host, in the environment with Ray."""
        lead = (
            "import runpy, sys; sys.argv[0] = 'run_varuna'; "
            f"sys.path.append({sysconfig.get_path('purelib')!r}); "  # behind what Ray needs
            "runpy.run_module('varuna.run_varuna', run_name='__main__')"
        )
        head = self.lab.hosts[0]
        argv = ["env", "-C", str(folder), str(self._bin / "python"), "-c", lead]
        told = {**self._environment, **environment, "RAY_ADDRESS": self.address}
        agents = ["--starter", "ray", "--manager_ip", head.address, "--python", sys.executable]
        return [*head.command(argv, told), *agents]

    def close(self) -> None:
        self.lab.close()
        for process in self._clients:
            process.communicate()
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RayClient:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, what: str, machine: str, orders: AgentOrders | None = None) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        line = orders.line().decode() if orders else "\n"
        self.process.stdin.write(f"{what} {machine} {line}")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def wait_for_the_end(self, machine: str) -> str:
        return str(self.ask("wait", machine))
