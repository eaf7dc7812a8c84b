"""Describes a place without checkpoints, and checks at the start that a store can be written."""

import os

from varuna.checkpoint.store.store import OWN_PREFIX, local_folder, open_store
from varuna.errors import list_some

PROBE = f"{OWN_PREFIX}write-probe"


def describe_place(url: str) -> str:
    """Return what a store without a complete checkpoint contains."""
    folder = local_folder(url)
    if folder is not None and not os.path.exists(folder):
        return "the folder does not exist"
    if folder is not None and not os.path.isdir(folder):
        return "it is a file, not a folder"
    try:
        names = [entry.name for entry in open_store(url).list()]
    except OSError as error:
        return f"it cannot be read: {error}"
    return f"it has no complete checkpoint, only {list_some(names)}" if names else "it is empty"


def why_not_writable(url: str) -> str | None:
    """Return the error of a small write to the store; None if it succeeds."""
    try:
        store = open_store(url)
        store.replace(PROBE, b"")
        store.remove(PROBE)
    except OSError as error:
        return str(error) or type(error).__name__
    return None
