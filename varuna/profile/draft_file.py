"""The file of an unfinished profile: everything measured so far, saved after each measurement."""

from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode, encode
from varuna.files import write_atomic
from varuna.measure.draft import Draft, Subject, new_draft, reopened, resumed
from varuna.plan.profile_file import NAME, UNFINISHED, read_profile


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
            write_atomic(self.folder / UNFINISHED, encode(self.draft))
        else:
            write_atomic(self.folder / NAME, encode(profile))
            (self.folder / UNFINISHED).unlink(missing_ok=True)
