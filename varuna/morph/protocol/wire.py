"""Wire format between manager, agents and commands: framed, authenticated, ordered, bounded.

    listener ──► greeting: magic, its nonce
    caller   ──► greeting: magic, its nonce
    both         key of each direction = HMAC(secret, direction, both nonces)
    then frames  length (4 bytes) · HMAC(key, frame number, length, payload) (32 bytes) · payload

A payload is used only after its HMAC is verified. The nonces bind it to this connection and the frame
number to its position, so replayed, reordered or reflected frames are rejected. The secret is never
sent. This module handles bytes only; its users own the sockets.
"""

import hmac
import secrets
import struct

MAGIC = b"varuna-morph/2\n"
NONCE_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 32
MAX_BYTES = 4 * 2**20
MAX_FIRST_BYTES = 16 * 2**10
"""Limit for the first message, before the other side has proved that it knows the secret."""

_LENGTH = struct.Struct("!I")
_PLACE = struct.Struct("!QI")


class WireError(Exception):
    """The other side is unknown, or has another version; close the connection."""


class Wire:
    """One end of a connection; the caller is the end that connects."""

    def __init__(self, secret: bytes, *, is_caller: bool) -> None:
        self._secret = secret
        self._is_caller = is_caller
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._keys: tuple[bytes, bytes] | None = None  # for sending, for receiving
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    @property
    def greeting(self) -> bytes:
        """First bytes to send."""
        return MAGIC + self._nonce

    @property
    def greeted(self) -> bool:
        return self._keys is not None

    @property
    def trusted(self) -> bool:
        """True once the other side has proved that it knows the secret."""
        return self._received > 0

    def pack(self, payload: bytes) -> bytes:
        """Return the payload as a frame. Requires the greeting of the other side."""
        if self._keys is None:
            raise AssertionError("no frame can be sent before the greeting of the other side")
        if len(payload) > MAX_BYTES:
            raise ValueError(f"a message has {len(payload)} bytes, but the limit is {MAX_BYTES}")
        frame = _LENGTH.pack(len(payload)) + _mac(self._keys[0], self._sent, payload) + payload
        self._sent += 1
        return frame

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the complete payloads. Raise WireError."""
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
            raise WireError(f"expected {MAGIC!r}, found {head!r} (another program or varuna version)")
        if len(self._buffer) < GREETING_BYTES:
            return False
        theirs = bytes(self._buffer[len(MAGIC) : GREETING_BYTES])
        del self._buffer[:GREETING_BYTES]
        both = self._nonce + theirs if self._is_caller else theirs + self._nonce
        to_listener, to_caller = (
            hmac.digest(self._secret, MAGIC + direction + both, "sha256")
            for direction in (b"to listener", b"to caller")
        )
        self._keys = (to_listener, to_caller) if self._is_caller else (to_caller, to_listener)
        return True

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        limit = MAX_BYTES if self.trusted else MAX_FIRST_BYTES
        if length > limit:
            raise WireError(f"a message has {length} bytes, but the limit is {limit}")
        stop = _LENGTH.size + MAC_BYTES + length
        if len(self._buffer) < stop:
            return None
        assert self._keys is not None
        mac = bytes(self._buffer[_LENGTH.size : _LENGTH.size + MAC_BYTES])
        payload = bytes(self._buffer[_LENGTH.size + MAC_BYTES : stop])
        if not hmac.compare_digest(mac, _mac(self._keys[1], self._received, payload)):
            raise WireError(
                f"message {self._received} has a wrong signature (the secret of another job, or a "
                "changed or replayed message)"
            )
        del self._buffer[:stop]
        self._received += 1
        return payload


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, _PLACE.pack(number, len(payload)) + payload, "sha256")
