"""JSON encoding and decoding of the library's types."""

from typing import TypeVar

import msgspec

Decoded = TypeVar("Decoded")

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for bytes that are no valid value: wrong ones, no UTF-8, and nested too deeply."""


def encode(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=1).decode()


def decode(text: str | bytes, kind: type[Decoded], source: str = "the text") -> Decoded:
    """Decode JSON. An error names the source and the position of the wrong value."""
    try:
        return msgspec.json.decode(text, type=kind)
    except UNDECODABLE as error:
        raise ValueError(f"{source} is not a valid {kind.__name__}: {error}") from None
