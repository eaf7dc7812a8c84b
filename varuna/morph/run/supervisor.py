"""The supervisor of one machine's workers: starts, watches, signals and ends them.

It controls a fork server (`forkserver.py`), whose input pipe ties everything to this process: when the
supervisor's process dies, the fork server kills all workers and everything that they started. Agents
and `varuna.launcher` use it.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode
from varuna.environment import VarunaEnvironment
from varuna.files import make_private_folder
from varuna.morph.failures import ErrorFile, WorkerFailure, describe_exit
from varuna.morph.metrics.collect import MetricsCollector
from varuna.morph.run.log_pages import last_lines
from varuna.morph.run.order_page import OrderWriter
from varuna.morph.run.progress_page import ProgressReader
from varuna.morph.run.worker_env import (
    WORKER_DEFAULTS,
    launch_flags,
    worker_arguments,
    worker_environment,
)
from varuna.morph.state import Outcome, WorkerFacts, WorkerProgress
from varuna.secure.credential import JobCredential
from varuna.types import MachineWorkers, MorphOrder

MAX_UNANSWERED = 240
"""A fork server that leaves so many heartbeats unanswered hangs. An agent sends two per second."""
CLOSE_SECONDS = 5.0
"""Time limit for the fork server to exit."""
MAX_OUTPUT = 256 * 2**10
"""Bytes of a log file that are read at once."""
MAX_BACKLOG = 4 * 2**20
"""Bytes of output that wait to be shown; of more, only the last ones are shown."""


class WorkerProcess:
    """One worker with its log files, error file and outcome."""

    def __init__(self, rank: int, folder: Path, *, key: str, shows_progress: bool) -> None:
        self.rank = rank
        self.key = key  # its name in the fork server; it stays when a morph changes the rank
        self.out = folder / f"rank_{rank}.out"
        self.err = folder / f"rank_{rank}.err"
        self.error_file = folder / f"rank_{rank}.error.json"
        self.pid: int | None = None
        self.exit_code: int | None = None
        self.outcome: Outcome | None = None  # None while it runs
        self.leaves_in = 0  # generation that the others enter without it; 0: it stays
        self.last_progress = WorkerProgress(rank)
        progress_file = folder / f"rank_{rank}.progress"
        self._reader = ProgressReader(progress_file, rank) if shows_progress else None
        self.metrics = MetricsCollector(progress_file) if shows_progress else None
        self._orders = OrderWriter(progress_file) if shows_progress else None
        self._shown = {False: 0, True: 0}  # bytes of stdout and stderr that were returned

    def environment(self) -> dict[str, str]:
        progress_file = None if self._reader is None else str(self._reader.path)
        ours = VarunaEnvironment(progress_file=progress_file)
        return {"TORCHELASTIC_ERROR_FILE": str(self.error_file), **ours.write()}

    def progress(self) -> WorkerProgress:
        assert self._reader is not None and self._orders is not None
        facts = self.metrics.facts(self.pid or 0) if self.metrics is not None else WorkerFacts()
        found = self._reader.read(self.pid or 0)
        return msgspec.structs.replace(found, facts=facts, taken=self._orders.taken)

    def failure(self) -> WorkerFailure | None:
        """Return the failure of the worker, also while it still runs after writing its error file."""
        error = read_error(self.error_file)
        return WorkerFailure(self.rank, self.exit_code, error) if error or self.exit_code else None

    def end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        failure = self.failure()
        saved = failure is None and self._reader is not None and self._reader.on_demand
        lines = last_lines(self.err) if failure is not None else ""
        if self._reader is not None:
            self.last_progress = self._reader.read()
            self._reader.close()
        entered = self.last_progress.generation
        self.outcome = Outcome(failure, on_demand=saved, last_lines=lines, entered=entered)
        if self._orders is not None:
            self._orders.close()
        if self.metrics is not None:
            self.metrics.close()

    def give(self, order: MorphOrder, folder: Path) -> None:
        """Order the worker into the next generation; `folder` gets links to its logs. Raise OSError."""
        assert self._orders is not None and self._reader is not None
        if order.rank is not None:
            if order.rank == 0 != self.rank:  # show its output from now on
                for is_stderr, path in ((False, self.out), (True, self.err)):
                    self._shown[is_stderr] = path.stat().st_size if path.exists() else 0
            for path in (self.out, self.err):
                link = folder / f"rank_{order.rank}{path.suffix}"
                if not link.exists():  # a joiner may have its log there
                    link.symlink_to(os.path.relpath(path, folder))
            self.rank = self._reader.rank = order.rank
        self.leaves_in = order.generation if order.rank is None else 0
        self._orders.give(order)

    def new_output(self) -> Iterator[tuple[bool, str]]:
        """Yield new complete lines as (is stderr, text); the rest of the files once it has ended."""
        for is_stderr, path in ((False, self.out), (True, self.err)):
            with suppress(OSError), path.open("rb") as file:
                skipped = file.seek(0, os.SEEK_END) - MAX_BACKLOG - self._shown[is_stderr]
                if skipped > 0:
                    self._shown[is_stderr] += skipped
                    yield is_stderr, f"[{skipped} bytes are not shown here: see {path}]\n"
                file.seek(self._shown[is_stderr])
                while data := file.read(MAX_OUTPUT):
                    if self.outcome is None:
                        end = data.rfind(b"\n") + 1
                        data = data if len(data) == MAX_OUTPUT and not end else data[:end]
                    if data:
                        self._shown[is_stderr] += len(data)
                        yield is_stderr, data.decode(errors="replace")
                    if self.outcome is None:
                        break


class Supervisor:
    """The workers of one generation, and the fork server that starts them."""

    def __init__(
        self,
        credential: JobCredential | None = None,
        *,
        on_worker_end: Callable[[WorkerProcess], None] = lambda worker: None,
        on_ready: Callable[[], None] = lambda: None,
        on_store: Callable[[int, str], None] = lambda port, error: None,
        on_store_end: Callable[[int, str], None] = lambda port, why: None,
        on_exit: Callable[[str], None] = lambda why: None,
        on_worker_left: Callable[[WorkerProcess], None] = lambda worker: None,
    ) -> None:
        """`credential` None: the workers use torch's own store, which is open to strangers.

        `on_store` gets the port of a new store, or 0 and an error; `on_store_end` the port of a store that
        ended unexpectedly, `on_exit` the reason for an unexpected end of the fork server, `on_worker_left` a
        worker that was to hand its state over, and has ended.
        """
        self.workers: dict[int, WorkerProcess] = {}  # by rank
        self.leaving: list[WorkerProcess] = []  # hand their state over to the others, then exit
        self.store_port = 0  # of the store for the next generation
        self._credential = None if credential is None else msgspec.structs.asdict(credential)
        self._on_worker_end = on_worker_end
        self._on_ready = on_ready
        self._on_store = on_store
        self._on_store_end = on_store_end
        self._on_exit = on_exit
        self._on_worker_left = on_worker_left
        self._server: asyncio.subprocess.Process | None = None
        self._closing = False
        self._stores: dict[str, int] = {}  # port by key; the last one is for the next generation
        self._num_stores = 0
        self._ready = False  # it has imported its modules
        self._unanswered = 0  # heartbeats since the last answer

    @property
    def is_open(self) -> bool:
        return self._server is not None

    @property
    def store_ports(self) -> list[int]:
        """Ports of the live stores."""
        return list(self._stores.values())

    @property
    def live_workers(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers.values() if worker.outcome is None]

    async def open(self, environment: Mapping[str, str], *, options: Sequence[str] = ("0",)) -> None:
        """Start the fork server; `environment` overrides the variables of this process.

        `options` are the lease in seconds (0: none) and the modules to import before forks.
        """
        self._server = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(Path(__file__).with_name("forkserver.py")),
            *options,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**WORKER_DEFAULTS, **os.environ, **environment},
            start_new_session=True,  # a Ctrl-C in the terminal does not reach it
        )
        self._watching = asyncio.create_task(self._watch(self._server))

    async def _watch(self, server: asyncio.subprocess.Process) -> None:
        assert server.stdout is not None
        while line := await server.stdout.readline():
            ((what, facts),) = json.loads(line).items()
            self._handle_answer(what, facts)
        status = await server.wait()
        self._end_live_workers()
        if not self._closing:
            self._on_exit(f"the fork server exited with status {status}")

    def _end_live_workers(self) -> None:
        for worker in (*self.live_workers, *self.leaving):  # they died with it, but not their own children
            if worker.pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            worker.end(-signal.SIGKILL)

    def _handle_answer(self, what: str, facts: dict[str, Any]) -> None:
        self._unanswered = 0
        if what == "ready":
            self._ready = True
            self._on_ready()
        elif what == "store":
            if not facts["error"]:
                self._stores[facts["key"]] = facts["port"]
            self.store_port = facts["port"]
            self._on_store(self.store_port, facts["error"])
        elif what == "ended" and facts["key"] in self._stores:
            port = self._stores.pop(facts["key"])
            if port == self.store_port:
                self.store_port = 0
            self._on_store_end(port, f"its process {describe_exit(facts['code'])}")
        elif what == "beat":
            pass
        else:
            everyone = (*self.workers.values(), *self.leaving)
            worker = next((worker for worker in everyone if worker.key == facts["key"]), None)
            if worker is not None and what == "forked":
                worker.pid = facts["pid"]
            elif worker is not None and what == "ended":
                worker.end(facts["code"])
                if worker in self.leaving:
                    self._on_worker_left(worker)
                    self.leaving.remove(worker)
                else:
                    self._on_worker_end(worker)

    def _request(self, what: str, **facts: Any) -> None:
        assert self._server is not None and self._server.stdin is not None
        with suppress(OSError):
            self._server.stdin.write(json.dumps({what: facts}).encode() + b"\n")

    def send_heartbeat(self) -> None:
        """Renew the lease of the workers: without it the fork server kills them."""
        if self.is_open and not self._closing:
            self._request("beat")
            self._unanswered += self._ready
            if self._unanswered > MAX_UNANSWERED:  # counted: this process may have slept
                self._on_exit(f"the fork server has left {MAX_UNANSWERED} heartbeats unanswered")

    def open_store(self, host: str, port: int = 0) -> None:
        """Open a store for the next generation; `on_store` gets its port. 0: choose a free port."""
        assert self._credential is not None, "a store needs the credential of its job"
        self.store_port = 0
        self._num_stores += 1
        key = f"store {self._num_stores}"
        self._request("store", key=key, host=host, port=port, credential=self._credential)

    def close_old_stores(self, *, used: int = 0) -> None:
        """Kill all stores but the last, and the one at the port `used`."""
        for key, port in list(self._stores.items())[:-1]:
            if port != used:
                self._request("signal", key=key, number=int(signal.SIGKILL))
                del self._stores[key]

    def start_workers(
        self,
        workers: MachineWorkers,
        folder: Path,
        *,
        generation: int = 1,
        environment: Mapping[str, str] = {},
        shows_progress: bool = False,
    ) -> None:
        """Start workers that log to `folder`. Raise OSError if their files cannot be created."""
        make_private_folder(folder)
        self.workers = {
            rank: WorkerProcess(rank, folder, key=f"{generation}/{rank}", shows_progress=shows_progress)
            for rank in workers.ranks
        }
        for local_rank, worker in enumerate(self.workers.values()):
            variables = {**worker_environment(workers, local_rank), **worker.environment(), **environment}
            self._request(
                "fork",
                key=worker.key,
                environment=variables,
                out=str(worker.out),
                err=str(worker.err),
                code_dir=workers.job.code_dir,
                script=workers.job.script,
                arguments=worker_arguments(workers, local_rank),
                flags=launch_flags(workers, local_rank) if workers.job.offers_flags else {},
                credential=self._credential,
            )

    def morph_workers(self, orders: Mapping[int, MorphOrder], folder: Path) -> None:
        """Give each live worker its order, by its present rank. Raise OSError.

        Workers without an order are lost, and killed. So are workers that still hand their state over in an
        earlier morph, if this one interrupts it.
        """
        make_private_folder(folder)
        live = [worker for worker in self.live_workers if worker.rank in orders]
        given_up = [worker for worker in self.live_workers if worker.rank not in orders]
        interrupted = self.leaving if any(order.lost for order in orders.values()) else []
        for worker in (*given_up, *interrupted):
            self._request("signal", key=worker.key, number=int(signal.SIGKILL))
        ends = all(orders[worker.rank].rank is None for worker in live)
        for worker in live:
            order = orders[worker.rank]
            worker.give(order, folder)
            if order.rank is None and not ends:
                self.leaving.append(worker)
        if not ends:  # else they stay the workers of their generation, and end with it
            self.leaving += given_up
            self.workers = {worker.rank: worker for worker in live if worker not in self.leaving}

    def collect_metrics(self, *, again: bool = False) -> list[MetricsCollector]:
        """Take the new records of all workers, also of those that have ended; `again`: also the last ones."""
        found = []
        for worker in (*self.workers.values(), *self.leaving):
            if worker.metrics is not None:
                worker.metrics.collect(worker.rank, again=again)
                found.append(worker.metrics)
        return found

    def signal_workers(self, number: int) -> None:
        """Send a signal to all live workers; SIGKILL reaches their own children too."""
        for worker in (*self.live_workers, *self.leaving):
            self._request("signal", key=worker.key, number=int(number))

    async def close(self) -> None:
        """Close the input of the fork server, which then kills all workers and exits."""
        self._closing = True
        if self._server is not None and self._server.stdin is not None:
            self._server.stdin.close()
            try:
                await asyncio.wait_for(self._watching, CLOSE_SECONDS)
            except TimeoutError:  # it hangs; its workers and stores die with it
                self._server.kill()
                self._end_live_workers()


def read_error(path: Path) -> ErrorFile | None:
    try:
        return decode(path.read_bytes(), ErrorFile, str(path))
    except (FileNotFoundError, ValueError):  # not written, or in another format
        return None
