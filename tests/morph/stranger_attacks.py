"""The attacks of a stranger on listening sockets: a process of another user, on the same or another host.

    python -m tests.morph.stranger_attacks RESULTS

It reads one order per line on stdin. For each it forks a child, which enters the order's network namespace,
becomes the user nobody, attacks all targets at once, and writes one outcome per target to RESULTS/<id>.json.
The outcomes:

    closed     no connection: refused or not answered by the kernel
    refused    connected, and disconnected by the other side without an answer that helps
    held       connected, and neither answered nor disconnected until the attack ended
    ADMITTED   the other side obeyed: it served a request, or went on after a handshake
"""

import ctypes
import json
import os
import pickle
import re
import resource
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from varuna.processes import die_with_parent
from varuna.secure.credential import make_credential

NOBODY = 65534
CLONE_NEWNET = 0x40000000
CONNECT_SECONDS = 1.0
IDLE_CONNECTIONS = 500

LISTENING = "0A"  # state in /proc/net/tcp
SSH = 22
ACCEPTS = 0x10000  # flag in /proc/net/unix

CLOSED, REFUSED, HELD, ADMITTED = "closed", "refused", "held", "ADMITTED"


class Target(msgspec.Struct, frozen=True):
    """A listening socket. A port of 0 means an abstract Unix socket whose name is `address`."""

    name: str
    address: str
    port: int
    replays: tuple[bytes, ...] = ()  # recorded bytes of legitimate connections to it


class Order(msgspec.Struct, frozen=True):
    id: str
    attack: str
    namespace: str  # of the attacker; empty: that of the tests
    targets: tuple[Target, ...]
    markers: str  # folder where a pickle that is loaded leaves a file
    seconds: float  # that the attack lasts


class NoConnection(Exception):
    pass


class Marker:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (self._path, "w")


# ---------------------------------------------------------------- connections


def connect(target: Target, seconds: float = CONNECT_SECONDS) -> socket.socket:
    family = socket.AF_INET if target.port else socket.AF_UNIX
    connection = socket.socket(family)
    connection.settimeout(seconds)
    try:
        connection.connect((target.address, target.port) if target.port else "\0" + target.address)
    except OSError as error:
        connection.close()
        raise NoConnection from error
    return connection


def send(target: Target, order: Order, *messages: bytes) -> str:
    """Send each message on a connection of its own, and see how the other side ends them."""
    connections = []
    for message in messages:
        connection = connect(target)
        connections.append(connection)
        with suppress(OSError):  # it has disconnected already, which `end_of` finds
            connection.sendall(message)
    deadline = time.monotonic() + order.seconds
    outcomes = [end_of(connection, deadline - time.monotonic()) for connection in connections]
    for connection in connections:
        connection.close()
    return worst(outcomes)


