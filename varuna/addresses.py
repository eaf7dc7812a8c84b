"""The network addresses of this machine, and its identity."""

import ipaddress
import os
import secrets
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit


def address_facing(host: str) -> str:
    """Return the address of the interface through which this machine reaches `host`. Send nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def machine_identity() -> str:
    """Return a name that two processes share exactly if they can reach each other's abstract Unix sockets.

    They then have the same clock, too. Cloned machines may share a host name.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(16)}"  # unknown: they use TCP


def is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def is_local_host(hosts: Sequence[str]) -> bool:
    """Return whether the Host headers name this machine: a rebound DNS name does not. Any port may do."""
    try:
        (host,) = hosts
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
