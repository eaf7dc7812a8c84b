"""What is handed to another machine's Python so that an agent runs there, and what its end means."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

import varuna
from varuna.morph.starters import remote

AGENT = ("-m", "varuna.morph.run.agent")
"""What that Python is to run."""

# The program comes over stdin: a remote shell, whichever it is, sees nothing that is hard to quote.
PROGRAM = "import sys; exec(eval(sys.stdin.buffer.readline()))"


def preamble(*, folder: str, agent: Sequence[str] = AGENT, ends_with_stdin: bool = False) -> bytes:
    """What the program reads before the agent's orders."""
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
    """What a program would take for an option, or a shell for more than a name, is refused."""
    if not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:%@\[\]-]*", machine):
        raise ValueError(
            f"{machine!r} is no name or address of a machine "
            "(letters, digits and any of _ . : % @ [ ] -; aliases belong in ~/.ssh/config)"
        )
    return machine


def explain_end(machine: str, status: int, said: str) -> str:
    """Why an agent ended, or never began, with the way out."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(remote.MARK):
            return f"{machine}: {line.removeprefix(remote.MARK)}"
    last = " | ".join(lines[-5:]) or "no word"
    if status in (126, 127):
        return f"{machine}: the python to run is not there (name it as that machine has it): {last}"
    end = f"killed by signal {status - 128}" if 128 < status < 192 else f"exit status {status}"
    return f"{machine}: the agent ended, {end}: {last}"
