"""Worker processes that live through many tests: importing torch once per process, not once per test.

A task is a function of a test module, called on every rank with torch.distributed initialised; what
it returns comes back by rank. A task that fails or hangs costs the pool its processes, not its tests.
"""

import importlib
import multiprocessing as mp
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).parent.parent


CONNECT_TRIES = 3
"""Attempts to connect the ranks: gloo gives up on a machine that is busy."""


class TaskFailed(AssertionError):
    pass


class Pool:
    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        task: Callable[..., Any],
        world: int,
        *args: Any,
        timeout: float = 90,
        grace: float = 20,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `task(*args, **kwargs)` on ranks 0 to world - 1; its results by rank.

        The task starts when all ranks have connected. If one of them cannot, new processes try again.
        """
        call = pickle.dumps((task.__module__, task.__qualname__, args, kwargs))
        for _ in range(CONNECT_TRIES):
            while len(self._workers) < world:
                self._start()
            port = free_port()
            for rank in range(world):
                self._workers[rank][1].send((rank, world, port, call))
            _, failures = self._answers(world, timeout, grace)
            if not failures:
                break
            self.close()
        else:
            raise TaskFailed(f"the ranks cannot connect\n{_listed(failures)}")
        for rank in range(world):
            self._workers[rank][1].send("run the task")
        results, failures = self._answers(world, timeout, grace)
        if failures:
            self.close()
            raise TaskFailed(f"task {task.__name__} failed\n{_listed(failures)}")
        for rank in range(world):
            self._workers[rank][1].send("all have finished")
        return [results[rank] for rank in range(world)]

    def _answers(self, world: int, timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Wait for one answer of each rank; return the results, and the errors."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {self._workers[rank][1]: rank for rank in range(world)}
        while pending:
            ready = wait(list(pending), timeout)
            if not ready:
                self.close()
                raise TaskFailed(
                    f"ranks {sorted(pending.values())} did not answer in {timeout} s; failed: {failures}"
                )
            for connection in ready:
                rank = pending.pop(connection)  # type: ignore[arg-type]
                try:
                    fine, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    fine, value = False, "the process died"
                (results if fine else failures)[rank] = value
                if not fine:
                    timeout = min(timeout, grace)  # the others have little to wait for
        return results, failures

    def close(self) -> None:
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
        process.start()
        theirs.close()
        self._workers.append((process, ours))


def _listed(failures: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank}:\n{failure}" for rank, failure in sorted(failures.items()))


def _serve(connection: Connection, path: list[str]) -> None:
    sys.path[:] = [str(ROOT), *path]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            rank, world, port, call = connection.recv()
        except EOFError:
            return
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        try:
            module, name, args, kwargs = pickle.loads(call)
            task = getattr(importlib.import_module(module), name)
            dist.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
            )
            connection.send((True, None))
            connection.recv()
            value = task(*args, **kwargs)
            connection.send((True, value))
            connection.recv()  # a rank that left earlier could reset connections that others still read
            dist.destroy_process_group()
        except EOFError:
            return
        except BaseException:
            connection.send((False, traceback.format_exc()))
            if dist.is_initialized():
                dist.destroy_process_group()
