"""Run a training script as a worker, and write its error to a file for the supervisor.

It imports neither torch nor the rest of the library, so a script imports only what it uses.
"""

import atexit
import functools
import importlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from varuna.files import DroppingFile, write_atomic

RENDEZVOUS = "torch.distributed.rendezvous"
JOB_STORE = "varuna.execute.comm.job_store"


class EarlySignal:
    """Remember a SIGUSR1 that arrives before the script has a handler; the first wrapped model handles it."""

    came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = True


early_signal = EarlySignal()


def join_job(credential: Mapping[str, str]) -> None:
    """Adopt the job's credential, and make `init_process_group()` use the job's store.

    Torch need not be imported yet: the change is made when the script imports it.
    """
    from varuna.secure.credential import JobCredential, adopt_credential

    adopt_credential(JobCredential(**credential))
    if RENDEZVOUS in sys.modules:
        use_job_store(sys.modules[RENDEZVOUS])
    else:
        sys.meta_path.insert(0, RendezvousFinder())


class RendezvousFinder:
    """An import hook: changes torch's rendezvous module when it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != RENDEZVOUS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                use_job_store(module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def use_job_store(rendezvous: ModuleType) -> None:
    """Replace torch's handlers of "env://", and of "tcp://" with the address of the job's store."""
    handlers = rendezvous._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = functools.partial(open_job_store, handlers[scheme])


def open_job_store(original: Callable[..., Iterator[Any]], url: str, **options: Any) -> Iterator[Any]:
    from varuna.secure.credential import own_credential

    store = f"tcp://{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    credential = own_credential()
    if credential is None or not (url.startswith("env:") or url.partition("?")[0].rstrip("/") == store):
        return original(url, **options)
    found: Iterator[Any] = importlib.import_module(JOB_STORE).rendezvous(url, credential, **options)
    return found


def run_script(code_dir: str, script: str, arguments: Sequence[str]) -> None:
    """Run the script like `python script`."""
    os.chdir(code_dir)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module  # it stays for threads and exit handlers
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)
    except Exception as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:  # hide our own frames
            trace = trace.tb_next
        write_error(error.with_traceback(trace))
        sys.excepthook(type(error), error, trace)
        sys.exit(1)


def keep_output_open() -> None:
    """Make output never raise: a script must not end because the disk of its logs is full."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        stream.flush()
        file = DroppingFile(number, "w", closefd=False)
        kept = io.TextIOWrapper(
            file,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, kept)


def keep_early_signals() -> None:
    signal.signal(signal.SIGUSR1, early_signal)
    signal.siginterrupt(signal.SIGUSR1, False)
    # At exit Python removes its handlers; a late signal would kill a script that ended normally.
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def write_error(error: Exception) -> None:
    """Write the exception to the error file of torch elastic, in its format; atomically."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(now)),
        "kinds": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__],
        "seconds": now,
    }
    text = json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
    with suppress(OSError):  # a full disk must not hide the error itself
        write_atomic(Path(path), text, fsync=False, private=True)
