"""Start agents over ssh, with the user's ssh client, keys and configuration; host keys are checked."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from varuna.files import make_private_folder, open_private
from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.handover import AGENT, PROGRAM, check_machine, explain_end, preamble

OPTIONS = {
    "BatchMode": "yes",  # nobody can answer a prompt
    "RequestTTY": "no",
    "ClearAllForwardings": "yes",  # the user's forwardings would collide between machines
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ControlMaster": "no",  # a shared connection would end several agents when it ends
    "ControlPath": "none",
    "LogLevel": "ERROR",
    "ServerAliveInterval": "15",
    "ConnectTimeout": "10",
}

MAX_OUTPUT = 64 * 2**10
"""Bytes of an agent's output that are read to explain its end."""


class SshAgent:
    def __init__(self, machine: str, client: subprocess.Popen[bytes], log: Path, log_start: int) -> None:
        self._machine = machine
        self._client = client
        self._log = log
        self._log_start = log_start

    def ended(self) -> str | None:
        status = self._client.poll()
        if status is None:
            return None
        with self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - MAX_OUTPUT))
            output = log.read().decode(errors="replace")
        return explain_ssh_end(self._machine, status, output)

    def kill(self) -> None:
        stdin = self._client.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(OSError):  # the connection is already closed
                stdin.write(b"end\n")
                stdin.close()


class SshStarter:
    """Starts agents on machines that are named like for ssh: an address or an alias of its configuration."""

    def __init__(
        self,
        *,
        log_folder: Path,
        folder: str = "",
        python: str = sys.executable,
        ssh: Sequence[str] = ("ssh",),
        agent: Sequence[str] = AGENT,
    ) -> None:
        """`folder` and `python` are paths on the other machines; `ssh` may contain options: `ssh -F FILE`."""
        self._log_folder = log_folder
        self._python = python
        self._ssh = tuple(ssh)
        self._options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
        self._preamble = preamble(folder=folder, agent=agent)

    def start(self, orders: AgentOrders) -> SshAgent:
        machine = check_machine(orders.machine)
        make_private_folder(self._log_folder)
        log = self._log_folder / f"{machine}.log"
        with os.fdopen(open_private(log), "ab") as output:
            log_start = output.tell()
            try:
                # In its own session: a Ctrl-C must reach only the manager.
                client = subprocess.Popen(
                    [*self._ssh, *self._options, "--", machine, shlex.join([self._python, "-c", PROGRAM])],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise ValueError(
                    f"the ssh client {self._ssh[0]!r} was not found (install openssh-client)"
                ) from None
        assert client.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has already ended; `ended` returns the reason
            client.stdin.write(self._preamble + orders.line())
            client.stdin.flush()
        return SshAgent(machine, client, log, log_start)


def explain_ssh_end(machine: str, status: int, output: str) -> str:
    if status == 255:  # an error of ssh itself
        for text, meaning in SSH_ERRORS.items():
            if text in output:
                return (
                    f"{machine}: {meaning.format(machine=machine)} (ssh: {output.strip().splitlines()[-1]})"
                )
    return explain_end(machine, status, output)


SSH_ERRORS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key has changed "
    "(if the machine was reinstalled: ssh-keygen -R {machine}, then connect once by hand)",
    "Host key verification failed": "its host key is unknown (connect once by hand, ssh {machine}, "
    "and compare its fingerprint)",
    "Permission denied": "it denied the login (try ssh -o BatchMode=yes {machine} true; the key must "
    "need no passphrase prompt: use ssh-agent or ~/.ssh/config)",
    "Could not resolve hostname": "its name cannot be resolved",
    "Connection refused": "it runs, but has no ssh server",
    "timed out": "it does not answer",
    "No route to host": "it does not answer",
}
