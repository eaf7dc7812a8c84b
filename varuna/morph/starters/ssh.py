"""Starts agents over ssh: with the user's own client, keys and configuration, and with host keys checked."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from varuna.morph.protocol.orders import AgentOrders
from varuna.morph.starters.handover import AGENT, PROGRAM, check_machine, explain_end, preamble

OPTIONS = {
    "BatchMode": "yes",  # nobody is there to be asked
    "RequestTTY": "no",
    "ClearAllForwardings": "yes",  # those of the user's configuration are for one session, not for many
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ControlMaster": "no",  # a shared connection would end the agents of others with its own
    "ControlPath": "none",
    "LogLevel": "ERROR",
    "ServerAliveInterval": "15",
}


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
            log.seek(self._log_start)
            said = log.read().decode(errors="replace")
        return explain(self._machine, status, said)

    def kill(self) -> None:
        stdin = self._client.stdin
        assert stdin is not None
        if not stdin.closed:
            with contextlib.suppress(OSError):  # the connection is gone already
                stdin.write(b"end\n")
                stdin.close()


class SshStarter:
    """The machine list names machines as ssh does: an address, or an alias of the user's configuration."""

    def __init__(
        self,
        *,
        log_folder: Path,
        folder: str = "",
        python: str = sys.executable,
        ssh: Sequence[str] = ("ssh",),
        connect_seconds: int = 10,
        agent: Sequence[str] = AGENT,
    ) -> None:
        """`folder` and `python` are those of the other machines; `ssh` may hold options, `ssh -F FILE`."""
        self._log_folder = log_folder
        self._python = python
        self._ssh = tuple(ssh)
        self._options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
        self._options.append(f"-oConnectTimeout={connect_seconds}")
        self._preamble = preamble(folder=folder, agent=agent)

    def start(self, orders: AgentOrders) -> SshAgent:
        machine = check_machine(orders.machine)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{machine}.log"
        with log.open("ab") as output:
            log_start = output.tell()
            try:
                # In a session of its own: what interrupts the manager is not for the agents.
                client = subprocess.Popen(
                    [*self._ssh, *self._options, "--", machine, shlex.join([self._python, "-c", PROGRAM])],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise ValueError(
                    f"no ssh client: {self._ssh[0]!r} is not there (install openssh-client)"
                ) from None
        assert client.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and `ended` tells why
            client.stdin.write(self._preamble + orders.line())
            client.stdin.flush()
        return SshAgent(machine, client, log, log_start)


def explain(machine: str, status: int, said: str) -> str:
    if status == 255:  # ssh's own
        for sign, meaning in SIGNS.items():
            if sign in said:
                return f"{machine}: {meaning.format(machine=machine)} (ssh: {said.strip().splitlines()[-1]})"
    return explain_end(machine, status, said)


SIGNS = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "its host key is not the one that is known "
    "(if the machine was set up anew: ssh-keygen -R {machine}, and connect once by hand)",
    "Host key verification failed": "its host key is unknown (connect once by hand, ssh {machine}, "
    "and compare its fingerprint)",
    "Permission denied": "it does not let us in (try ssh -o BatchMode=yes {machine} true: a key is needed "
    "that asks for no passphrase, in ssh-agent or ~/.ssh/config)",
    "Could not resolve hostname": "no machine has this name",
    "Connection refused": "it is up, but nothing listens for ssh there",
    "timed out": "it does not answer",
    "No route to host": "it does not answer",
}
