"""Start agents as Slurm jobs of one node each; agents that start together form one job array.

A lost job is submitted again when the manager starts its machine again; Slurm would delay a requeued
job by minutes. Slurm chooses the nodes: the names in the machine list are arbitrary.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from varuna.files import open_private, write_atomic
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.handover import AGENT

# The script is constant; values come as arguments. The file with the credential is removed once it is open.
SCRIPT = """#!/bin/sh
orders="$1/$SLURM_ARRAY_TASK_ID.json"
shift
chmod 600 /dev/fd/1 2>/dev/null  # the log
exec <"$orders" && rm -f "$orders" && exec "$@"
"""

ARRAY_SECONDS = 0.1
"""Agents that are requested within this time form one array."""
NOTICE_SECONDS = 60
SLURM_SECONDS = 60.0
"""Time limit for a command of Slurm."""
END_STATES = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it ended",
    "DEADLINE": "it reached its deadline",
    "FAILED": "it failed",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "it reached its time limit",
}
UNKNOWN = "Slurm no longer knows it"


class SlurmAgent:
    def __init__(self, job: str, orders: Path, log: Path, cancel: Callable[[str], None]) -> None:
        self.job = job  # "17_3": task 3 of array 17
        self.end: str | None = None
        self._orders = orders
        self._log = log
        self._cancel = cancel

    def ended(self) -> str | None:
        if self.end is None:
            return None
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        except OSError:
            lines = []
        return f"Slurm job {self.job}: {self.end}; {' | '.join(lines) or 'no output'} ({self._log})"

    def kill(self) -> None:
        # In the background, but this process waits for it at exit.
        threading.Thread(target=self._cancel, args=(self.job,)).start()
        self.remove_orders()

    def remove_orders(self) -> None:
        """Remove orders that no job will read."""
        self._orders.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it still holds orders of other jobs of the array
            self._orders.parent.rmdir()


class SlurmStarter:
    def __init__(
        self,
        *,
        shared_folder: Path,
        folder: str = "",
        python: str = sys.executable,
        options: Sequence[str] = (),
        watch_seconds: float = 2.0,
        array_seconds: float = ARRAY_SECONDS,
        agent: Sequence[str] = AGENT,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """`shared_folder`, for orders and logs, is visible on all nodes. `options` are those of sbatch.

        Agents get SIGTERM `NOTICE_SECONDS` before the time limit or a preemption.
        """
        for option in options:
            if not option.startswith("-"):
                raise ValueError(f"{option!r} is not an sbatch option (write --name=value without spaces)")
        if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
            raise ValueError(f"Slurm is missing: {', '.join(missing)} not found (use a login node)")
        self._folder = shared_folder.absolute()
        self._chdir = folder or os.fspath(Path.cwd())
        self._command = [python, *agent]
        self._options = [
            *["--job-name=varuna", f"--signal=B:TERM@{NOTICE_SECONDS}"],
            *options,
            *["--parsable", "--nodes=1", "--ntasks=1", "--no-requeue"],
        ]
        self._watch_seconds = watch_seconds
        self._array_seconds = array_seconds
        self._environment = environment
        self._lock = threading.Lock()
        self._requested: list[tuple[AgentOrders, Future[SlurmAgent]]] = []
        self._watched: list[SlurmAgent] = []
        self._watching = False

    def start(self, orders: AgentOrders) -> SlurmAgent:
        """Submit a job, together with those requested at the same time as one array."""
        answer: Future[SlurmAgent] = Future()
        with self._lock:
            self._requested.append((orders, answer))
            first = len(self._requested) == 1
        if first:
            threading.Event().wait(self._array_seconds)
            with self._lock:
                requested, self._requested = self._requested, []
            try:
                agents = self._submit([orders for orders, _ in requested])
            except Exception as error:
                for _, other in requested:
                    other.set_exception(error)
            else:
                for (_, other), agent in zip(requested, agents, strict=True):
                    other.set_result(agent)
        return answer.result()

    def _submit(self, requested: Sequence[AgentOrders]) -> list[SlurmAgent]:
        script = self._folder / "agent.sh"
        write_atomic(script, SCRIPT, private=True)
        orders_folder = Path(tempfile.mkdtemp(prefix="orders-", dir=self._folder))  # private
        files = [orders_folder / f"{number}.json" for number in range(len(requested))]
        for file, orders in zip(files, requested, strict=True):
            with os.fdopen(open_private(file), "wb") as opened:
                opened.write(orders.line())
        arguments = [
            *self._options,
            f"--array=0-{len(requested) - 1}",
            f"--output={self._folder}/slurm-%A_%a.log",
            f"--chdir={self._chdir}",
        ]
        try:
            output = self._slurm(
                "sbatch", *arguments, os.fspath(script), os.fspath(orders_folder), *self._command
            )
        except BaseException:
            shutil.rmtree(orders_folder)
            raise
        array = output.strip().split(";")[0]  # the cluster's name may follow
        agents = [
            SlurmAgent(f"{array}_{number}", file, self._folder / f"slurm-{array}_{number}.log", self._cancel)
            for number, file in enumerate(files)
        ]
        with self._lock:
            self._watched += agents
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, daemon=True, name="squeue").start()
        return agents

    def _slurm(self, *argv: str) -> str:
        try:
            run = subprocess.run(
                argv, env=self._environment, capture_output=True, text=True, timeout=SLURM_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"{argv[0]} did not answer within {SLURM_SECONDS:.0f} s") from None
        if run.returncode:
            raise ValueError(f"{argv[0]} failed: {run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def _cancel(self, job: str) -> None:
        """Kill the agent if it runs, then cancel its job."""
        # A signal to a queued task would end its whole array, so signal only running tasks.
        for options in [["--state=RUNNING", "--batch", "--signal=KILL"], []]:
            with contextlib.suppress(ValueError):  # the job may have ended already
                self._slurm("scancel", *options, job)

    def _watch(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
                self._watching = bool(watched)
            if not watched:
                return
            try:
                listing = self._slurm("squeue", "--me", "-h", "-r", "--states=all", "--format=%i|%T|%r")
            except ValueError:
                pass  # the controller is not reachable; try again later
            else:
                ends = find_ended([agent.job for agent in watched], listing)
                for agent in watched:
                    if (end := ends.get(agent.job)) is not None:
                        agent.end = end
                        agent.remove_orders()
                with self._lock:
                    self._watched = [agent for agent in self._watched if agent.end is None]
            threading.Event().wait(self._watch_seconds)


def find_ended(jobs: Sequence[str], listing: str) -> dict[str, str]:
    """Return the jobs that have ended, with the reason."""
    rows = (line.split("|", 2) for line in listing.splitlines())
    states = {job: (state, why) for job, state, why in rows}
    ends = {}
    for job in jobs:
        state, why = states.get(job, (UNKNOWN, "None"))
        if state in END_STATES or state == UNKNOWN:
            ends[job] = END_STATES.get(state, UNKNOWN) + (f" ({why})" if why != "None" else "")
    return ends
