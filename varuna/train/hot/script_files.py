"""Hashes the files of the user's code, so that a joiner with another version of one of them is refused."""

import contextlib
import os
import sys
import sysconfig
from pathlib import Path

from varuna.checkpoint.format.manifest import hash_of

INSTALLED = ("site-packages", "dist-packages")
"""Folders of packages that pip installs. Only the versions of torch and varuna are compared."""


def hash_script() -> str:
    """Return a hash of the script and of all modules that it has imported from its folder or the code folder.

    Call it when the model is wrapped: all ranks have imported the same modules then. The hash consists of
    paths, relative to these folders, and contents. "" if there is no script, as in an interactive session.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not script:
        return ""
    folders = [Path(script).absolute().parent, Path(script).resolve().parent]
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # the folder was removed
        folders.append(Path(os.getcwd()))
    for path in {Path(script).absolute(), *_imported_files()}:
        place = _relative_path(path, folders)
        if place is not None:
            with contextlib.suppress(OSError):  # a module that was made in memory
                found[place] = hash_of(path.read_bytes())
    return hash_of("\n".join(f"{place} {found[place]}" for place in sorted(found)).encode())


def _imported_files() -> set[Path]:
    """Return the source files of all modules but those of torch and of this library."""
    files = set()
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] not in ("torch", "varuna", "pyrannc") and isinstance(file, str):
            files.add(Path(file).absolute())
    return {file for file in files if file.suffix == ".py"}


def _relative_path(file: Path, folders: list[Path]) -> str | None:
    """Return the path of a file in the first folder that contains it; None if it is not the user's code."""
    if file.is_relative_to(sysconfig.get_path("stdlib")) or set(INSTALLED) & set(file.parts):
        return None
    for folder in folders:
        if file.is_relative_to(folder):
            place = file.relative_to(folder)
            hidden = any(part.startswith(".") for part in place.parts)  # .venv, .cache
            return None if hidden else place.as_posix()
    return None
