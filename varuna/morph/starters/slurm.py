"""Starts agents as Slurm jobs of one node each, those that are asked for together as one array.

A job that is lost is not requeued, which Slurm puts off by minutes, but submitted anew when the manager asks
for its machine again. Which node runs it is Slurm's choice: the names in the machine list are the job's own.
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

from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.handover import AGENT

# A constant, its values come as arguments. The file with the secret goes as soon as it is open.
SCRIPT = """#!/bin/sh
orders="$1/$SLURM_ARRAY_TASK_ID.json"
shift
exec <"$orders" && rm -f "$orders" && exec "$@"
"""

GATHER_SECONDS = 0.1
OVER = {
    "BOOT_FAIL": "its node did not boot",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it has ended",
    "DEADLINE": "its deadline has come",
    "FAILED": "it has failed",
    "NODE_FAIL": "its node was lost",
    "OUT_OF_MEMORY": "it ran out of memory",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "its time is over",
}
GONE = "Slurm does not know it any more"


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
            said = self._log.read_text(errors="replace").strip().splitlines()[-3:]
        except OSError:
            said = []
        return f"Slurm job {self.job}: {self.end}; {' | '.join(said) or 'no word'} ({self._log})"

    def kill(self) -> None:
        # In the background, but this process does not end before.
        threading.Thread(target=self._cancel, args=(self.job,)).start()
        self.forget_orders()

    def forget_orders(self) -> None:
        """Nobody has taken them, and nobody will."""
        self._orders.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others of the array still have theirs there
            self._orders.parent.rmdir()


class SlurmStarter:
    def __init__(
        self,
        *,
        shared_folder: Path,
        folder: str = "",
        python: str = sys.executable,
        options: Sequence[str] = (),
        notice_seconds: int = 60,
        watch_seconds: float = 2.0,
        agent: Sequence[str] = AGENT,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """All nodes see `shared_folder`, for orders and logs. `options` are sbatch's: `--partition=spot`.

        Where a job's time runs out or it is preempted, its agent is told so `notice_seconds` ahead.
        """
        for option in options:
            if not option.startswith("-"):
                raise ValueError(
                    f"sbatch's options begin with '-', not {option!r} (--name=value, one word each)"
                )
        if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
            raise ValueError(f"no Slurm here: {', '.join(missing)} not found (start the job on a login node)")
        self._folder = shared_folder.absolute()
        self._chdir = folder or os.fspath(Path.cwd())
        self._command = [python, *agent]
        self._options = [
            *["--job-name=varuna", f"--signal=B:TERM@{notice_seconds}"],
            *options,
            *["--parsable", "--nodes=1", "--ntasks=1", "--no-requeue"],
        ]
        self._watch_seconds = watch_seconds
        self._environment = environment
        self._lock = threading.Lock()
        self._asked: list[tuple[AgentOrders, Future[SlurmAgent]]] = []
        self._watched: list[SlurmAgent] = []
        self._watching = False

    def start(self, orders: AgentOrders) -> SlurmAgent:
        """Waits a moment for others that are asked for at the same time: they make one array."""
        answer: Future[SlurmAgent] = Future()
        with self._lock:
            self._asked.append((orders, answer))
            first = len(self._asked) == 1
        if first:
            threading.Event().wait(GATHER_SECONDS)
            with self._lock:
                asked, self._asked = self._asked, []
            try:
                agents = self._submit([orders for orders, _ in asked])
            except Exception as error:
                for _, other in asked:
                    other.set_exception(error)
            else:
                for (_, other), agent in zip(asked, agents, strict=True):
                    other.set_result(agent)
        return answer.result()

    def _submit(self, asked: Sequence[AgentOrders]) -> list[SlurmAgent]:
        self._folder.mkdir(parents=True, exist_ok=True)
        script = self._folder / "agent.sh"
        script.write_text(SCRIPT)
        taken = Path(tempfile.mkdtemp(prefix="orders-", dir=self._folder))  # for this user's eyes alone
        files = [taken / f"{number}.json" for number in range(len(asked))]
        for file, orders in zip(files, asked, strict=True):
            file.touch(mode=0o600)
            file.write_bytes(orders.line())
        arguments = [
            *self._options,
            f"--array=0-{len(asked) - 1}",
            f"--output={self._folder}/slurm-%A_%a.log",
            f"--chdir={self._chdir}",
        ]
        try:
            said = self._slurm("sbatch", *arguments, os.fspath(script), os.fspath(taken), *self._command)
        except BaseException:
            shutil.rmtree(taken)
            raise
        array = said.strip().split(";")[0]  # with the cluster's name behind it where there are several
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
        run = subprocess.run(argv, env=self._environment, capture_output=True, text=True)
        if run.returncode:
            raise ValueError(f"{argv[0]} refused: {run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def _cancel(self, job: str) -> None:
        """The agent at once, as far as it runs; then whatever is left of its job."""
        # A signal to a task that is still queued would end its whole array, so only to one that runs.
        for how in [["--state=RUNNING", "--batch", "--signal=KILL"], []]:
            subprocess.run(["scancel", *how, job], env=self._environment, capture_output=True)

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
                pass  # a controller that is away says nothing about its jobs
            else:
                ends = find_ended([agent.job for agent in watched], listing)
                for agent in watched:
                    if (end := ends.get(agent.job)) is not None:
                        agent.end = end
                        agent.forget_orders()
                with self._lock:
                    self._watched = [agent for agent in self._watched if agent.end is None]
            threading.Event().wait(self._watch_seconds)


def find_ended(jobs: Sequence[str], listing: str) -> dict[str, str]:
    """The jobs that are over, and why; one that is queued, starts or runs may live."""
    states = {}
    for line in listing.splitlines():
        job, state, why = line.split("|", 2)
        states[job] = (state, why)
    ends = {}
    for job in jobs:
        state, why = states.get(job, (GONE, "None"))
        if state in OVER or state == GONE:
            ends[job] = OVER.get(state, GONE) + (f" ({why})" if why != "None" else "")
    return ends
