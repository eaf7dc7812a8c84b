"""Stands between an agent and the connection that it was started by, on the agent's machine.

It is sent there as text, before anything of ours is known to be there, so it needs nothing but Python. It
says what is missing, starts the agent, and hands over its orders. Its stdin brings a line of settings, the
line of orders, and perhaps later the line `end`, which ends the agent. That nobody holds the other end any
more ends it only where the settings say so: a manager that was killed may come back, and what the agent
writes meanwhile is dropped.
"""

from __future__ import annotations  # a Python that is too old must be able to read this far and say so

import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from typing import IO, Any

MARK = "varuna cannot start here: "
CANNOT = 3


def problem(settings: dict[str, Any]) -> str | None:
    """Why no agent can run here."""
    if sys.hexversion < 0x030B0000:
        return f"{sys.executable} is Python {sys.version.split()[0]}, and 3.11 or newer is needed"
    if settings["folder"]:
        try:
            os.chdir(settings["folder"])
        except OSError as error:
            return f"the working folder {settings['folder']} cannot be entered: {error.strerror}"
    sys.path[0] = os.getcwd()  # as `python -m` has it
    missing = [name for name in settings["modules"] if importlib.util.find_spec(name) is None]
    if missing:
        return (
            f"{sys.executable} has no {' and no '.join(missing)} (install it there, or name another python)"
        )
    import varuna

    if varuna.__version__ != settings["version"]:
        return (
            f"varuna {settings['version']} is needed, as on the manager's machine, "
            f"{sys.executable} has {varuna.__version__} from {varuna.__file__}"
        )
    return None


def die_with_parent() -> None:
    """On Linux, the one system that can; elsewhere an agent that is let go ends for want of a manager."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pass_on(said: IO[bytes]) -> None:
    listening = True
    for chunk in iter(lambda: os.read(said.fileno(), 65536), b""):
        try:
            if listening:
                os.write(1, chunk)
        except OSError:
            listening = False


def end_on_request(agent: subprocess.Popen[bytes], ends_with_stdin: bool) -> None:
    line = sys.stdin.buffer.readline()
    if line == b"end\n" or (not line and ends_with_stdin):
        agent.kill()


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    found = problem(settings)
    if found:
        print(MARK + found, file=sys.stderr)
        sys.exit(CANNOT)
    agent = subprocess.Popen(
        [sys.executable, *settings["agent"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a hang-up is not for the agent
        preexec_fn=die_with_parent if settings["ends_with_stdin"] else None,
    )
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(sys.stdin.buffer.readline())
    agent.stdin.flush()
    threading.Thread(target=end_on_request, args=(agent, settings["ends_with_stdin"]), daemon=True).start()
    pass_on(agent.stdout)
    status = agent.wait()
    os._exit(status if status >= 0 else 128 - status)  # at once: a thread still reads stdin


if __name__ == "__main__":
    main()
