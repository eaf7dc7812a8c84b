"""Remembers how a model was cut, so that resuming needs no new search and no new check.

Keyed by the captured graph's fingerprint: a changed model has another, and so finds nothing.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from varuna.codec import decode, encode


class Partition(msgspec.Struct, frozen=True):
    """A cut of the model with this fingerprint that has been checked against the model."""

    fingerprint: str
    spans: tuple[tuple[int, int], ...]


def _path(fingerprint: str, stages: int) -> Path:
    home = os.environ.get("VARUNA_CACHE") or Path.home() / ".cache" / "varuna"
    return Path(home) / f"{fingerprint[:32]}-{stages}.json"


def read_spans(fingerprint: str, stages: int) -> tuple[tuple[int, int], ...] | None:
    """None where nothing usable is there: a cache never stands in the way."""
    try:
        found = decode(_path(fingerprint, stages).read_text(), Partition)
    except (OSError, ValueError):
        return None
    whole = found.fingerprint == fingerprint and len(found.spans) == stages
    return found.spans if whole else None


def write_spans(fingerprint: str, spans: Sequence[tuple[int, int]]) -> None:
    path = _path(fingerprint, len(spans))
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(encode(Partition(fingerprint, tuple(spans))))
        temporary.replace(path)
    except OSError:  # a read-only home costs a new search next time, nothing else
        temporary.unlink(missing_ok=True)
