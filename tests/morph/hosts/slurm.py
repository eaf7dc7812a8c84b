"""A real Slurm on this machine: its controller, munge, and one slurmd per node.

It takes root and Debian's slurm-wlm and munge, which `make test` installs.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.ports import free_port
from varuna.chaos.hosts.box import PATH, Box, missing_tools, tool

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "squeue")


class SlurmCluster:
    """`with SlurmCluster(2) as cluster:` has node1 and node2 idle; use `cluster.environment` to reach it."""

    def __init__(self, num_nodes: int) -> None:
        if os.geteuid() != 0:
            raise RuntimeError("a Slurm for tests is started by root: run the tests as root")
        if missing := missing_tools(TOOLS):
            raise RuntimeError(
                f"Slurm's {', '.join(missing)} are not on this machine "
                "(apt-get install slurm-wlm munge; `make test` does it as root)"
            )
        # Not under pytest's own folders: munge wants no other user to be able to write to any parent.
        self.folder = Path(tempfile.mkdtemp(prefix="varuna-slurm-", dir="/run"))
        self.folder.chmod(0o755)
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        self._boxes: dict[str, Box] = {}
        self._stack = ExitStack()
        self._stack.callback(shutil.rmtree, self.folder)
        try:
            self._boot()
        except BaseException:
            self.close()
            raise

    def _boot(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        munge = {name: str(self.folder / f"munge.{name}") for name in ["socket", "seed", "log", "pid"]}
        flags = {
            "key-file": str(key),
            "socket": munge["socket"],
            "seed-file": munge["seed"],
            "log-file": munge["log"],
            "pid-file": munge["pid"],
        }
        self._start("munged", ["--foreground", *(f"--{name}={value}" for name, value in flags.items())])
        for name in ["state", "spool", "log"]:
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(self._configuration(munge["socket"]))
        # One after the other: whoever finds no partner tries again only after many seconds.
        self._wait_until(lambda: Path(munge["socket"]).exists())
        self._start("slurmctld", ["-D", "-i"])
        self._wait_until(lambda: self._ask("scontrol", "ping").rstrip().endswith("UP"))
        for node in self.nodes:
            self.boot(node)
        self._wait_until(lambda: self._ask("sinfo", "-hNo%T").split() == ["idle"] * len(self.nodes))

    def _configuration(self, munge_socket: str) -> str:
        folder, host = self.folder, socket.gethostname()
        ports = [free_port() for _ in range(len(self.nodes) + 1)]
        lines = [
            "ClusterName=varuna",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            "SlurmUser=root",
            "AuthType=auth/munge",
            f"AuthInfo=socket={munge_socket}",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/%n.pid",
            f"SlurmctldLogFile={folder}/log/slurmctld",
            f"SlurmdLogFile={folder}/log/%n",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SchedulerParameters=sched_min_interval=1000,batch_sched_delay=0",
            "MpiDefault=none",
            "ReturnToService=2",
            "KillWait=2",
        ]
        for node, port in zip(self.nodes, ports[1:], strict=True):
            lines.append(f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1")
        lines.append(f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP")
        return "\n".join(lines) + "\n"

    def _start(self, program: str, arguments: list[str], *, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("wb") as output:
            argv = [tool(program), *arguments]
            self._boxes[name or program] = Box(argv, environment=self.environment, output=output)

    def boot(self, node: str) -> None:
        self._start("slurmd", ["-D", "-N", node], name=node)

    def kill(self, node: str) -> None:
        """Kill the node with all its processes; Slurm gets no message."""
        self._boxes.pop(node).kill()

    def run(self, *argv: str) -> str:
        run = subprocess.run(argv, env=self.environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{' '.join(argv)} failed: {run.stderr}\n{self.logs()}")
        return run.stdout

    def _ask(self, *argv: str) -> str:
        """Return the output of a command, or "" if Slurm does not answer yet."""
        return subprocess.run(argv, env=self.environment, capture_output=True, text=True).stdout

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            for name, box in self._boxes.items():
                if (status := box.outer.poll()) is not None:
                    raise RuntimeError(f"{name} ended with status {status}: {self.logs()}")

    def logs(self) -> str:
        paths = [*self.folder.glob("*.out"), *self.folder.glob("log/*"), *self.folder.glob("munge.log")]
        return "\n".join(f"==> {path.name}\n{path.read_text()[-2000:]}" for path in paths)

    def close(self) -> None:
        for box in self._boxes.values():
            box.kill()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
