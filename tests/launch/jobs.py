"""Starts real jobs with tiny scripts.

A named pipe shows without waiting when processes have ended: each process of a job holds its writing end,
and the reader sees the end of the file when the last of them has ended.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

SHOW = """
import json, os, sys
from pathlib import Path
Path(f"seen_{os.environ['RANK']}.json").write_text(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))
print("out of rank", os.environ["RANK"])
print("err of rank", os.environ["RANK"], file=sys.stderr)
"""

HOLD = """
import os, signal, subprocess, sys
rank = os.environ["RANK"]
pipe = os.open(sys.argv[-1], os.O_WRONLY)
child = subprocess.Popen(["sleep", "1000"], pass_fds=[pipe])
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VARUNA_")}
    return {**kept, "PYTHONPATH": str(ROOT), "VARUNA_HOME": str(home / "home"), **more}


def launcher(folder: Path, *arguments: str, devices: int, stages: int, batch: int = 8) -> list[str]:
    (folder / "logs").mkdir(exist_ok=True)
    return [
        *[sys.executable, "-m", "varuna.launcher", "--log_dir", str(folder / "logs")],
        *["--ngpus_per_server", str(devices), "--nstages", str(stages)],
        *["--batch_size", str(batch), "--chunk_size", "2", "script.py", *arguments],
    ]


def run(command: list[str], folder: Path, script: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    return subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True)


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextmanager
def started(command: list[str], folder: Path, script: str) -> Iterator[subprocess.Popen[str]]:
    """Start a job in the background. End it with the test."""
    (folder / "script.py").write_text(script)
    job = start(command, folder)
    try:
        yield job
    finally:
        job.kill()
        job.communicate()


def log(folder: Path, name: str) -> str:
    (found,) = (folder / "logs").glob(f"*/{name}")
    return found.read_text()
