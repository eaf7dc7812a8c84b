"""Opens a job's folder on the manager's machine, and leads the job from there, or takes it up again.

~/.varuna/jobs/<hash of the code's folder>/
    lock            held while a manager leads the job
    manager.json    where it listens, and the job's secret: for this user alone
    journal.jsonl   what a manager that is started again must know
"""

import fcntl
import hashlib
import os
import socket
from pathlib import Path

import msgspec

from varuna.codec import decode, encode
from varuna.environment import VarunaEnvironment
from varuna.files import write_atomic


class Contact(msgspec.Struct, frozen=True):
    """How `varuna status` and its kin find the manager."""

    job: str
    pid: int
    address: str
    port: int
    secret: str
    log_dir: str


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
        """Until this process ends; the kernel lets go of it however that is."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ValueError(
                "a manager leads the job of this folder already (`varuna status` shows it, `varuna stop` "
                "ends it; for a second job use another --code_dir)"
            ) from None
        return fd

    def read_contact(self) -> Contact | None:
        try:
            return decode(self.contact.read_bytes(), Contact, str(self.contact))
        except FileNotFoundError:
            return None

    def write_contact(self, contact: Contact) -> None:
        write_atomic(self.contact, encode(contact), mode=0o600)


def listen(address: str, port: int) -> socket.socket:
    """On the port of before, where agents look for a manager that was started again, if it is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for wanted in (port, 0):
        try:
            return socket.create_server((address, wanted), family=family, backlog=1024)
        except OSError:
            if not wanted:
                raise ValueError(
                    f"this machine cannot listen on {address} (name an address of its own: --manager_ip)"
                ) from None
    raise AssertionError("one of the two returns or raises")


def saved_path(home: Path, code_dir: Path) -> Path:
    """One file for each folder of code: its last job."""
    return home / "jobs" / f"{hashlib.sha256(str(code_dir.resolve()).encode()).hexdigest()[:16]}.json"


def home_folder() -> Path:
    return Path(VarunaEnvironment.read(os.environ).home or Path.home() / ".varuna")
