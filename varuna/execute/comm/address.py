"""Connects this rank to its peers: from rank numbers to authenticated sockets.

Every rank listens, gives its address to all others through `exchange`, connects to peers with a higher rank,
and accepts peers with a lower one. A caller must prove that it knows the job's secret, which is made of a
random contribution of every rank. Listening ends when all peers are connected.

Ranks on one machine use a Unix-domain socket, which is cheaper than TCP for small messages. They must also
share the network namespace: containers on one host do not.
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
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna import codec
from varuna.addresses import address_facing
from varuna.errors import PeerLost

CONNECT_SECONDS = 60.0
"""Timeout for all peers to connect; includes the start of the slowest rank."""
HELLO_SECONDS = 5.0
"""Timeout for a caller to send its hello."""
KEEPALIVE_SECONDS = 5
"""Probe interval: after 3 unanswered probes the peer's machine counts as lost."""

Exchange = Callable[[str], list[str]]
"""Takes this rank's text and returns those of all ranks."""

HELLO = struct.Struct("!8sqq32s")  # magic, from, to, proof
MAGIC = b"varuna/1"


class RankAddress(msgspec.Struct, frozen=True):
    """Listening address of a rank, and its contribution to the job's secret."""

    rank: int
    machine: str
    host: str
    port: int
    path: str
    secret: str


