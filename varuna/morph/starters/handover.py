"""Program and settings that start an agent on another machine, and explanations of its end."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

import varuna
from varuna.morph.starters import remote

AGENT = ("-m", "varuna.morph.run.agent")
"""Arguments of the Python that runs the agent."""

# The real program comes over stdin, so no remote shell has to handle difficult quoting.
PROGRAM = "import sys; exec(eval(sys.stdin.buffer.readline()))"


def preamble(*, folder: str, agent: Sequence[str] = AGENT, ends_with_stdin: bool = False) -> bytes:
    """Return the bytes that the program reads before the agent's orders."""
    settings = {
        "agent": agent,
        "folder": folder,
        "modules": ("varuna", "torch"),
        "version": varuna.__version__,
        "ends_with_stdin": ends_with_stdin,
    }
    program = Path(remote.__file__).read_text()
    return repr(program).encode() + b"\n" + msgspec.json.encode(settings) + b"\n"


def check_machine(machine: str) -> str:
    """Return the machine name; raise if it looks like an option or contains shell characters."""
    if not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:%@\[\]-]*", machine):
        raise ValueError(
            f"{machine!r} is not a machine name or address "
            "(use letters, digits and _ . : % @ [ ] -; define aliases in ~/.ssh/config)"
        )
    return machine


def explain_end(machine: str, status: int, output: str) -> str:
    """Explain why an agent ended or did not start, with a remedy."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(remote.MARK):
            return f"{machine}: {line.removeprefix(remote.MARK)}"
    last = " | ".join(lines[-5:]) or "no output"
    if status in (126, 127):
        return f"{machine}: the python to run was not found (set --python to its path there): {last}"
    end = f"killed by signal {status - 128}" if 128 < status < 192 else f"exit status {status}"
    return f"{machine}: the agent ended, {end}: {last}"
