"""Nouns to JSON and back, with an error that names the place that is wrong."""

from typing import TypeVar

import msgspec

Noun = TypeVar("Noun")


def encode(noun: object) -> str:
    return msgspec.json.format(msgspec.json.encode(noun), indent=1).decode()


def decode(text: str | bytes, kind: type[Noun], source: str = "the text") -> Noun:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(f"{source} is no {kind.__name__}: {error}") from None
