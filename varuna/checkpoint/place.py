"""Describes a place without checkpoints, so that a wrong path is noticed at the start."""

import os

from varuna.checkpoint.store.store import local_folder, open_store
from varuna.errors import list_some


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
