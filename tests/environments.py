"""Environments of their own for servers of the tests whose packages do not go with ours."""

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path


def environment(name: str, pinned: Path) -> Path:
    """The folder of the environment, with exactly the pinned packages in it, made if need be."""
    pins = pinned.read_text()
    in_venv = sys.prefix != sys.base_prefix
    key = hashlib.sha256(f"{sys.version}\n{pins}".encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / name if in_venv else Path(tempfile.gettempdir()) / f"varuna-{name}-{key}"
    stamp = folder / "pinned"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes may want it at once
        if not stamp.is_file() or stamp.read_text() != key:
            venv.create(folder, with_pip=False)
            pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
            there = ["--python", folder / "bin" / "python"]
            subprocess.run([*pip, *there, "install", "-q", "--no-deps", "-r", pinned], check=True)
        stamp.write_text(key)  # always, since make looks at its age
    return folder


if __name__ == "__main__":
    environment(sys.argv[1], Path(sys.argv[2]))
