"""Connects this rank to its peers: from rank numbers to authenticated sockets.

Every rank listens, gives its address to all others through `exchange`, connects to peers with a higher rank,
and accepts peers with a lower one. Listening ends when all peers are connected. Both ends prove that they
know the key of these links, each with a number that the other has just drawn, so a recorded handshake is
worthless:

    both     opening: magic, from, to, 32 random bytes
    caller   HMAC(key, "call", both openings)
    called   HMAC(key, "answer", both openings), if the caller's proof is right

The key comes from the job's credential and the numbers of all ranks. A job without a credential (torchrun)
makes it of the numbers alone; anyone who reads the exchange knows it.

Ranks on one machine use a Unix-domain socket, which is cheaper than TCP for small messages. They must also
share the network namespace: containers on one host do not.
"""

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed import distributed_c10d

from varuna import codec
from varuna.addresses import address_facing
from varuna.addresses import machine_identity as machine_identity
from varuna.errors import PeerLost
from varuna.secure.credential import own_credential

log = logging.getLogger("varuna")

CONNECT_SECONDS = 60.0
"""Timeout for all peers to connect; includes the start of the slowest rank."""
HELLO_SECONDS = 15.0
"""Timeout for a caller to prove that it is a rank of this job."""
REFUSAL_LOG_SECONDS = 10.0
"""Shortest interval between two log lines about refused callers."""
ORDER_SECONDS = 0.05
"""Interval at which a rank that waits for connections looks for an order of the manager."""
KEEPALIVE_SECONDS = 5
"""Probe interval: after 3 unanswered probes the peer's machine counts as lost."""

Exchange = Callable[[str], list[str]]
"""Takes this rank's text and returns those of all ranks."""

OPENING = struct.Struct("!8sqq32s")  # magic, from, to (-1 if not known yet), random number
PROOF_BYTES = 32
MAGIC = b"varuna/2"


class RankAddress(msgspec.Struct, frozen=True):
    """Listening address of a rank, and its random number for the key of the links."""

    rank: int
    machine: str
    host: str
    port: int
    path: str
    nonce: str


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
    key: bytes | None = None,
    unix: bool = True,
    timeout_seconds: float = CONNECT_SECONDS,
    has_order: Callable[[], bool] | None = None,
) -> dict[int, socket.socket]:
    """Return a connected, non-blocking socket to each peer. Each peer must name this rank in turn.

    `has_order`: give up, because the manager has lost ranks.
    `key` is a secret of all ranks, such as `job_key("links")`; None: `exchange` decides who takes part.
    """
    over_tcp, over_unix = _listen(host)
    with over_tcp, over_unix, contextlib.ExitStack() as undo:
        own = RankAddress(
            rank=rank,
            machine=machine_identity() if unix else f"rank {rank}",
            host=host,
            port=over_tcp.getsockname()[1],
            path=over_unix.getsockname()[1:].decode(),
            nonce=secrets.token_hex(16),
        )
        addresses = _exchange_addresses(own, peers, exchange)
        nonces = "".join(addresses[other].nonce for other in sorted(addresses)).encode()
        own_key = hashlib.sha256(nonces).digest() if key is None else hmac.digest(key, nonces, "sha256")
        handshakes = Handshakes(
            [over_tcp, over_unix], rank, own_key, deadline=time.monotonic() + timeout_seconds
        )
        handshakes.has_order = has_order
        undo.callback(handshakes.close)
        for peer in sorted(peers):
            if peer > rank:
                handshakes.call(peer, _dial(own, addresses[peer], handshakes.deadline, has_order))
        connected = handshakes.run({peer for peer in peers if peer < rank})
        for link in connected.values():
            _tune(link)
        return connected


def job_key(purpose: str) -> bytes | None:
    """Return a secret of the ranks of this job; None if its launcher gives it no credential."""
    credential = own_credential()
    return None if credential is None else credential.derive(purpose)


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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _listen(host: str) -> tuple[socket.socket, socket.socket]:
    over_tcp = socket.socket(_family(host), socket.SOCK_STREAM)
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


