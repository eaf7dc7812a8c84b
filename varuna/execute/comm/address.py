"""Finds the neighbouring ranks and shakes hands with them: from ranks to connected sockets.

Every rank listens, tells the others where (through `exchange`), dials its higher neighbours and
lets its lower ones in. A secret made of a random part of every rank is what a caller must show;
whoever does not is shown the door. Listening ends as soon as all neighbours are there.

Ranks that share a machine meet on a Unix-domain socket, which spends less than TCP on small
messages. "Sharing a machine" includes the network namespace: containers of one host do not.
"""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna import codec
from varuna.errors import PeerLost

MEET_SECONDS = 60.0
"""How long the neighbours may take to appear; the slowest rank's start counts."""
HELLO_SECONDS = 5.0
"""How long a caller may take to say who it is."""
KEEPALIVE_SECONDS = 5
"""A machine that vanishes sends no end of file: after 3 unanswered probes it counts as lost."""

Exchange = Callable[[object], list[object]]
"""Gives one object, and returns that of every rank."""

HELLO = struct.Struct("!8sqq32s")  # magic, from, to, proof
MAGIC = b"varuna/1"


class Contact(msgspec.Struct, frozen=True):
    """Where a rank listens, and its share of the common secret."""

    rank: int
    machine: str
    host: str
    port: int
    path: str
    secret: str


def machine_identity() -> str:
    """Equal for two processes exactly where one can reach the other's abstract Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(16)}"  # unknown: meet over TCP


def address_facing(host: str) -> str:
    """The address of the interface through which this machine reaches `host`; sends nothing."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def meet(
    rank: int,
    peers: Collection[int],
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    unix: bool = True,
    timeout_seconds: float = MEET_SECONDS,
) -> dict[int, socket.socket]:
    """A connected, non-blocking socket to each of the peers, who must name this rank in turn."""
    with contextlib.ExitStack() as doors, contextlib.ExitStack() as undo:
        over_tcp, over_unix = _listen(host)
        doors.enter_context(over_tcp)
        doors.enter_context(over_unix)
        own = Contact(
            rank=rank,
            machine=machine_identity() if unix else f"rank {rank}",
            host=host,
            port=over_tcp.getsockname()[1],
            path=over_unix.getsockname()[1:].decode(),
            secret=secrets.token_hex(16),
        )
        told = exchange(codec.encode(own))
        contacts = {
            contact.rank: contact
            for contact in (codec.decode(str(text), Contact, "a rank's address") for text in told)
        }
        if missing := sorted(set(peers) - set(contacts)):
            raise ValueError(
                f"rank {rank} is to be linked to ranks {missing}, but only {sorted(contacts)} gave their "
                "address (all ranks of the plan must take part in the exchange)"
            )
        secret = hashlib.sha256(
            "".join(contacts[other].secret for other in sorted(contacts)).encode()
        ).digest()
        deadline = time.monotonic() + timeout_seconds
        met: dict[int, socket.socket] = {}
        for peer in sorted(peers):
            if peer > rank:  # the hello waits in the peer's backlog until it comes round to us
                met[peer] = undo.enter_context(_dial(own, contacts[peer], deadline))
                met[peer].sendall(_hello(secret, rank, peer))
        lower = {peer for peer in peers if peer < rank}
        for peer, caller in _let_in([over_tcp, over_unix], rank, lower, secret, deadline).items():
            met[peer] = undo.enter_context(caller)
            caller.sendall(_hello(secret, rank, peer))
        for peer in peers:
            if peer > rank:
                _expect_welcome(met[peer], rank, peer, secret, deadline)
        for link in met.values():
            _tune(link)
        undo.pop_all()  # all are there: they stay open
        return met


