"""Checks of folders and of the store of checkpoints."""

import secrets
from collections.abc import Iterator

from varuna.cli.doctor.finding import Finding
from varuna.environment import variable_name
from varuna.morph.run.job_folder import home_folder


def check_folders() -> Iterator[Finding]:
    folder = home_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".doctor-{secrets.token_hex(4)}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        remedy = f"set {variable_name('home')} to a folder that you can write"
        yield Finding("home", "problem", f"{folder}: {error.strerror}", remedy)
    else:
        yield Finding("home", "ok", str(folder))


def check_store(url: str) -> Iterator[Finding]:
    """Write, read and remove a small file."""
    from varuna.checkpoint.store.store import open_store

    name, data = f"doctor-{secrets.token_hex(4)}", secrets.token_bytes(16)
    try:
        opened = open_store(url)
        opened.replace(name, data)
        same = opened.read(name) == data
        opened.remove(name)
    except (OSError, ValueError, ImportError) as error:
        yield Finding("store", "problem", str(error), "choose a folder or bucket that all machines can write")
        return
    if same:
        yield Finding("store", "ok", f"{url} can be written and read")
    else:
        yield Finding("store", "problem", f"{url} returns other bytes than were written", "use another store")
