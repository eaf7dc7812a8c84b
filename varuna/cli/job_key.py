"""Key files of jobs that are started by hand on several machines: the job's credential as JSON."""

import os
import stat
from pathlib import Path

import msgspec

from varuna.codec import decode
from varuna.secure.credential import JobCredential, make_credential


def make_job_key(path: str) -> None:
    """Write a new key that only the user can read. Raise ValueError if the file exists."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ValueError(f"--make-job-key {path}: the file exists (remove it to make another key)") from None
    with os.fdopen(file, "wb") as stream:
        stream.write(msgspec.json.encode(make_credential("launcher")) + b"\n")


def read_job_key(path: str) -> JobCredential:
    """Read a key. Raise ValueError with the way to make one, or if others can read the file."""
    try:
        mode = stat.S_IMODE(os.stat(path).st_mode)
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"--job-key {path} does not exist (make it with `python -m varuna.launcher --make-job-key "
            f"{path}` on one machine, and copy it to the others)"
        ) from None
    if mode & 0o077:
        raise ValueError(f"--job-key {path} can be read by other users (run `chmod 600 {path}`)")
    credential = decode(content, JobCredential, f"--job-key {path}")
    try:
        credential.client_context()
    except (OSError, ValueError) as error:
        raise ValueError(f"--job-key {path} holds no usable certificate and key: {error}") from None
    return credential