def end_of(connection: socket.socket, seconds: float) -> str:
    deadline = time.monotonic() + max(seconds, 0.001)
    while (left := deadline - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if not connection.recv(65536):
                return REFUSED
        except TimeoutError:
            break
        except OSError:
            return REFUSED
    return HELD


def listening_sockets(process: str, inodes: Collection[str] | None = None) -> set[tuple[str, int]]:
    """Return the (address, port) of listening sockets that a process sees; port 0: abstract Unix sockets.

    `inodes` limits them to these sockets. Every user may read this.
    """
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and (inodes is None or fields[9] in inodes):
                found.add(read_address(fields[1]))
    for line in Path(f"/proc/{process}/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        listens = int(fields[3], 16) & ACCEPTS and len(fields) > 7 and fields[7].startswith("@")
        if listens and (inodes is None or fields[6] in inodes):
            found.add((fields[7].removeprefix("@"), 0))
    return found


def read_address(text: str) -> tuple[str, int]:
    """Parse "0100007F:1F90" of /proc/net/tcp."""
    address, port = text.split(":")
    words = struct.pack(f"<{len(address) // 8}I", *(int(word, 16) for word in re.findall("." * 8, address)))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, words).removeprefix("::ffff:"), int(port, 16)


# ---------------------------------------------------------------- attacks


def garbage(target: Target, order: Order) -> str:
    return send(target, order, os.urandom(4096))


def http(target: Target, order: Order) -> str:
    return send(target, order, b"GET /status HTTP/1.1\r\nHost: varuna\r\n\r\n")


def huge_length(target: Target, order: Order) -> str:
    """Announce 4 GiB in every format that a length has here, then send a few."""
    lengths = (b"\xff\xff\xff\xff", struct.pack("<Q", 1 << 32), struct.pack(">Q", 1 << 32))
    return send(target, order, *(length + bytes(1000) for length in lengths))


def slow_bytes(target: Target, order: Order) -> str:
    """Send one byte per second of what begins like a TLS handshake."""
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(1000)
    deadline = time.monotonic() + order.seconds
    with connect(target) as connection:
        for byte in hello:
            with suppress(OSError):
                connection.sendall(bytes([byte]))
            if end_of(connection, 1.0) == REFUSED:
                return REFUSED
            if time.monotonic() > deadline:
                break
    return HELD


def idle_connections(target: Target, order: Order) -> str:
    """Open many connections and say nothing."""
    opened = []
    with suppress(NoConnection):
        while len(opened) < IDLE_CONNECTIONS:
            opened.append(connect(target))
    if not opened:
        raise NoConnection
    deadline = time.monotonic() + order.seconds
    outcomes = {end_of(connection, deadline - time.monotonic()) for connection in opened}
    for connection in opened:
        connection.close()
    return worst(list(outcomes))


def replay(target: Target, order: Order) -> str:
    """Send what a member of the job has sent to this port before."""
    return send(target, order, *target.replays[:4]) if target.replays else "-"


def malicious_pickle(target: Target, order: Order) -> str:
    """Send a pickle as such and in the frames of this library, of gloo and of torch's store."""
    marker = f"{order.markers}/{order.id}-{target.name}".replace(" ", "_")
    data = pickle.dumps(Marker(marker))
    size = len(data)
    formats = [
        data,
        struct.pack("!I", size) + data,
        struct.pack("<Q", size) + data,
        struct.pack("!I", size) + bytes(32) + data,
        # gloo: the number of the pair, then the header of a message (nbytes, opcode, slot, ...)
        *(struct.pack("<Q6Q", pair, 48 + size, 0, 0, 0, size, 0) + data for pair in range(3)),
        # torch's store: validate, then set a key
        b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + struct.pack("<Q", 5) + b"error"
        + struct.pack("<Q", size) + data,
    ]  # fmt: skip
    return send(target, order, *formats)


def torch_store(target: Target, order: Order) -> str:
    """Use the port as torch's TCPStore."""
    if not target.port:
        return "-"
    try:
        connect(target).close()
        client = dist.TCPStore(  # type: ignore[attr-defined]
            target.address, target.port, timeout=timedelta(seconds=order.seconds / 2), wait_for_workers=False
        )
        client.set("stranger", "was here")
        posted = {"rank": 1, "where": "x", "kind": "E", "message": "a stranger ends it", "traceback": ""}
        for session in range(4):  # the keys under which ranks post errors
            client.compare_set(f"default_pg/0//varuna/{session}/error", "", json.dumps(posted))
        return ADMITTED if client.get("stranger") == b"was here" else HELD
    except NoConnection:
        raise
    except Exception:
        return REFUSED


def join_next_generation(target: Target, order: Order) -> str:
    """Take the place of rank 1 of 2 in the groups of the next generation, and gather a pickle."""
    size, wait = 2, timedelta(seconds=order.seconds / 2)  # torch's client retries for longer than that
    marker = f"{order.markers}/{order.id}-{target.name}".replace(" ", "_")
    data = torch.frombuffer(bytearray(pickle.dumps(Marker(marker))), dtype=torch.uint8)
    try:
        store = dist.TCPStore(target.address, target.port, timeout=wait)  # type: ignore[attr-defined]
        store.set("stranger", "was here")
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("default_pg", store), rank=1, world_size=size, timeout=wait
        )
        group = dist.new_group([0, 1], backend="gloo", use_local_synchronization=True)
        for sent in (torch.tensor([float(len(data))], dtype=torch.float64), data):
            dist.all_gather([torch.empty_like(sent) for _ in range(size)], sent, group=group)
        return ADMITTED
    except Exception as error:
        return f"{REFUSED}: {error}"[:500]


