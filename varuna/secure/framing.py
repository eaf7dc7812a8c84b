"""Messages on a stream of bytes: the length in 4 bytes, then the payload.

TLS protects the stream, so a frame carries no signature of its own. This module handles bytes only.
"""

import struct

MAX_BYTES = 64 * 2**20
"""Limit for one message: a wrong length must not allocate all memory. Longer answers are sent in pieces."""

_LENGTH = struct.Struct("!I")


class FramingError(Exception):
    """The other side does not follow the format; close the connection."""


def pack_frame(payload: bytes) -> bytes:
    if len(payload) > MAX_BYTES:
        raise ValueError(f"a message has {len(payload)} bytes, but the limit is {MAX_BYTES}")
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Collects received bytes and returns complete payloads."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the complete payloads. Raise FramingError."""
        self._buffer += data
        found, start = [], 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._max_bytes:
                raise FramingError(f"a message has {length} bytes, but the limit is {self._max_bytes}")
            stop = start + _LENGTH.size + length
            if len(self._buffer) < stop:
                break
            found.append(bytes(self._buffer[start + _LENGTH.size : stop]))
            start = stop
        del self._buffer[:start]
        return found
