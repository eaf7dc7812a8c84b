"""Reads what a job is started with: the list of its machines, and the file of its environment."""

import ipaddress
import re
import shlex

_MACHINE = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.:@%-]{0,253}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]+\]|::1")
"""A host name, an IPv4 or IPv6 address, or an alias of ssh's; nothing that looks like an option."""


def parse_machines(text: str) -> tuple[str, ...]:
    """One address for each line; blank lines and `#` comments are left out."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def read_machines(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The machines of a list that somebody edits, each once, and what is wrong with the rest."""
    found: list[str] = []
    problems: list[str] = []
    for line in parse_machines(text):
        if not _MACHINE.fullmatch(line):
            problems.append(f"{line[:80]!r} is no address of a machine; the line is ignored")
        elif line in found:
            problems.append(f"{line} is named more than once")
        else:
            found.append(line)
    return tuple(found), tuple(problems)


def require_machines(machines: tuple[str, ...]) -> None:
    if not machines:
        raise ValueError(
            "the machine list names no machine (one address for each line, 127.0.0.1 for this one)"
        )


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def parse_environment(text: str, *, source: str) -> dict[str, str]:
    """KEY=VALUE assignments as a shell would read them: quotes, comments, a leading `export`."""
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{source}, line {number}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"{place}: {error} in {line!r}") from None
        for word in words[1:] if words[:1] == ["export"] else words:
            name, equals, value = word.partition("=")
            if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(
                    f"{place}: expected KEY=VALUE, found {word!r} (quote a value that has spaces)"
                )
            found[name] = value
    return found
