"""A cache of cut positions and measured costs, so that a resumed job skips the search and the check.

The key is the fingerprint of the captured graph, so a changed model does not find old entries.
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


class CachedSpans(msgspec.Struct, frozen=True):
    """The spans of a model whose capture has been checked."""

    fingerprint: str
    spans: tuple[tuple[int, int], ...]


def _home() -> Path:
    return Path(VarunaEnvironment.read(os.environ).cache or Path.home() / ".cache" / "varuna")


def _path(fingerprint: str, stages: int) -> Path:
    return _home() / f"{fingerprint[:32]}-{stages}.json"


def read_spans(fingerprint: str, stages: int) -> tuple[tuple[int, int], ...] | None:
    """Return the cached spans; None if there is no valid entry."""
    try:
        found = decode(_path(fingerprint, stages).read_bytes(), CachedSpans)
    except (OSError, ValueError):
        return None
    return found.spans if found.fingerprint == fingerprint and len(found.spans) == stages else None


def write_spans(fingerprint: str, spans: Sequence[tuple[int, int]]) -> None:
    _write(_path(fingerprint, len(spans)), encode(CachedSpans(fingerprint, tuple(spans))))


def read_costs(fingerprint: str, circumstances: str) -> Profile | None:
    """Return the costs measured in these circumstances; None if there is no valid entry."""
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
    with suppress(OSError):  # with a read-only home, the next run searches again
        write_atomic(path, text, fsync=False)
