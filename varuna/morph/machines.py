"""Parsers for the machine list and the environment file of a job."""

import ipaddress
import re
import shlex

import msgspec

MAX_BYTES = 2**20
"""Limit for the size of a machine list."""
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}@")
_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_ONLY_NUMBERS = re.compile(r"(0[xX][0-9A-Fa-f]*|[0-9]+)(\.(0[xX][0-9A-Fa-f]*|[0-9]*))*")


class MachineList(msgspec.Struct, frozen=True):
    """The machines of a list, each once, in order."""

    machines: tuple[str, ...] = ()
    problem: str = ""  # first invalid line; the whole list is then not used
    repeated: tuple[str, ...] = ()  # one sentence for each machine that appears again


def read_machines(data: bytes, *, source: str) -> MachineList:
    """Parse a list: one address or host name per line. Blank lines and `#` comments are skipped.

    One invalid line makes the whole list invalid: its machine would seem to be removed.
    """
    if len(data) > MAX_BYTES:
        return MachineList(problem=f"{source} has more than {MAX_BYTES} bytes: it is not a machine list")
    found: dict[str, int] = {}
    repeated = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        place = f"{source}, line {number}"
        try:
            name = line.decode().split("#")[0].strip()
        except UnicodeDecodeError:
            return MachineList(problem=f"{place}: {line[:80]!r} is not UTF-8 text")
        if not name:
            continue
        if why := address_problem(name):
            return MachineList(problem=f"{place}: {name[:80]!r} is {why}")
        if name in found:
            repeated.append(f"{place}: {name} appears more than once (first in line {found[name]})")
        found.setdefault(name, number)
    return MachineList(tuple(found), repeated=tuple(repeated))


def address_problem(name: str) -> str:
    """Say why this is no IPv4 or IPv6 address, host name or ssh alias; "" if it is one."""
    host = _USER.sub("", name, count=1)
    if _ONLY_NUMBERS.fullmatch(host) and not _is_address(host):
        return "not an IPv4 address (four numbers from 0 to 255)"
    if ":" in host or host.startswith("["):
        is_bracketed = host.startswith("[") and host.endswith("]")
        return "" if _is_address(host[1:-1] if is_bracketed else host) else "not an IPv6 address"
    is_host = _HOST.fullmatch(host) and len(host) <= 253
    return "" if is_host else "not a machine address (write one IP address or host name per line)"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def require_machines(found: MachineList, *, source: str) -> tuple[str, ...]:
    """Return the machines of a list that must be valid."""
    if found.problem:
        raise ValueError(found.problem)
    if not found.machines:
        raise ValueError(
            f"the machine list is empty: {source} (write one address per line; 127.0.0.1 is this machine)"
        )
    return found.machines


def parse_environment(data: bytes, *, source: str) -> dict[str, str]:
    """Parse KEY=VALUE assignments like a shell: quotes, comments and a leading `export`."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{source}, line {number}: not UTF-8 text") from None
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{source}, line {number}"
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None  # not the line: values may be secrets
        for token in tokens[1:] if tokens[:1] == ["export"] else tokens:
            name, equals, value = token.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                found_name = repr(name) if equals else "a word without ="
                raise ValueError(
                    f"{place}: expected KEY=VALUE, found {found_name} (a key has letters, digits and _; "
                    "put quotes around a value with spaces)"
                )
            found[name] = value
    return found
