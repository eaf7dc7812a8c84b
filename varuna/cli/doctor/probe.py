"""The program that `varuna doctor` runs on each machine of a list. It is sent there as text.

It talks over stdin and stdout. It reports versions and an open port, connects to the addresses that it gets,
and ends with its stdin. Other machines connect to the port meanwhile.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

MARK = "varuna doctor: "
"""Begins the lines that the doctor reads: a shell there may print others."""


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    import torch

    import varuna

    own = address_towards(settings["manager"])
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family, backlog=64) as listener:
        port = listener.getsockname()[1]
        say({"varuna": varuna.__version__, "torch": str(torch.__version__), "address": own, "port": port})
        say(
            [
                connect(address, port, settings["seconds"])
                for address, port in json.loads(sys.stdin.readline())
            ]
        )
        sys.stdin.read()


def say(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


def address_towards(host: str) -> str:
    """Return the address of this machine on the route to another. Workers listen there, too."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as found:
        found.connect(target)
        return str(found.getsockname()[0])


def connect(address: str, port: int, seconds: float) -> str:
    """Connect and hang up. Return the error; "": none."""
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    main()
