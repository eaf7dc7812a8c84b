"""Checks of the other machines: their versions, and connections to the manager and between machines.

A probe on each machine listens on a port, as workers do, and connects to the manager's machine and to the
next machine of the list. So every machine calls and is called once, however long the list is.
"""

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

import varuna
from varuna.addresses import is_loopback
from varuna.cli.doctor import probe
from varuna.cli.doctor.finding import Finding
from varuna.cli.manage import addresses
from varuna.morph.run.job_folder import listen
from varuna.morph.starters.handover import PROGRAM
from varuna.morph.starters.ssh import OPTIONS, explain_ssh_end
from varuna.processes import raise_file_limit

SSH_SECONDS = 30.0
"""Time limit for a machine to answer: its Python imports torch."""
CONNECT_SECONDS = 5.0
MAX_LOGINS = 32
"""ssh clients that log in at the same time."""
MAX_FILES = 2**16
OPEN_PORTS = "allow TCP between the machines of the job, and from them to this one, on ports 1024 to 65535"

Answer = TypeVar("Answer")


class Reach(NamedTuple):
    """Options about how to reach other machines."""

    ssh: str
    python: str
    manager_ip: str


class ProbeHello(msgspec.Struct, frozen=True):
    """First answer of a probe: versions, and where it listens."""

    varuna: str
    torch: str
    address: str
    port: int


class ProbeFailed(Exception):
    """No probe runs on a machine."""

    def __init__(self, why: str, remedy: str) -> None:
        super().__init__(why)
        self.remedy = remedy


class Probe:
    """A probe on one machine, and the ssh client that holds it."""

    def __init__(self, machine: str, manager: str) -> None:
        self.machine, self.manager = machine, manager
        self.hello = ProbeHello("", "", "", 0)
        self._asked = ""
        self._process: asyncio.subprocess.Process | None = None
        self._seen = b""

    async def start(self, reach: Reach) -> None:
        options = [f"-o{name}={value}" for name, value in OPTIONS.items()]
        self._asked = shlex.join([reach.python, "-c", PROGRAM])
        client = shlex.split(reach.ssh)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *[*client, *options, "--", self.machine, self._asked],
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # its helpers end with it
            )
        except FileNotFoundError:
            raise ProbeFailed(f"no ssh client {client[0]!r}", "install one, or pass --ssh") from None
        program = repr(Path(probe.__file__).read_text()).encode()
        settings = msgspec.json.encode({"manager": self.manager, "seconds": CONNECT_SECONDS})
        self.hello = await self._ask(program + b"\n" + settings, ProbeHello, SSH_SECONDS)

    async def connect(self, targets: Sequence[tuple[str, int]]) -> list[str]:
        """Let the machine connect to addresses. Return the errors, "" for none."""
        seconds = SSH_SECONDS + CONNECT_SECONDS * len(targets)
        return await self._ask(msgspec.json.encode(targets), list[str], seconds)

    async def _ask(self, line: bytes, kind: type[Answer], seconds: float) -> Answer:
        assert self._process is not None and self._process.stdin is not None
        remedy = f"try: ssh {self.machine} true"
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError):  # it has ended; its output says why
                    self._process.stdin.write(line + b"\n")
                    await self._process.stdin.drain()
                return msgspec.json.decode(await self._read(), type=kind)
        except TimeoutError:
            raise ProbeFailed(f"no answer in {seconds:.0f} s", remedy) from None
        except (msgspec.DecodeError, ValueError) as error:
            raise ProbeFailed(f"an answer that is not one of the doctor: {error}", remedy) from None

    async def _read(self) -> bytes:
        """Return the next line of the probe. Raise ProbeFailed if it has ended."""
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(probe.MARK.encode()):
                return line.removeprefix(probe.MARK.encode())
            self._seen = (self._seen + line)[-65536:]
        status = await self._process.wait()
        why = explain_ssh_end(self.machine, status, self._seen.decode(errors="replace"))
        tried = why.removeprefix(f"{self.machine}: ").replace("the agent ended", "Python ended")
        raise ProbeFailed(
            tried, f"try: ssh {self.machine} {self._asked.split()[0]} -c 'import varuna, torch'"
        )

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def check_machines(machines: tuple[str, ...], reach: Reach) -> Iterator[Finding]:
    """Check all machines of a list. Those on this machine need no check."""
    for machine in machines:
        if is_loopback(machine):
            yield Finding(machine, "ok", "this machine")
    others = [machine for machine in machines if not is_loopback(machine)]
    if others:
        raise_file_limit(MAX_FILES)
        yield from asyncio.run(findings_of(others, machines, reach))


