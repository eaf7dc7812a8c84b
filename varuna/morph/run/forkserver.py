"""The fork server: a process that has imported torch, and forks workers that need not import it again.

A supervisor starts it as `python -P forkserver.py LEASE_SECONDS [MODULE ...]`, and they exchange JSON
lines over its stdin and stdout:

    to the fork server    {"fork": {"key": "2/0", ...}}, {"signal": {"key": "2/0", "number": 9}},
                          {"store": {"key": "store 1", "host": "10.0.0.4", ...}}, {"beat": {}}
    from the fork server  {"ready": {}}, {"forked": {"key": "2/0", "pid": 7}}, {"beat": {}},
                          {"ended": {"key": "2/0", "code": -9}},
                          {"store": {"key": "store 1", "port": 40001, "pid": 8, "error": ""}}

The job's credential is a field of "fork" and "store", so it appears in no argument list or environment. It
never starts a thread and never uses a GPU, because it forks. When its supervisor dies, its stdin
ends, and it kills all workers and everything that they started. When the supervisor is silent for
LEASE_SECONDS (0: no limit), for example because it is stopped, the workers are killed too: the manager
has given this machine up.
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

PRELOADED = ("torch", "torch.distributed", "varuna.train.varuna", "varuna.execute.comm.job_store")
"""Modules that an agent's fork server imports before the first fork."""
PRELOADED_LATER = ("torch.export._trace", "varuna.capture.rehearsal:rehearse")
"""Modules that wrapping a model imports, and a function to call: after the first fork, while the server is
idle."""
LEASE_SECONDS = 10
"""Lease of an agent's workers."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class ForkServer:
    def __init__(self, requests: int, answers: int, *, lease_seconds: int, later: Sequence[str]) -> None:
        self.requests = requests
        self.answers = answers
        self.children: dict[str, int] = {}  # process ids, which are also their group ids
        self._lease_seconds = lease_seconds
        self._later = list(later)
        self._buffer = b""

    def serve(self) -> dict[str, Any] | None:
        """Handle requests. Return the request in a forked child, and None when the supervisor is gone."""
        wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writer)
        self.answer("ready", {})
        silent_seconds = 0  # counted one by one, so time in which the whole machine slept does not count
        while True:
            preloads = self._later and self.children  # the first store is forked
            ready, _, _ = select.select([self.requests, wake_reader], [], [], 0 if preloads else 1)
            if preloads and not ready:
                preload([self._later.pop(0)])
                continue
            silent_seconds = 0 if self.requests in ready else silent_seconds + (not ready)
            if silent_seconds and silent_seconds == self._lease_seconds:
                self.kill(stores=False)
            if wake_reader in ready:
                os.read(wake_reader, 4096)
                self.reap()
            if self.requests in ready:
                data = os.read(self.requests, 65536)
                if not data:
                    return None
                *lines, self._buffer = (self._buffer + data).split(b"\n")
                for line in lines:
                    if (request := self.carry_out(json.loads(line))) is not None:
                        return request

    def carry_out(self, request: dict[str, Any]) -> dict[str, Any] | None:
        if "signal" in request:
            self.signal(**request["signal"])
        elif "store" in request:
            return self.fork_store(**request["store"])
        elif "beat" in request:
            self.answer("beat", {})
        elif "fork" in request:
            worker: dict[str, Any] = request["fork"]
            if not self._fork(worker["key"]):
                return worker
            self.answer("forked", {"key": worker["key"], "pid": self.children[worker["key"]]})
        return None

    def signal(self, key: str, number: int) -> None:
        """Send SIGKILL to the child's whole group, any other signal to the child alone."""
        if pid := self.children.get(key):
            with suppress(ProcessLookupError, PermissionError):
                if number == signal.SIGKILL:
                    os.killpg(pid, number)
                else:
                    os.kill(pid, number)

    def fork_store(self, key: str, host: str, port: int, credential: dict[str, str]) -> dict[str, Any] | None:
        """Fork a process for the store of a generation, which outlives its workers."""
        from varuna.secure.credential import JobCredential
        from varuna.secure.store_client import client_context
        from varuna.secure.store_server import listen

        client_context(JobCredential(**credential))  # workers need it, and inherit it
        try:
            listener = listen(host, port)
        except OSError as error:
            self.answer("store", {"key": key, "port": 0, "pid": 0, "error": error.strerror or str(error)})
            return None
        with listener:
            port = listener.getsockname()[1]
            if not self._fork(key):
                return {"store": listener.detach(), "credential": credential}
        self.answer("store", {"key": key, "port": port, "pid": self.children[key], "error": ""})
        return None

    def _fork(self, key: str) -> bool:
        """Fork a child that leads its own process group; return True in the fork server."""
        pid = os.fork()
        if pid:
            with suppress(OSError):
                os.setpgid(pid, pid)
            self.children[key] = pid
            return True
        signal.set_wakeup_fd(-1)
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setpgid(0, 0)
        os.close(self.requests)
        os.close(self.answers)
        return False

    def reap(self) -> None:
        """Report children that have ended, and kill what they started."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            for key in [key for key, child in self.children.items() if child == pid]:
                del self.children[key]
                self.answer("ended", {"key": key, "code": os.waitstatus_to_exitcode(status)})

    def answer(self, what: str, facts: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self.answers, json.dumps({what: facts}).encode() + b"\n")

    def kill(self, *, stores: bool) -> None:
        """Kill the workers, and optionally the stores, which a resumed agent still needs."""
        for key in self.children:
            if stores or not key.startswith("store"):
                self.signal(key, signal.SIGKILL)


def preload(names: Sequence[str]) -> None:
    if importlib.util.find_spec("varuna") is None:  # varuna is not installed: it runs from a checkout
        sys.path.append(str(Path(__file__).parents[3]))
    gc.disable()  # imports create little garbage; collections would take a quarter of the time
    for name in names:
        module, _, function = name.partition(":")
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    gc.freeze()  # collections in workers must not touch, and so copy, the shared memory
    gc.enable()


def become_store(parent: int, listener: int, credential: dict[str, str]) -> None:
    from varuna.processes import die_with_parent, name_process
    from varuna.secure.credential import JobCredential
    from varuna.secure.store_server import run_store

    die_with_parent(parent)
    name_process("varuna-store")
    run_store(socket.socket(fileno=listener), JobCredential(**credential), log_store_line)


def log_store_line(line: str) -> None:
    print(f"varuna: the job's store: {line}", file=sys.stderr, flush=True)


def become_worker(parent: int, request: dict[str, Any]) -> None:
    from varuna.files import open_private
    from varuna.morph.run import worker
    from varuna.morph.run.script_flags import offer_flags
    from varuna.processes import die_with_parent

    os.environ.update(request["environment"])
    if (credential := request.pop("credential", None)) is not None:
        worker.join_job(credential)
    for path, number in ((request["out"], 1), (request["err"], 2)):
        log = open_private(Path(path))
        os.dup2(log, number)
        os.close(log)
    worker.keep_output_open()
    die_with_parent(parent)
    worker.keep_early_signals()
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # writes stack traces to the log
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    # The fork copied random states. Seed them as a new process would; Python reseeds its own.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if flags := request.get("flags"):
        offer_flags(flags)
    worker.run_script(request["code_dir"], request["script"], request["arguments"])


def leave(code: object) -> None:
    """Exit like the interpreter, but without freeing all of torch, which takes seconds."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def main() -> None:
    lease_seconds, *modules = sys.argv[1:]
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # output of imported modules must not mix with answers
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it ends with its supervisor
    # A worker without a handler must neither die of these signals nor miss them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    preload(modules)
    later = PRELOADED_LATER if modules else ()
    server = ForkServer(requests, answers, lease_seconds=int(lease_seconds), later=later)
    parent = os.getpid()
    request = server.serve()
    if request is None:
        server.kill(stores=True)
    elif "store" in request:
        become_store(parent, request["store"], request["credential"])
    else:
        try:
            become_worker(parent, request)
        except SystemExit as ended:
            if ended.code is not None and not isinstance(ended.code, int):
                print(ended.code, file=sys.stderr)
            leave(ended.code)
        except BaseException as error:  # such as KeyboardInterrupt
            sys.excepthook(type(error), error, error.__traceback__)
            leave(1)
        leave(0)


if __name__ == "__main__":
    main()
