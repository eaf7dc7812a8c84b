"""Frames TensorBoard's events as records of an event file, many at once.

A record is the length of an event, the event, and a checksum (CRC-32C) of each. tensorboard's own writer
computes checksums byte by byte in Python, which takes most of the time of a batch. Here, numpy computes those
of all records together.
"""

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_POLYNOMIAL = 0x82F63B78
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_BLOCK = 64
"""Bytes of each record that are read at once."""


def frame_records(events: Sequence[bytes]) -> bytes:
    """Return the records of these events, in order."""
    lengths = [_LENGTH.pack(len(event)) for event in events]
    parts: list[bytes] = []
    for length, length_sum, event, event_sum in zip(
        lengths, masked_checksums(lengths), events, masked_checksums(events), strict=True
    ):
        parts += length, _CHECKSUM.pack(length_sum), event, _CHECKSUM.pack(event_sum)
    return b"".join(parts)


def masked_checksums(texts: Sequence[bytes]) -> list[int]:
    """Return the checksum of each text, in the form that records have. Each text has 4 bytes or more."""
    if not texts:
        return []
    sums = _checksums(texts)
    rotated = (sums >> np.uint32(15)) | (sums << np.uint32(17))
    masked: list[int] = (rotated + np.uint32(0xA282EAD8)).tolist()
    return masked


def _checksums(texts: Sequence[bytes]) -> NDArray[np.uint32]:
    """Return the CRC-32C of each text.

    A checksum is the XOR of one table entry for each byte and its distance from the end. Zeros before a text
    do not change it, so all texts are padded to the same length.
    """
    width = -(-max(map(len, texts)) // _BLOCK) * _BLOCK
    padded = np.frombuffer(bytearray(b"".join(text.rjust(width, b"\0") for text in texts)), np.uint8)
    rows = padded.reshape(len(texts), width)
    starts = width - np.array([len(text) for text in texts])
    first_bytes = starts[:, np.newaxis] + np.arange(4)
    rows[np.arange(len(texts))[:, np.newaxis], first_bytes] ^= 0xFF  # the initial value of a checksum
    sums = np.zeros(len(texts), np.uint32)
    for begin in range(0, width, _BLOCK):
        block = rows[:, begin : begin + _BLOCK]
        block[:, :4] ^= sums.astype("<u4").view(np.uint8).reshape(-1, 4)
        sums = np.bitwise_xor.reduce(_TABLE[_PLACES, block], axis=1)
    return ~sums


def _table() -> NDArray[np.uint32]:
    """Return what a byte adds to a checksum, by its place in a block and its value."""
    entries = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        entries = (entries >> np.uint32(1)) ^ np.where(entries & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = [entries]
    for _ in range(_BLOCK - 1):
        table.append((table[-1] >> np.uint32(8)) ^ entries[table[-1] & 0xFF])
    return np.stack(table[::-1])


_TABLE = _table()
_PLACES = np.arange(_BLOCK)
