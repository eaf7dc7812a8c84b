"""Runs a training script as one worker: it dies with its launcher, and leaves its error where that reads it.

Started by file name, as `python -P worker.py LAUNCHER_PID CODE_DIR SCRIPT ARGS...`, so that it works
from any folder; it imports neither torch nor the rest of the library, so that a script pays for
nothing that it does not use itself.
"""

import atexit
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType, TracebackType

if __name__ == "__main__":  # started by file name: the library may not be on the path
    sys.path.append(str(Path(__file__).parents[3]))
from varuna.files import write_atomic
from varuna.processes import die_with_parent

if __name__ == "__main__":
    sys.path.pop()  # the script's imports stay its own


class EarlySignal:
    """Keeps a SIGUSR1 that comes before the script has a handler; the first wrapped model asks for it."""

    came = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.came = True


early_signal = EarlySignal()


def main() -> None:
    launcher, code_dir, script, *arguments = sys.argv[1:]
    die_with_parent(int(launcher))
    keep_early_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the launcher held signals while it started its workers
    run_script(code_dir, script, arguments)


def run_script(code_dir: str, script: str, arguments: Sequence[str]) -> None:
    os.chdir(code_dir)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    try:
        run_as_main(script)
    except Exception as error:
        error = error.with_traceback(error.__traceback__ and without_own_frames(error.__traceback__))
        leave_error(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def keep_early_signals() -> None:
    sys.modules["varuna.morph.run.worker"] = sys.modules[__name__]  # whoever imports it finds this very one
    signal.signal(signal.SIGUSR1, early_signal)
    signal.siginterrupt(signal.SIGUSR1, False)
    # At its end Python gives up its handlers, and a late signal would kill a script that has ended well.
    atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def run_as_main(script: str) -> None:
    """As `python script` would. The module stays in place, for threads and exit handlers that outlive it."""
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)


def without_own_frames(trace: TracebackType) -> TracebackType | None:
    """The traceback from the script's first line on."""
    found: TracebackType | None = trace
    while found and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return found


def leave_error(error: Exception) -> None:
    """Writes the exception where torch elastic looks for it, and in its form; whole, or not at all."""
    place = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not place:
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
        write_atomic(Path(place), text, fsync=False)


if __name__ == "__main__":
    main()