async def findings_of(others: Sequence[str], machines: tuple[str, ...], reach: Reach) -> list[Finding]:
    findings: list[Finding] = []
    address_for = addresses(machines, reach.manager_ip)
    probes: list[Probe] = []
    with ExitStack() as stack:
        listeners: dict[str, socket.socket] = {}
        for machine in others:
            try:
                own = address_for(machine)
                if own not in listeners:
                    listeners[own] = stack.enter_context(listen(own, 0))
                probes.append(Probe(machine, own))
            except ValueError as error:
                findings.append(Finding(machine, "problem", str(error), "choose another --manager-ip"))
        try:
            started = await start_all(probes, reach, findings)
            found = await asyncio.gather(
                *(
                    check_connections(one, after, listeners[one.manager])
                    for one, after in zip(started, [*started[1:], *started[:1]], strict=True)
                )
            )
            if len(others) < len(machines):  # workers of this machine call, too
                found += await asyncio.gather(*map(call_from_here, started))
            return [*findings, *(finding for some in found for finding in some)]
        finally:
            await asyncio.gather(*(one.close() for one in probes))


async def start_all(probes: Sequence[Probe], reach: Reach, findings: list[Finding]) -> list[Probe]:
    """Start the probes. Return those that run; the others have their reason in `findings`."""
    logins = asyncio.Semaphore(MAX_LOGINS)

    async def start(one: Probe) -> ProbeFailed | None:
        async with logins:
            try:
                await one.start(reach)
            except ProbeFailed as failure:
                return failure
            return None

    started = []
    for one, failure in zip(probes, await asyncio.gather(*map(start, probes)), strict=True):
        if failure is not None:
            findings.append(Finding(one.machine, "problem", str(failure), failure.remedy))
        else:
            started.append(one)
    return started


async def check_connections(one: Probe, after: Probe, listener: socket.socket) -> list[Finding]:
    """Connect from a machine to the manager's one, and to the next one of the list."""
    targets = [(one.manager, listener.getsockname()[1])]
    names = [f"this machine at {one.manager}"]
    if after is not one:
        targets.append((after.hello.address, after.hello.port))
        names.append(after.machine)
    hello = one.hello
    try:
        errors = await one.connect(targets)
    except ProbeFailed as failure:
        return [Finding(one.machine, "problem", str(failure), failure.remedy)]
    reached = " and ".join(name for name, error in zip(names, errors, strict=True) if not error)
    found = f"varuna {hello.varuna}, torch {hello.torch}" + (f"; it reaches {reached}" if reached else "")
    findings = [Finding(one.machine, "ok", found)]
    if hello.varuna != varuna.__version__:
        found = f"varuna {hello.varuna}, but {varuna.__version__} here"
        findings = [Finding(one.machine, "problem", found, "install the same version on all machines")]
    for name, (address, port), error in zip(names, targets, errors, strict=True):
        if error:
            what = f"{one.machine} to {name.split(' at ')[0]}"
            findings.append(Finding(what, "problem", f"{address} port {port}: {error}", OPEN_PORTS))
    return findings


async def call_from_here(one: Probe) -> list[Finding]:
    """Connect from this machine to another one, as workers on both would."""
    address, port = one.hello.address, one.hello.port
    error = await asyncio.to_thread(probe.connect, address, port, CONNECT_SECONDS)
    found = f"{address} port {port}: {error}"
    return [Finding(f"this machine to {one.machine}", "problem", found, OPEN_PORTS)] if error else []
