"""Parsers for the machine list and the environment file of a job."""

import ipaddress
import re
import shlex

_MACHINE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:@%-]{0,253}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]|::1")
"""A host name, an IPv4 or IPv6 address, or an ssh alias; nothing that looks like an option."""


def read_machines(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the machines of a list, each once, and the problems of the ignored lines.

    The list has one address per line. Blank lines and `#` comments are skipped.
    """
    found: list[str] = []
    problems: list[str] = []
    for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
        if not _MACHINE.fullmatch(line):
            problems.append(f"{line[:80]!r} is not a machine address; the line is ignored")
        elif line in found:
            problems.append(f"{line} appears more than once")
        else:
            found.append(line)
    return tuple(found), tuple(problems)


def require_machines(machines: tuple[str, ...]) -> None:
    if not machines:
        raise ValueError("the machine list is empty (write one address per line; 127.0.0.1 is this machine)")


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def parse_environment(text: str, *, source: str) -> dict[str, str]:
    """Parse KEY=VALUE assignments like a shell: quotes, comments and a leading `export`."""
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
