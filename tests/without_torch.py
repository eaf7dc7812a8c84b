"""Runs commands as a user would type them, in a process that must not have imported torch by the end."""

import subprocess
import sys
from collections.abc import Sequence


def run_without_torch(commands: Sequence[Sequence[str]]) -> None:
    script = f"""
import sys
from varuna.cli.main import main
for command in {commands!r}:
    sys.argv = ["varuna", *command]
    try:
        main()
    except SystemExit as exit:
        assert exit.code == 0, command
assert "torch" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