def _listen(host: str) -> tuple[socket.socket, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    over_tcp = socket.socket(family, socket.SOCK_STREAM)
    over_unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        over_tcp.bind((host, 0))
        over_unix.bind(b"\0varuna-" + secrets.token_hex(8).encode())  # abstract: leaves no file behind
        for door in (over_tcp, over_unix):
            door.listen(1024)
            door.setblocking(False)
    except OSError as error:
        over_tcp.close()
        over_unix.close()
        raise OSError(f"cannot listen on {host}: {error} (give an address of this machine)") from error
    return over_tcp, over_unix


def _hello(secret: bytes, source: int, target: int) -> bytes:
    proof = hmac.digest(secret, struct.pack("!qq", source, target), "sha256")
    return HELLO.pack(MAGIC, source, target, proof)


def _caller_rank(hello: bytes, rank: int, secret: bytes) -> int | None:
    """Who is calling, or None where it is nobody of ours."""
    magic, source, target, _ = HELLO.unpack(hello)
    if magic != MAGIC or target != rank or not hmac.compare_digest(hello, _hello(secret, source, target)):
        return None
    return int(source)


def _dial(own: Contact, peer: Contact, deadline: float) -> socket.socket:
    seconds = max(deadline - time.monotonic(), 0.001)
    if own.machine == peer.machine:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(seconds)
            link.connect(b"\0" + peer.path.encode())
            return link
        except OSError:
            link.close()  # some sandboxes forbid it: TCP remains
    try:
        return socket.create_connection((peer.host, peer.port), timeout=seconds)
    except OSError as error:
        way_out = "is it alive, and may the two machines talk on any port?"
        if own.machine != peer.machine and ipaddress.ip_address(peer.host).is_loopback:
            way_out = (
                "it is on another machine, and gave an address that only its own knows: set MASTER_ADDR on "
                "all ranks to the address of the first one's machine, as the others reach it"
            )
        raise PeerLost(
            f"rank {own.rank} cannot reach rank {peer.rank} at {peer.host} port {peer.port}: {error} "
            f"({way_out})"
        ) from error


def _let_in(
    doors: list[socket.socket], rank: int, expected: set[int], secret: bytes, deadline: float
) -> dict[int, socket.socket]:
    """Waits for all the expected ranks; strangers, and callers that say nothing, are refused."""
    inside: dict[int, socket.socket] = {}
    hellos: dict[socket.socket, bytes] = {}
    patience: dict[socket.socket, float] = {}
    with selectors.DefaultSelector() as selector:

        def refuse(caller: socket.socket) -> None:
            selector.unregister(caller)
            del hellos[caller], patience[caller]
            caller.close()

        for door in doors:
            selector.register(door, selectors.EVENT_READ)
        try:
            while missing := expected - set(inside):
                now = time.monotonic()
                if now >= deadline:
                    raise PeerLost(
                        f"rank {rank} waited in vain for ranks {sorted(missing)} to connect "
                        "(did they start, and may the machines talk on any port?)"
                    )
                for caller in [caller for caller, until in patience.items() if now >= until]:
                    refuse(caller)
                for key, _ in selector.select(min([deadline, *patience.values()]) - now):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready in doors:
                        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
                            caller, _ = ready.accept()
                            caller.setblocking(False)
                            hellos[caller], patience[caller] = b"", time.monotonic() + HELLO_SECONDS
                            selector.register(caller, selectors.EVENT_READ)
                        continue
                    try:
                        piece = ready.recv(HELLO.size - len(hellos[ready]))
                    except BlockingIOError:
                        continue
                    except OSError:
                        piece = b""
                    hellos[ready] += piece
                    if not piece:
                        refuse(ready)
                    elif len(hellos[ready]) == HELLO.size:
                        peer = _caller_rank(hellos[ready], rank, secret)
                        if peer not in missing or peer in inside:
                            refuse(ready)
                        else:
                            assert peer is not None
                            selector.unregister(ready)
                            del hellos[ready], patience[ready]
                            inside[peer] = ready
        except BaseException:
            for caller in inside.values():
                caller.close()
            raise
        finally:
            for caller in hellos:
                caller.close()
    return inside


def _expect_welcome(link: socket.socket, rank: int, peer: int, secret: bytes, deadline: float) -> None:
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    welcome = b""
    try:
        while len(welcome) < HELLO.size and (piece := link.recv(HELLO.size - len(welcome))):
            welcome += piece
    except OSError as error:
        raise PeerLost(f"rank {rank} got no welcome from rank {peer}: {error} (is it alive?)") from error
    if len(welcome) < HELLO.size or _caller_rank(welcome, rank, secret) != peer:
        raise PeerLost(
            f"rank {rank} was not welcomed by rank {peer} (it failed while connecting, its plan does not "
            f"link it to rank {rank}, or something else listens at its address)"
        )


def _tune(link: socket.socket) -> None:
    """Small messages leave at once, a vanished machine is noticed, and no call blocks.

    TCP's buffers are left to the kernel, which grows them to megabytes by itself; setting a size
    would switch that off and stop at a much lower limit. A Unix socket's do not grow: ask for all.
    """
    link.setblocking(False)
    if link.family == socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", KEEPALIVE_SECONDS), ("TCP_KEEPINTVL", KEEPALIVE_SECONDS)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def own_address() -> str:
    """This machine's, as the other ranks reach it: the one that faces where the process group has met."""
    return address_facing(os.environ.get("MASTER_ADDR") or _meeting_place() or "127.0.0.1")


def _meeting_place() -> str:
    """Of a process group that was made by `init_method="tcp://host:port"`, or with a TCPStore."""
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))
