"""File of an unfinished profile: every result is written as soon as it is measured."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode, encode
from varuna.files import write_atomic
from varuna.measure.draft import ProfileDraft, ProfileSubject, new_draft, reopen_profile, resume_draft
from varuna.plan.profile_file import NAME, UNFINISHED, read_profile


def open_draft(folder: Path, subject: ProfileSubject, *, extends: bool) -> ProfileDraft:
    """Return the draft to continue, or a new one; raise ValueError if the folder is about something else."""
    finished, unfinished = folder / NAME, folder / UNFINISHED
    if extends and finished.exists():
        return reopen_profile(read_profile(finished), subject, str(finished))
    if extends and unfinished.exists():
        draft = decode(unfinished.read_bytes(), ProfileDraft, str(unfinished))
        return resume_draft(draft, subject, str(unfinished))
    return new_draft(subject)


@dataclass
class DraftFile:
    """The current draft; each change is written to the folder, if any: a killed job loses one result."""

    draft: ProfileDraft
    folder: Path | None

    def add(self, draft: ProfileDraft | None = None, **fields: Any) -> None:
        """Replace the draft, or some of its fields."""
        self.draft = msgspec.structs.replace(draft or self.draft, **fields)
        if self.folder is None:
            return
        profile = self.draft.profile()
        if profile is None:
            write_atomic(self.folder / UNFINISHED, encode(self.draft))
        else:
            write_atomic(self.folder / NAME, encode(profile))
            (self.folder / UNFINISHED).unlink(missing_ok=True)
