"""Remembers how a model was cut and what its parts cost, so that resuming needs neither search nor check.

Keyed by the captured graph's fingerprint: a changed model has another, and so finds nothing.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import write_atomic
from varuna.types import Profile


class Partition(msgspec.Struct, frozen=True):
    """A cut of the model with this fingerprint that has been checked against the model."""

    fingerprint: str
    spans: tuple[tuple[int, int], ...]


def _home() -> Path:
    return Path(VarunaEnvironment.read(os.environ).cache or Path.home() / ".cache" / "varuna")


def _path(fingerprint: str, stages: int) -> Path:
    return _home() / f"{fingerprint[:32]}-{stages}.json"


def read_spans(fingerprint: str, stages: int) -> tuple[tuple[int, int], ...] | None:
    """None where nothing usable is there: a cache never stands in the way."""
    try:
        found = decode(_path(fingerprint, stages).read_text(), Partition)
    except (OSError, ValueError):
        return None
    whole = found.fingerprint == fingerprint and len(found.spans) == stages
    return found.spans if whole else None


def write_spans(fingerprint: str, spans: Sequence[tuple[int, int]]) -> None:
    _write(_path(fingerprint, len(spans)), encode(Partition(fingerprint, tuple(spans))))


def read_costs(fingerprint: str, circumstances: str) -> Profile | None:
    """What was measured of a model in such circumstances; None where nothing usable is there."""
    try:
        found = decode(_path_of_costs(fingerprint, circumstances).read_bytes(), Profile)
    except (OSError, ValueError):
        return None
    return found if found.fingerprint == fingerprint else None


def write_costs(profile: Profile, circumstances: str) -> None:
    _write(_path_of_costs(profile.fingerprint, circumstances), encode(profile))


def _path_of_costs(fingerprint: str, circumstances: str) -> Path:
    digest = hashlib.sha256(circumstances.encode()).hexdigest()
    return _home() / f"{fingerprint[:32]}-costs-{digest[:16]}.json"


def _write(path: Path, text: str) -> None:
    with suppress(OSError):  # a read-only home costs a new search next time, nothing else
        write_atomic(path, text, fsync=False)
