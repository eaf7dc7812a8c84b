"""The network addresses of this machine."""

import socket


def address_facing(host: str) -> str:
    """Return the address of the interface through which this machine reaches `host`. Send nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
