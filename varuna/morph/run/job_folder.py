"""The folder of a job on the manager's machine: lock, contact file and journal.

~/.varuna/jobs/<hash of code_dir>/
    lock            held while a manager runs the job
    manager.json    address of the manager and credential of the job, readable only by this user
    journal.jsonl   records for a restarted manager
"""

import fcntl
import hashlib
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import make_private_folder, open_private, write_atomic
from varuna.secure.credential import JobCredential


class ManagerContact(msgspec.Struct, frozen=True):
    """Address of the manager, for commands such as `varuna status`."""

    job: str
    pid: int
    address: str
    port: int
    credential: JobCredential
    log_dir: str
    host: str = ""  # machine that the process is on; "": unknown


class JobFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def contact(self) -> Path:
        return self.path / "manager.json"

    def lock(self) -> int:
        """Lock the folder until this process ends, however it ends."""
        make_private_folder(self.path)
        fd = open_private(self.path / "lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ValueError(
                "a manager already runs a job from this folder (`varuna status` shows it, `varuna stop` "
                "ends it; use another --code-dir for a second job)"
            ) from None
        return fd

    def read_contact(self) -> ManagerContact | None:
        """Return where the manager is, or None if no job was started. Raise ValueError for an old file."""
        try:
            data = self.contact.read_bytes()
        except FileNotFoundError:
            return None
        if "secret" in decode(data, dict[str, Any], str(self.contact)):
            raise ValueError(
                f"an earlier version of varuna, with another protocol, wrote {self.contact} "
                "(end its job with that version, then delete the file)"
            )
        return decode(data, ManagerContact, str(self.contact))

    def write_contact(self, contact: ManagerContact) -> None:
        write_atomic(self.contact, encode(contact), private=True)


def listen(address: str, port: int) -> socket.socket:
    """Listen on `port`, where agents look for a restarted manager, or on any port if it is taken."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in (port, 0):
        with suppress(OSError):
            return socket.create_server((address, wanted), family=family, backlog=1024)
    raise ValueError(f"cannot listen on {address} (set --manager-ip to an address of this machine)")


def saved_path(home: Path, code_dir: Path) -> Path:
    """Return the file that keeps the arguments of the last job from a code folder."""
    return home / "jobs" / f"{hashlib.sha256(str(code_dir.resolve()).encode()).hexdigest()[:16]}.json"


def home_folder() -> Path:
    return Path(VarunaEnvironment.read(os.environ).home or Path.home() / ".varuna")
