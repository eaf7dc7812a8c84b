"""Where a profile lies: `profile.json` in its folder, one model to a folder. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode, encode
from varuna.measure.draft import Draft, Subject, new_draft, reopened, resumed
from varuna.types import Profile

NAME = "profile.json"
UNFINISHED = "profile.unfinished.json"
"""What was measured so far, while it is not enough for a profile."""


def read_profile(folder: str | os.PathLike[str]) -> Profile:
    """The profile that `Profiler` left in a folder; the path of the file itself will do as well."""
    path = Path(folder)
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        begun = path.with_name(UNFINISHED).exists()
        raise FileNotFoundError(
            f"there is no profile {path} "
            + (
                "yet, only a part of one (run the Profiler again: it goes on where it stopped)"
                if begun
                else "(make one with varuna.Profiler, or give the folder where it lies)"
            )
        ) from None
    return decode(text, Profile, str(path))


def open_draft(folder: Path, subject: Subject, *, extends: bool) -> Draft:
    """What is there already of this model on this device, finished or not; refused where it is another's."""
    finished, unfinished = folder / NAME, folder / UNFINISHED
    if extends and finished.exists():
        return reopened(read_profile(finished), subject, str(finished))
    if extends and unfinished.exists():
        draft = decode(unfinished.read_text(), Draft, str(unfinished))
        return resumed(draft, subject, str(unfinished))
    return new_draft(subject)


class Book:
    """Keeps the draft, and writes it down whenever something is added: a kill costs one item at most."""

    def __init__(self, folder: Path, draft: Draft, *, writes: bool) -> None:
        self.folder = folder
        self.draft = draft
        self._writes = writes

    def add(self, draft: Draft | None = None, **found: Any) -> None:
        """A draft with more in it, or some of its fields."""
        self.draft = msgspec.structs.replace(draft or self.draft, **found)
        if not self._writes:
            return
        profile = self.draft.profile()
        if profile is None:
            write_whole(self.folder / UNFINISHED, encode(self.draft))
        else:
            write_whole(self.folder / NAME, encode(profile))
            (self.folder / UNFINISHED).unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whatever happens meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
