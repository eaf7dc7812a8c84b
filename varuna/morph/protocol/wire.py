"""Messages between manager, agents and commands: framed, authenticated, in order, bounded.

    listener ──► greeting: magic, its nonce
    caller   ──► greeting: magic, its nonce
    both         key of each direction = HMAC(secret, direction, both nonces)
    then frames  length (4 bytes) · HMAC(key, number of the frame, length, payload) (32 bytes) · payload

Nothing is read of a message before its HMAC is right. The nonces tie it to this connection, the
number to its place: what is replayed, reordered or reflected does not fit. The secret is never sent.
Here are only bytes; whoever owns the socket feeds and drains them.
"""

import hmac
import secrets
import struct

MAGIC = b"varuna-morph/1\n"
NONCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 32
MAX_BYTES = 4 * 2**20
MAX_FIRST_BYTES = 16 * 2**10
"""Who has not shown yet that it knows the secret may not make us hold more than this."""

_LENGTH = struct.Struct("!I")
_PLACE = struct.Struct("!QI")


class Refused(Exception):
    """The other side is not one of ours, or speaks another version; the connection is to be closed."""


class Wire:
    """One end of one connection."""

    def __init__(self, secret: bytes, *, calls: bool) -> None:
        self._secret = secret
        self._calls = calls
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._keys: tuple[bytes, bytes] | None = None  # for sending, for receiving
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    @property
    def greeting(self) -> bytes:
        """To be sent first of all."""
        return MAGIC + self._nonce

    @property
    def greeted(self) -> bool:
        return self._keys is not None

    @property
    def trusted(self) -> bool:
        """Whether the other side has shown that it knows the secret."""
        return self._received > 0

    def pack(self, payload: bytes) -> bytes:
        """The payload as a frame. Only after the other's greeting has come."""
        if self._keys is None:
            raise AssertionError("nothing can be sent before the greetings")
        if len(payload) > MAX_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes is too long (at most {MAX_BYTES})")
        frame = _LENGTH.pack(len(payload)) + _mac(self._keys[0], self._sent, payload) + payload
        self._sent += 1
        return frame

    def feed(self, data: bytes) -> list[bytes]:
        """Takes in what has arrived; returns the payloads that are whole. Raises Refused."""
        self._buffer += data
        if self._keys is None and not self._take_greeting():
            return []
        found = []
        while (payload := self._take_frame()) is not None:
            found.append(payload)
        return found

    def _take_greeting(self) -> bool:
        head = bytes(self._buffer[: len(MAGIC)])
        if not MAGIC.startswith(head):
            raise Refused(f"expected {MAGIC!r}, found {head!r} (another program, or another version)")
        if len(self._buffer) < GREETING_BYTES:
            return False
        theirs = bytes(self._buffer[len(MAGIC) : GREETING_BYTES])
        del self._buffer[:GREETING_BYTES]
        both = self._nonce + theirs if self._calls else theirs + self._nonce
        to_listener, to_caller = (_derive(self._secret, way, both) for way in (b"to listener", b"to caller"))
        self._keys = (to_listener, to_caller) if self._calls else (to_caller, to_listener)
        return True

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        limit = MAX_BYTES if self.trusted else MAX_FIRST_BYTES
        if length > limit:
            raise Refused(f"a message of {length} bytes is announced, {limit} are allowed")
        stop = _LENGTH.size + MAC_BYTES + length
        if len(self._buffer) < stop:
            return None
        assert self._keys is not None
        mac = bytes(self._buffer[_LENGTH.size : _LENGTH.size + MAC_BYTES])
        payload = bytes(self._buffer[_LENGTH.size + MAC_BYTES : stop])
        if not hmac.compare_digest(mac, _mac(self._keys[1], self._received, payload)):
            raise Refused(
                f"message {self._received} has a wrong signature (another job's secret, or it was "
                "tampered with, or sent twice)"
            )
        del self._buffer[:stop]
        self._received += 1
        return payload


def _derive(secret: bytes, way: bytes, nonces: bytes) -> bytes:
    return hmac.digest(secret, MAGIC + way + nonces, "sha256")


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _PLACE.pack(number, len(payload)) + payload, "sha256")
