"""Starts agents over ssh: with the user's own client, keys and configuration, and with host keys checked."""

import contextlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import varuna
from varuna.morph.adapters import remote
from varuna.morph.start import AgentOrders

# The program comes over stdin: the remote shell, whichever it is, sees nothing that is hard to quote.
PROGRAM = "import sys; exec(eval(sys.stdin.buffer.readline()))"

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
        agent: Sequence[str] = ("-m", "varuna.agent"),
    ) -> None:
        """`folder` and `python` are those of the other machines; `ssh` may hold options, `ssh -F FILE`."""
        self._log_folder = log_folder
        self._python = python
        self._ssh = tuple(ssh)
        self._options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
        self._options.append(f"-oConnectTimeout={connect_seconds}")
        modules = ("varuna", "torch")
        self._settings = msgspec.json.encode(
            {"agent": agent, "folder": folder, "modules": modules, "version": varuna.__version__}
        )

    def start(self, orders: AgentOrders) -> SshAgent:
        machine = check_machine(orders.machine)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        log = self._log_folder / f"{machine}.log"
        program = Path(remote.__file__).read_text()
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
            client.stdin.write(repr(program).encode() + b"\n" + self._settings + b"\n" + orders.line())
            client.stdin.flush()
        return SshAgent(machine, client, log, log_start)


def check_machine(machine: str) -> str:
    """What ssh would take for an option, or the user's ProxyCommand for more than a name, is refused."""
    if not re.fullmatch(r"[A-Za-z0-9_\[][A-Za-z0-9_.:%@\[\]-]*", machine):
        raise ValueError(
            f"{machine!r} is no name or address of a machine "
            "(letters, digits and any of _ . : % @ [ ] -; aliases belong in ~/.ssh/config)"
        )
    return machine


def explain(machine: str, status: int, said: str) -> str:
    """Why an agent ended, or never began, with the way out."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        if line.startswith(remote.MARK):
            return f"{machine}: {line.removeprefix(remote.MARK)}"
    for sign, meaning in SIGNS.items():
        if status == 255 and sign in said:
            return f"{machine}: {meaning.format(machine=machine)} (ssh: {lines[-1]})"
    if status in (126, 127):
        return f"{machine}: the python to run is not there (name it as that machine has it): {lines[-1:]}"
    end = f"killed by signal {status - 128}" if 128 < status < 192 else f"exit status {status}"
    return f"{machine}: {'ssh or the agent' if status == 255 else 'the agent'} ended, {end}: " + (
        " | ".join(lines[-5:]) or "no word"
    )


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
