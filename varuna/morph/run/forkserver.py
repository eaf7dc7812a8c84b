"""A process that has imported torch already, and forks workers: so that a restart need not import it again.

Started by an agent, as `python -P nursery.py`; it speaks JSON lines with it:

    agent ──► {"fork": {"key": "2/0", ...}}, {"signal": {"key": "2/0", "number": 9}}, {"store": {...}},
              {"beat": {}}
    agent ◄── {"ready": {}}, {"forked": {"key": "2/0", "pid": 7}}, {"ended": {"key": "2/0", "code": -9}},
              {"store": {"key": "store 1", "port": 40001}}

It forks, so it never starts a thread and never touches a GPU. It is also the workers' guard: when the
agent goes, however it goes, the nursery's input ends, and with it end all workers and what they started.
Where the agent lives but stands still, the manager has given this machine up, and they end too.
"""

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "torch.distributed", "varuna.train.varuna")
LATER = ("torch.export._trace",)
"""What wrapping a model would import, hundreds of modules: for when the machine may be counted on already."""
LEASE_SECONDS = 10
"""An agent that is silent for so long stands still."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Nursery:
    def __init__(self, requests: int, answers: int) -> None:
        self.requests = requests
        self.answers = answers
        self.children: dict[str, int] = {}  # process ids, which are those of their groups too
        self._later = list(LATER)
        self._buffer = b""

    def serve(self) -> dict[str, Any] | None:
        """Returns in a worker, with its orders; in the nursery itself when the agent is gone: None."""
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wakes)
        self.answer("ready", {})
        silent_seconds = 0  # counted one by one: those in which the whole machine stood still are none
        while True:
            warm = bool(self.children)  # the first store is there
            ready, _, _ = select.select([self.requests, woken], [], [], 0 if self._later and warm else 1)
            if self._later and warm and not ready:
                preload([self._later.pop(0)])
                continue
            silent_seconds = 0 if self.requests in ready else silent_seconds + (not ready)
            if silent_seconds == LEASE_SECONDS:
                self.end_workers()
            if woken in ready:
                os.read(woken, 4096)
                self.reap()
            if self.requests in ready:
                data = os.read(self.requests, 65536)
                if not data:
                    return None
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    if (orders := self.carry_out(json.loads(line))) is not None:
                        return orders

    def carry_out(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if "signal" in request:
            self.signal(**request["signal"])
        elif "store" in request:
            return self.fork_store(**request["store"])
        elif "fork" in request:
            return self.fork(request["fork"])
        return None

    def signal(self, key: str, number: int) -> None:
        """SIGKILL goes to all that the worker has started, any other to it alone: those would die of it."""
        if pid := self.children.get(key):
            with suppress(ProcessLookupError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)

    def fork(self, orders: dict[str, Any]) -> dict[str, Any] | None:
        if not self._fork(orders["key"]):
            return orders
        self.answer("forked", {"key": orders["key"], "pid": self.children[orders["key"]]})
        return None

    def fork_store(self, key: str, host: str) -> dict[str, Any] | None:
        """A process of its own for a store: it has threads, and outlives the workers that it serves."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as listener:
            listener.bind((host, 0))
            listener.listen(1024)
            port = listener.getsockname()[1]
            if not self._fork(key):
                return {"store": listener.detach(), "port": port, "host": host}
        self.answer("store", {"key": key, "port": port})
        return None

    def _fork(self, key: str) -> bool:
        """True in the nursery. The child leads a group of its own when both go on."""
        pid = os.fork()
        if pid:
            with suppress(OSError):
                os.setpgid(pid, pid)
            self.children[key] = pid
            return True
        signal.set_wakeup_fd(-1)
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        os.close(self.requests)
        os.close(self.answers)
        return False

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what it had started
            for key in [key for key, child in self.children.items() if child == pid]:
                del self.children[key]
                self.answer("ended", {"key": key, "code": os.waitstatus_to_exitcode(status)})

    def answer(self, what: str, facts: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self.answers, json.dumps({what: facts}).encode() + b"\n")

    def end_workers(self) -> None:
        """But not the store, which an agent that comes to life again takes for granted."""
        for key in self.children:
            if not key.startswith("store"):
                self.signal(key, signal.SIGKILL)

    def end(self) -> None:
        for group in self.children.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def preload(names: Sequence[str] = PRELOADED) -> None:
    if importlib.util.find_spec("varuna") is None:  # the agent was started from its folder
        sys.path.append(str(Path(__file__).parents[3]))
    gc.disable()  # next to nothing of it is garbage, and looking for that takes a quarter of the time
    for name in names:
        importlib.import_module(name)
    gc.freeze()  # workers neither look through what they share nor, by doing so, copy it
    gc.enable()


def become_store(parent: int, listener: int, host: str, port: int) -> None:
    import torch.distributed as dist

    from varuna.processes import die_with_parent

    die_with_parent(parent)
    kept = dist.TCPStore(  # type: ignore[attr-defined]  # torch declares it elsewhere
        host, port, is_master=True, master_listen_fd=listener, wait_for_workers=False
    )
    while kept is not None:
        signal.pause()


def become_worker(parent: int, orders: dict[str, Any]) -> None:
    from varuna.morph.run import worker
    from varuna.processes import die_with_parent

    os.environ.update(orders["environment"])
    for place, number in ((orders["out"], 1), (orders["err"], 2)):
        log = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, number)
        os.close(log)
    die_with_parent(parent)
    worker.keep_early_signals()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where it hangs, if it is asked
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if "numpy" in sys.modules:  # its state was copied; torch's and Python's own look after themselves
        sys.modules["numpy"].random.seed()
    worker.run_script(orders["code_dir"], orders["script"], orders["arguments"])


def leave(code: object) -> None:
    """As an interpreter ends, but for tidying up all that torch has imported, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what imported modules print is no answer
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it ends when its agent does
    # A worker that is signalled before it has a handler must neither die of it nor miss it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    preload()
    nursery = Nursery(requests, answers)
    parent = os.getpid()
    orders = nursery.serve()
    if orders is None:
        nursery.end()
    elif "store" in orders:
        become_store(parent, orders["store"], orders["host"], orders["port"])
    else:
        try:
            become_worker(parent, orders)
        except SystemExit as ended:
            if ended.code is not None and not isinstance(ended.code, int):
                print(ended.code, file=sys.stderr)
            leave(ended.code)
        except BaseException as error:  # what no script catches: KeyboardInterrupt
            sys.excepthook(type(error), error, error.__traceback__)
            leave(1)
        leave(0)


if __name__ == "__main__":
    main()