def _dial(
    own: RankAddress, peer: RankAddress, deadline: float, has_order: Callable[[], bool] | None = None
) -> socket.socket:
    if own.machine == peer.machine:
        try:
            link = _connect(socket.AF_UNIX, b"\0" + peer.path.encode(), deadline, has_order)
        except OSError:
            pass  # some sandboxes forbid Unix sockets: use TCP
        else:
            if _is_own_user(link):
                return link
            log.warning("another user listens at the Unix socket of rank %d: using TCP", peer.rank)
            link.close()
    try:
        return _connect(_family(peer.host), (peer.host, peer.port), deadline, has_order)
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


def _connect(
    family: socket.AddressFamily,
    address: bytes | tuple[str, int],
    deadline: float,
    has_order: Callable[[], bool] | None,
) -> socket.socket:
    """Return a connected socket. While the other machine is silent, look for an order of the manager.

    Raises OSError, or PeerLost after an order.
    """
    with contextlib.ExitStack() as undo:
        link = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        link.setblocking(False)
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        code = link.connect_ex(address)
        while code in (errno.EINPROGRESS, errno.EAGAIN):
            _check_order(has_order)
            if time.monotonic() >= deadline:
                raise TimeoutError("timed out")
            if code == errno.EAGAIN:  # the queue of a Unix socket is full, and nothing says when it is not
                time.sleep(ORDER_SECONDS)
                code = link.connect_ex(address)
            elif poll.poll(ORDER_SECONDS * 1000):
                code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        undo.pop_all()
        return link


def _check_order(has_order: Callable[[], bool] | None) -> None:
    if has_order is not None and has_order():
        raise PeerLost("the manager has ordered this rank to go on without lost ranks")


def _is_own_user(link: socket.socket) -> bool:
    """Return False if a process of another user is at the other end of a Unix socket."""
    if link.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


@dataclass(eq=False)
class Handshake:
    """A connection whose other end has not proved yet that it is a rank of this job."""

    link: socket.socket
    peer: int | None  # None: a caller that has not given its rank
    until: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    own: bytes = b""  # opening
    other: bytes = b""  # opening
    received: bytes = b""
    called: bool = False  # this rank called; else the other did

    def proof(self, key: bytes, role: bytes) -> bytes:
        openings = (self.own, self.other) if self.called else (self.other, self.own)
        return hmac.digest(key, role + b"".join(openings), "sha256")


class Refused(Exception):
    """The other end is not a rank of this job."""


