"""The parent process of an agent on its machine; it holds the connection to the starter.

It is sent there as text and needs nothing but Python. It checks the machine, starts the agent, and
passes its orders on. Its stdin brings a line of settings, the line of orders, and later perhaps the line
`end`, which kills the agent. The end of stdin kills the agent only if `ends_with_stdin` is set: a killed
manager may be restarted, and the agent's output is dropped meanwhile.
"""

from __future__ import annotations  # an older Python must be able to read this file and report its version

import importlib.util
import json
import os
import subprocess
import sys
import threading
from typing import IO, Any

MARK = "varuna cannot start here: "
CANNOT_START = 3


def find_problem(settings: dict[str, Any]) -> str | None:
    """Return the reason why no agent can run here, or None."""
    if sys.hexversion < 0x030B0000:
        return f"{sys.executable} is Python {sys.version.split()[0]}, but Python 3.11 or newer is required"
    if settings["folder"]:
        try:
            os.chdir(settings["folder"])
        except OSError as error:
            return f"the working folder {settings['folder']} cannot be entered: {error.strerror}"
    sys.path[0] = os.getcwd()  # like `python -m`
    missing = [name for name in settings["modules"] if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {' and no '.join(missing)} (install it there, or set --python)"
    import varuna

    if varuna.__version__ != settings["version"]:
        return (
            f"varuna {settings['version']} is required, as on the manager's machine, but "
            f"{sys.executable} has {varuna.__version__} from {varuna.__file__}"
        )
    return None


def pass_on(output: IO[bytes]) -> None:
    """Copy the agent's output to stdout, and drop it once stdout is closed."""
    is_open = True
    for chunk in iter(lambda: os.read(output.fileno(), 65536), b""):
        try:
            if is_open:
                os.write(1, chunk)
        except OSError:
            is_open = False


def end_on_request(agent: subprocess.Popen[bytes], ends_with_stdin: bool) -> None:
    line = sys.stdin.buffer.readline()
    if line == b"end\n" or (not line and ends_with_stdin):
        agent.kill()


def main() -> None:
    settings = json.loads(sys.stdin.buffer.readline())
    problem = find_problem(settings)
    if problem:
        print(MARK + problem, file=sys.stderr)
        sys.exit(CANNOT_START)
    from varuna.processes import die_with_parent

    own_pid = os.getpid()
    agent = subprocess.Popen(
        [sys.executable, *settings["agent"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a hang-up must not reach the agent
        preexec_fn=(lambda: die_with_parent(own_pid)) if settings["ends_with_stdin"] else None,
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
