"""Runs commands as users type them."""

import os
import pty
import subprocess
import sys
from typing import TypeVar

import msgspec
import pytest

from varuna.cli.main import main
from varuna.cli.options import add_command, new_app, takes

Options = TypeVar("Options", bound=msgspec.Struct)


class Cli:
    """Runs the command `varuna` in this process, and keeps its output."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = patch, capture
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._patch.setattr(sys, "argv", ["varuna", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        self.out, self.err = self._capture.readouterr()
        return exit.value.code if isinstance(exit.value.code, int) else 0


def on_a_terminal(*arguments: object) -> str:
    """Run the command in a process with a terminal. Return all that the terminal shows."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "varuna", *map(str, arguments)]
    run = subprocess.Popen(command, stdout=follower, stderr=follower)
    os.close(follower)
    seen = b""
    try:
        while data := os.read(leader, 4096):
            seen += data
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    assert run.wait() == 0, seen.decode()
    return seen.decode()


def parse_options(kind: type[Options], argv: list[str]) -> Options:
    """Parse the command line of a command that starts a script."""
    found: list[Options] = []
    parser = new_app()
    add_command(parser, takes(kind)(found.append), ends_with_script=True)
    parser(argv, standalone_mode=False)
    return found[0]
