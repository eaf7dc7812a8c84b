"""Start agents as local processes: each loopback address is a machine of its own.

So you can try morphing on a laptop, with the machines 127.0.0.1, 127.0.0.2, ...
"""

import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from varuna.files import make_private_folder, open_private
from varuna.morph.protocol.orders import AGENT_COMMAND, AgentOrders


class LocalAgent:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"exit status {code}"

    def kill(self) -> None:
        """Kill the agent; its workers die with it."""
        self._process.kill()


class LocalStarter:
    def __init__(self, log_folder: Path, *, command: Sequence[str] = AGENT_COMMAND) -> None:
        self._log_folder = log_folder
        self._command = tuple(command)

    def start(self, orders: AgentOrders) -> LocalAgent:
        make_private_folder(self._log_folder)
        with os.fdopen(open_private(self._log_folder / f"agent_{orders.machine}.log"), "ab") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal must reach only the manager
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(orders.line())
        return LocalAgent(process)