def machine_identity() -> str:
    """Return a name that two processes share exactly if they can reach each other's abstract Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(16)}"  # unknown, so use TCP


def own_address() -> str:
    """Return this machine's address on the interface that faces the process group's store."""
    store: Any = distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, distributed_c10d.PrefixStore):
        store = store.underlying_store
    # A store has a host if the process group was made with "tcp://host:port" or a TCPStore.
    return address_facing(os.environ.get("MASTER_ADDR") or str(getattr(store, "host", "")) or "127.0.0.1")


def connect_sockets(
    rank: int,
    peers: Collection[int],
    exchange: Exchange,
    *,
    host: str = "127.0.0.1",
    unix: bool = True,
    timeout_seconds: float = CONNECT_SECONDS,
) -> dict[int, socket.socket]:
    """Return a connected, non-blocking socket to each peer. Each peer must name this rank in turn."""
    over_tcp, over_unix = _listen(host)
    with over_tcp, over_unix, contextlib.ExitStack() as undo:
        own = RankAddress(
            rank=rank,
            machine=machine_identity() if unix else f"rank {rank}",
            host=host,
            port=over_tcp.getsockname()[1],
            path=over_unix.getsockname()[1:].decode(),
            secret=secrets.token_hex(16),
        )
        addresses = _exchange_addresses(own, peers, exchange)
        shared = "".join(addresses[other].secret for other in sorted(addresses))
        secret = hashlib.sha256(shared.encode()).digest()
        deadline = time.monotonic() + timeout_seconds
        connected: dict[int, socket.socket] = {}
        for peer in sorted(peers):
            if peer > rank:  # the hello waits in the peer's backlog until the peer accepts it
                connected[peer] = undo.enter_context(_dial(own, addresses[peer], deadline))
                connected[peer].sendall(_hello(secret, rank, peer))
        lower = {peer for peer in peers if peer < rank}
        with contextlib.closing(Reception([over_tcp, over_unix], rank, lower, secret)) as reception:
            accepted = reception.accept_all(deadline)
        for peer, caller in accepted.items():
            connected[peer] = undo.enter_context(caller)
            caller.sendall(_hello(secret, rank, peer))
        for peer in peers:
            if peer > rank:
                _expect_welcome(connected[peer], rank, peer, secret, deadline)
        for link in connected.values():
            _tune(link)
        undo.pop_all()  # all connected: keep the sockets open
        return connected


def _exchange_addresses(
    own: RankAddress, peers: Collection[int], exchange: Exchange
) -> dict[int, RankAddress]:
    texts = exchange(codec.encode(own))
    decoded = [codec.decode(text, RankAddress, "a rank's address") for text in texts]
    addresses = {address.rank: address for address in decoded}
    if missing := sorted(set(peers) - set(addresses)):
        raise ValueError(
            f"rank {own.rank} needs links to ranks {missing}, but only ranks {sorted(addresses)} gave an "
            "address (all ranks of the plan must take part in the exchange)"
        )
    return addresses


def _listen(host: str) -> tuple[socket.socket, socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    over_tcp = socket.socket(family, socket.SOCK_STREAM)
    over_unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        over_tcp.bind((host, 0))
        over_unix.bind(b"\0varuna-" + secrets.token_hex(8).encode())  # abstract: leaves no file behind
        for listener in (over_tcp, over_unix):
            listener.listen(1024)
            listener.setblocking(False)
    except OSError as error:
        over_tcp.close()
        over_unix.close()
        raise OSError(f"cannot listen on {host}: {error} (give an address of this machine)") from error
    return over_tcp, over_unix


def _hello(secret: bytes, source: int, target: int) -> bytes:
    proof = hmac.digest(secret, struct.pack("!qq", source, target), "sha256")
    return HELLO.pack(MAGIC, source, target, proof)


def _caller_rank(hello: bytes, rank: int, secret: bytes) -> int | None:
    """Return the rank of the caller; None if it is not a rank of this job."""
    magic, source, target, _ = HELLO.unpack(hello)
    if magic != MAGIC or target != rank or not hmac.compare_digest(hello, _hello(secret, source, target)):
        return None
    return int(source)


def _dial(own: RankAddress, peer: RankAddress, deadline: float) -> socket.socket:
    seconds = max(deadline - time.monotonic(), 0.001)
    if own.machine == peer.machine:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.settimeout(seconds)
            link.connect(b"\0" + peer.path.encode())
            return link
        except OSError:
            link.close()  # some sandboxes forbid Unix sockets: use TCP
    try:
        return socket.create_connection((peer.host, peer.port), timeout=seconds)
    except OSError as error:
        remedy = "is it alive, and may the two machines connect on any port?"
        if own.machine != peer.machine and ipaddress.ip_address(peer.host).is_loopback:
            remedy = (
                "it is on another machine and gave a loopback address: set MASTER_ADDR on all ranks to an "
                "address of the first rank's machine that the other machines can reach"
            )
        raise PeerLost(
            f"rank {own.rank} cannot reach rank {peer.rank} at {peer.host} port {peer.port}: {error} "
            f"({remedy})"
        ) from error


class Reception:
    """Accepts the expected peers. Refuses callers without the secret and callers that stay silent."""

    def __init__(
        self, listeners: Sequence[socket.socket], rank: int, expected: set[int], secret: bytes
    ) -> None:
        self._listeners = listeners
        self._rank = rank
        self._missing = set(expected)
        self._secret = secret
        self._accepted: dict[int, socket.socket] = {}
        # Of callers that are not accepted: the bytes received so far, and the deadline for the rest.
        self._hellos: dict[socket.socket, tuple[bytes, float]] = {}
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def accept_all(self, deadline: float) -> dict[int, socket.socket]:
        """Wait for all expected peers and return their sockets."""
        while self._missing:
            now = time.monotonic()
            if now >= deadline:
                raise PeerLost(
                    f"rank {self._rank} waited in vain for ranks {sorted(self._missing)} to connect "
                    "(did they start, and may the machines connect on any port?)"
                )
            for caller in [caller for caller, (_, until) in self._hellos.items() if now >= until]:
                self._forget(caller)
                caller.close()
            next_deadline = min([deadline, *(until for _, until in self._hellos.values())])
            for key, _ in self._selector.select(next_deadline - now):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                else:
                    self._read_hello(key.fileobj)
        accepted, self._accepted = self._accepted, {}
        return accepted

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            caller, _ = listener.accept()
            caller.setblocking(False)
            self._hellos[caller] = b"", time.monotonic() + HELLO_SECONDS
            self._selector.register(caller, selectors.EVENT_READ)

    def _read_hello(self, caller: socket.socket) -> None:
        before, until = self._hellos[caller]
        try:
            received = caller.recv(HELLO.size - len(before))
        except BlockingIOError:
            return
        except OSError:
            received = b""
        hello = before + received
        if received and len(hello) < HELLO.size:
            self._hellos[caller] = hello, until
            return
        self._forget(caller)
        peer = _caller_rank(hello, self._rank, self._secret) if received else None
        if peer in self._missing:
            self._missing.remove(peer)
            self._accepted[peer] = caller
        else:
            caller.close()

    def _forget(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._hellos[caller]

    def close(self) -> None:
        self._selector.close()
        for caller in [*self._hellos, *self._accepted.values()]:
            caller.close()


def _expect_welcome(link: socket.socket, rank: int, peer: int, secret: bytes, deadline: float) -> None:
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    welcome = b""
    try:
        while len(welcome) < HELLO.size and (received := link.recv(HELLO.size - len(welcome))):
            welcome += received
    except OSError as error:
        raise PeerLost(f"rank {rank} got no welcome from rank {peer}: {error} (is it alive?)") from error
    if len(welcome) < HELLO.size or _caller_rank(welcome, rank, secret) != peer:
        raise PeerLost(
            f"rank {rank} was not welcomed by rank {peer} (it failed while connecting, its plan does not "
            f"link it to rank {rank}, or another program listens at its address)"
        )


def _tune(link: socket.socket) -> None:
    """Send small messages at once, detect a vanished machine, and never block.

    The kernel grows TCP buffers to megabytes; a fixed size would switch that off and set a lower limit. The
    buffers of a Unix socket do not grow, so request a large one.
    """
    link.setblocking(False)
    if link.family == socket.AF_UNIX:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
        return
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
