"""Profile files: `profile.json` in a folder, one model per folder. Imports no torch."""

import os
from pathlib import Path

from varuna.codec import decode
from varuna.types import Profile

NAME = "profile.json"
UNFINISHED = "profile.unfinished.json"
"""Measurements so far, until they are enough for a profile."""


def read_profile(folder: str | os.PathLike[str]) -> Profile:
    """Read the profile that `Profiler` wrote to a folder; the path of the file itself works too."""
    path = Path(folder)
    path = path / NAME if path.is_dir() else path
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        reason = "(make one with varuna.Profiler, or give the folder that has it)"
        if path.with_name(UNFINISHED).exists():
            reason = "yet, only an unfinished one (run the Profiler again: it continues where it stopped)"
        raise FileNotFoundError(f"there is no profile {path} {reason}") from None
    return decode(text, Profile, str(path))
