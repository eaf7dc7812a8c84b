"""Reads what a job is started with: the list of its machines, and the file of its environment."""

import ipaddress
import re
import shlex


def parse_machines(text: str) -> tuple[str, ...]:
    """One address for each line; blank lines and `#` comments are left out."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def require_this_machine(machines: tuple[str, ...]) -> None:
    """A job runs on one machine, this one, for now."""
    if not machines:
        raise ValueError(
            "the machine list names no machine (one address for each line, 127.0.0.1 for this one)"
        )
    if len(machines) > 1:
        raise ValueError(
            f"the machine list names {len(machines)} machines ({', '.join(machines)}), but several machines "
            "come with morphing, which is not there yet (leave one line, 127.0.0.1, and raise "
            "--gpus_per_node; or start varuna.launcher on each machine by hand)"
        )
    if not is_loopback(machines[0]):
        raise ValueError(
            f"machine {machines[0]} is not this one: other machines come with morphing, which is "
            "not there yet (write 127.0.0.1 to run here, or start varuna.launcher on that machine by hand)"
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