class Handshakes:
    """Connects to the expected peers. Refuses callers without the key and callers that stay silent."""

    def __init__(self, listeners: Sequence[socket.socket], rank: int, key: bytes, *, deadline: float) -> None:
        self.deadline = deadline
        self._listeners = listeners
        self._rank = rank
        self._key = key
        self._missing: set[int] = set()  # peers that have to call
        self._pending: dict[socket.socket, Handshake] = {}  # in the order of their start
        self._done: dict[int, socket.socket] = {}
        self._num_refused = 0
        self._last_refusal = ""
        self._logged_at = -REFUSAL_LOG_SECONDS
        self._selector = selectors.DefaultSelector()
        self.has_order: Callable[[], bool] | None = None

    def call(self, peer: int, link: socket.socket) -> None:
        """Begin a handshake over a new connection to a peer."""
        handshake = Handshake(link, peer, self.deadline, called=True)
        self._begin(handshake, peer)

    def run(self, callers: set[int]) -> dict[int, socket.socket]:
        """Wait for all peers and return their sockets."""
        self._missing = set(callers)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        while self._missing or any(handshake.called for handshake in self._pending.values()):
            now = time.monotonic()
            if now >= self.deadline:
                raise self._timeout()
            _check_order(self.has_order)
            for handshake in [handshake for handshake in self._pending.values() if now >= handshake.until]:
                self._refuse(handshake, f"it proved nothing within {HELLO_SECONDS:g} s")
            until = min([self.deadline, *(handshake.until for handshake in self._pending.values())])
            for key, _ in self._selector.select(min(max(until - now, 0), ORDER_SECONDS)):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj in self._listeners:
                    self._accept(key.fileobj)
                elif key.fileobj in self._pending:
                    self._continue(self._pending[key.fileobj])
        done, self._done = self._done, {}
        return done

    def close(self) -> None:
        """Close everything that `run` has not returned."""
        for handshake in [*self._pending.values()]:
            if not handshake.called:
                self._refuse(handshake, "all peers are connected")
        self._log_refusals(at_once=True)
        self._selector.close()
        for link in [*self._pending, *self._done.values()]:
            link.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                oldest = next((one for one in self._pending.values() if not one.called), None)
                if oldest is None:
                    raise
                self._refuse(oldest, "too many connections are open")
            return
        handshake = Handshake(link, None, min(self.deadline, time.monotonic() + HELLO_SECONDS))
        if _is_own_user(link):
            self._begin(handshake, -1)
        else:
            self._refuse(handshake, "it is a process of another user")

    def _begin(self, handshake: Handshake, target: int) -> None:
        handshake.link.setblocking(False)
        handshake.own = OPENING.pack(MAGIC, self._rank, target, handshake.nonce)
        self._pending[handshake.link] = handshake
        self._selector.register(handshake.link, selectors.EVENT_READ)
        try:
            self._send(handshake, handshake.own)
        except OSError as error:
            self._fail(handshake, str(error))

    def _send(self, handshake: Handshake, data: bytes) -> None:
        if handshake.link.send(data) != len(data):  # a new connection has space for some bytes
            raise OSError("the connection takes no bytes")

    def _continue(self, handshake: Handshake) -> None:
        needed = OPENING.size if not handshake.other else PROOF_BYTES
        try:
            received = handshake.link.recv(needed - len(handshake.received))
            if not received:
                raise Refused("it closed the connection")
            handshake.received += received
            if len(handshake.received) < needed:
                return
            message, handshake.received = handshake.received, b""
            if not handshake.other:
                self._read_opening(handshake, message)
            else:
                self._read_proof(handshake, message)
        except BlockingIOError:
            return
        except (OSError, Refused) as error:
            self._fail(handshake, str(error))

    def _read_opening(self, handshake: Handshake, message: bytes) -> None:
        magic, source, target, _ = OPENING.unpack(message)
        if magic != MAGIC:
            raise Refused("it does not speak the protocol of links")
        if handshake.called:
            if source != handshake.peer:
                raise Refused(f"it is rank {source}")
            handshake.other = message
            self._send(handshake, handshake.proof(self._key, b"call"))
        elif target != self._rank or source not in self._missing:
            raise Refused(f"it calls rank {target} as rank {source}, which is not expected")
        else:
            handshake.other, handshake.peer = message, source

    def _read_proof(self, handshake: Handshake, message: bytes) -> None:
        expected = handshake.proof(self._key, b"answer" if handshake.called else b"call")
        if not hmac.compare_digest(message, expected):
            raise Refused("it does not know the key of this job")
        assert handshake.peer is not None
        if not handshake.called:
            if handshake.peer not in self._missing:
                raise Refused(f"rank {handshake.peer} is connected already")
            self._send(handshake, handshake.proof(self._key, b"answer"))
            self._missing.remove(handshake.peer)
        self._forget(handshake)
        self._done[handshake.peer] = handshake.link

    def _forget(self, handshake: Handshake) -> None:
        if self._pending.pop(handshake.link, None) is not None:
            self._selector.unregister(handshake.link)

    def _fail(self, handshake: Handshake, why: str) -> None:
        if handshake.called:
            raise PeerLost(
                f"rank {self._rank} was not welcomed by rank {handshake.peer}: {why} (it failed while "
                f"connecting, its plan does not link it to rank {self._rank}, or another program listens at "
                "its address)"
            )
        self._refuse(handshake, why)

    def _refuse(self, handshake: Handshake, why: str) -> None:
        try:
            name = handshake.link.getpeername()
            source = f"{name[0]} port {name[1]}" if isinstance(name, tuple) else "this machine"
        except OSError:
            source = "a closed connection"
        self._forget(handshake)
        handshake.link.close()
        self._num_refused += 1
        self._last_refusal = f"{source}: {why}"
        self._log_refusals()

    def _log_refusals(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if not self._num_refused or (not at_once and now - self._logged_at < REFUSAL_LOG_SECONDS):
            return
        log.warning(
            "rank %d refused %d connections to its links, the last from %s",
            self._rank,
            self._num_refused,
            self._last_refusal,
        )
        self._num_refused, self._logged_at = 0, now

    def _timeout(self) -> PeerLost:
        if self._missing:
            return PeerLost(
                f"rank {self._rank} waited in vain for ranks {sorted(self._missing)} to connect "
                "(did they start, and may the machines connect on any port?)"
            )
        silent = sorted(one.peer for one in self._pending.values() if one.called and one.peer is not None)
        return PeerLost(f"rank {self._rank} got no answer from ranks {silent} (are they alive?)")


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
