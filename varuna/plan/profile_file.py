"""Where a profile lies: `profile.json` in its folder, one model to a folder. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from varuna.codec import decode
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