def attack_new_sockets(target: Target, order: Order) -> str:
    """Attack every socket of this host as soon as it listens, also those that listen for milliseconds.

    Return the number of sockets. `target` has only a name.
    """
    marker = f"{order.markers}/{order.id}-new".replace(" ", "_")
    data = pickle.dumps(Marker(marker))
    messages = [os.urandom(64), data, struct.pack("!I", len(data)) + data, b"GET / HTTP/1.1\r\n\r\n"]
    messages += [struct.pack("!8sqq32s", b"varuna/1", 0, rank, os.urandom(32)) for rank in (0, 1)]
    messages += [b"\x16\x03\x01\xff\xff" + os.urandom(64), b"\xff" * 8]
    found: set[tuple[str, int]] = set()
    closed: set[tuple[str, int]] = set()
    kept = []  # connections that say nothing more
    deadline = time.monotonic() + order.seconds
    while time.monotonic() < deadline:
        for address, port in sorted(listening_sockets("thread-self") - closed):
            if port == SSH:
                continue
            new = (address, port) not in found
            found.add((address, port))
            for message in messages if new else messages[:1]:
                try:
                    connection = connect(Target("", address, port), 0.1)
                except NoConnection:
                    closed.add((address, port))
                    break
                kept.append(connection)
                with suppress(OSError):
                    connection.sendall(message)
        for connection in kept[:-500]:
            connection.close()
        kept = kept[-500:]
    return str(len(found))


def gloo_handshake(target: Target, order: Order) -> str:
    """Claim a pair of gloo: its listener expects the number of a pair in 8 bytes."""
    return send(target, order, *(struct.pack("<q", pair) for pair in range(8)))


def tls_without_certificate(target: Target, order: Order) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return speak_tls(target, order, context)


def tls_with_own_certificate(target: Target, order: Order) -> str:
    """Show a certificate made just as the job's, but not by it."""
    return speak_tls(target, order, make_credential("job").client_context())


def speak_tls(target: Target, order: Order, context: ssl.SSLContext) -> str:
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    marker = f"{order.markers}/{order.id}-{target.name}".replace(" ", "_")
    data = pickle.dumps(Marker(marker))
    with connect(target) as connection:
        connection.settimeout(order.seconds)
        try:
            with context.wrap_socket(connection) as channel:
                channel.sendall(struct.pack("!I", len(data)) + data)
                channel.sendall(struct.pack("!I", 2) + b"{}")
                found = end_of(channel, order.seconds)
                return ADMITTED if found == HELD else found  # a handshake is done, and it may stay
        except TimeoutError:
            return HELD
        except OSError:
            return REFUSED


IDLE = f"{IDLE_CONNECTIONS} idle"
ATTACKS: dict[str, Callable[[Target, Order], str]] = {
    "garbage": garbage,
    "HTTP": http,
    "4 GiB length": huge_length,
    "slow bytes": slow_bytes,
    IDLE: idle_connections,
    "replay": replay,
    "pickle": malicious_pickle,
    "TCPStore": torch_store,
    "gloo": gloo_handshake,
    "TLS, no cert": tls_without_certificate,
    "TLS, own cert": tls_with_own_certificate,
}
"""Attacks on every socket."""
OTHER_ATTACKS = {"join": join_next_generation, "new sockets": attack_new_sockets}


def worst(outcomes: list[str]) -> str:
    return max(outcomes, key=[CLOSED, REFUSED, HELD, ADMITTED].index)


# ---------------------------------------------------------------- the process


def attack(order: Order) -> dict[str, str]:
    found: dict[str, str] = {}

    def one(target: Target) -> None:
        try:
            found[target.name] = (ATTACKS | OTHER_ATTACKS)[order.attack](target, order)
        except NoConnection:
            found[target.name] = CLOSED

    threads = [threading.Thread(target=one, args=(target,), daemon=True) for target in order.targets]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + order.seconds + 20.0  # torch's store waits for an answer without limit
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return {target.name: found.get(target.name, HELD) for target in order.targets}


def become_a_stranger(namespace: str) -> None:
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def main() -> None:
    results = Path(sys.argv[1])
    parent = os.getpid()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.umask(0o022)
    for line in sys.stdin:
        if os.fork():
            continue
        try:
            order = msgspec.json.decode(line, type=Order)
            become_a_stranger(order.namespace)
            die_with_parent(parent)
            part = results / f"{order.id}.part"
            part.write_text(json.dumps(attack(order)))
            part.rename(results / f"{order.id}.json")
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
