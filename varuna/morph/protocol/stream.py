"""Messages of any length on the control channel: each is cut into frames of at most PIECE_BYTES.

The first byte of a frame says whether the message continues in the next frame. So a wrong length cannot
allocate memory, and a long answer, such as the status of thousands of machines, needs no special case.
"""

from varuna.secure.framing import FrameReader, FramingError, pack_frame

PIECE_BYTES = 2**20
MAX_MESSAGE_BYTES = 2**30
_LAST, _CONTINUED = b".", b"+"


def pack_message(message: bytes) -> bytes:
    """Return the frames of a message."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message has {len(message)} bytes, but the limit is {MAX_MESSAGE_BYTES}")
    starts = range(0, len(message) or 1, PIECE_BYTES)
    return b"".join(
        pack_frame((_LAST if start == starts[-1] else _CONTINUED) + message[start : start + PIECE_BYTES])
        for start in starts
    )


class MessageReader:
    """Collects received bytes and returns complete messages."""

    def __init__(self) -> None:
        self._frames = FrameReader(max_bytes=1 + PIECE_BYTES)
        self._message = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes, and return the complete messages. Raise FramingError."""
        found = []
        for frame in self._frames.feed(data):
            if frame[:1] not in (_LAST, _CONTINUED):
                raise FramingError(f"a frame begins with {frame[:1]!r} (another program or varuna version)")
            self._message += memoryview(frame)[1:]
            if len(self._message) > MAX_MESSAGE_BYTES:
                raise FramingError(f"a message has more than {MAX_MESSAGE_BYTES} bytes")
            if frame[:1] == _LAST:
                found.append(bytes(self._message))
                self._message.clear()
        return found
