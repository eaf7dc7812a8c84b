"""A job keeps the secrets of its env file and its own key to itself, and its files to its user."""

import json
import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.morph.jobs import TRAIN, Job
from varuna.morph.protocol.messages import Welcome
from varuna.types import JobSpec

NOISY = """
import os, sys
from pathlib import Path

print("secret seen", "AWS_SECRET_ACCESS_KEY" in os.environ)


def misbehave(step):
    if os.environ["RANK"] == "0" and not Path("printed").exists():
        Path("printed").touch()
        sys.stdout.write("".join(f"line {number}\\n" for number in range(100_000)))
        sys.stderr.write("e" * 600_000 + "\\n")
        print("all printed")
    if os.environ["RANK"] == "0" and Path("crash").exists():
        Path("crash").unlink()
        raise RuntimeError("crash on request")
"""


class Relay:
    """Passes a TCP connection on to a port, and keeps all its bytes."""

    def __init__(self, port: int) -> None:
        self.data = b""
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                called = socket.create_connection(("127.0.0.1", self._port))
                for source, target in ((caller, called), (called, caller)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.data += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


RELAYED = """
import sys
from varuna.morph.run import manager
original = manager.AgentOrders
relay = sys.argv.pop(1)
manager.AgentOrders = lambda **fields: original(**{**fields, "manager": "127.0.0.1:" + open(relay).read()})
"""
"""A manager whose agents connect through a relay; the file has the relay's port."""


def mentions(secret: bytes, path: Path) -> bool:
    try:
        return secret in path.read_bytes()
    except OSError:
        return False  # gone meanwhile, or of the kernel


def open_to_others(folder: Path) -> list[str]:
    return [
        f"{path} {path.stat().st_mode & 0o777:o}"
        for path in [folder, *folder.rglob("*")]
        if path.stat().st_mode & 0o077
    ]


def test_secrets_stay_secret_and_files_private_and_logs_of_any_size_can_be_read(tmp_path: Path) -> None:
    """SEC-3, REL-5: through a crash, a change of machines, `status`, `logs` and the end; with umask 000."""
    secret = secrets.token_hex(20)
    (tmp_path / "secret.env").write_text(f"AWS_SECRET_ACCESS_KEY={secret}\n")
    umask = os.umask(0)
    try:
        with Job(tmp_path, machines=1, script=NOISY + TRAIN, options=("--env_file", "secret.env")) as job:
            job.wait_for("all printed")
            check_logs(job)
            job.write_list(1, 2)
            job.wait_for("generation: 2")
            job.wait_for_steps(2)
            (tmp_path / "crash").touch()
            job.wait_for("generation: 3")
            job.wait_for_steps(2)
            told = job.varuna("status").stdout + job.varuna("status", "--json").stdout
            assert "127.0.0.2" in told
            key = job.contact().credential.key.splitlines()[1]
            check_processes(job, secret=secret, key=key)
            assert job.finish() == 0, job.lines[-20:]
    finally:
        os.umask(umask)
    assert secret not in told + job.text and key not in told + job.text
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "secret.env"]
    assert not [path for path in files if mentions(secret.encode(), path)]
    assert [path.name for path in files if mentions(key.encode(), path)] == ["manager.json"]
    assert open_to_others(tmp_path / "home") == open_to_others(tmp_path / "varuna_logs") == []
    names = {path.name for path in (tmp_path / "varuna_logs").rglob("*")}
    assert {"events.jsonl", "agent_127.0.0.1.log", "rank_0.out", "rank_0.error.json"} <= names


def check_logs(job: Job) -> None:
    text = job.varuna("logs", "0", "--lines", "100000").stdout
    lines = text.splitlines()
    assert lines[0] == "==> rank_0.out of generation 1 <=="
    numbers = [line for line in lines if line.startswith("line ")]
    assert len(numbers) > 99_900 and numbers == [f"line {n}" for n in range(100_000)][-len(numbers) :]
    assert lines[100_001] == "==> rank_0.err of generation 1 <==" and "e" * 600_000 in lines
    short = json.loads(job.varuna("logs", "0", "--lines", "2", "--json").stdout)["text"].splitlines()
    assert short[0] == lines[0] and short[3] == lines[100_001]
    assert job.status()["losses"] == 0, "the agent or the manager was silent meanwhile"


def check_processes(job: Job, *, secret: str, key: str) -> None:
    """Only workers, and the fork server that they are forked from, have the variables of the env file."""
    processes = job.processes()
    assert any("varuna.morph.run.agent" in line for line in processes.values())
    for process in Path("/proc").glob("[0-9]*"):
        assert not mentions(secret.encode(), process / "cmdline")
        assert not mentions(key.encode(), process / "cmdline")
        assert not mentions(key.encode(), process / "environ")
        if mentions(secret.encode(), process / "environ"):
            assert "forkserver.py" in processes[int(process.name)]


def test_neither_the_environment_nor_the_key_crosses_the_network_in_the_clear(tmp_path: Path) -> None:
    """SEC-3: between the manager and its agents."""
    secret = secrets.token_hex(20)
    (tmp_path / "secret.env").write_text(f"AWS_SECRET_ACCESS_KEY={secret}\n")
    (tmp_path / "manager.py").write_text(RELAYED + "from varuna.cli.run import main\nmain()\n")
    (tmp_path / "hurry").touch()
    manager = (sys.executable, "manager.py", "relay")
    with Job(
        tmp_path, machines=1, script=NOISY + TRAIN, options=("--env_file", "secret.env"), manager=manager
    ) as job:
        job.wait_for("listening")
        relay = Relay(job.contact().port)
        (tmp_path / "port").write_text(str(relay.port))
        os.rename(tmp_path / "port", tmp_path / "relay")
        assert job.finish() == 0, job.lines[-20:]
        assert "secret seen True" in job.text
        key = job.contact().credential.key.splitlines()[1]
    relay.close()
    assert len(relay.data) > 1000, "the agent did not use the relay"
    for text in (secret, key, "AWS_SECRET_ACCESS_KEY", "AgentHello"):
        assert text.encode() not in relay.data


def test_values_that_are_printed_do_not_show_the_environment() -> None:
    """SEC-3: errors and tracebacks print messages."""
    spec = JobSpec(
        script="s", code_dir="", log_dir="", devices_per_machine=1, environment={"AWS_KEY": "hush"}
    )
    for value in (spec, Welcome({"AWS_KEY": "hush"})):
        assert "hush" not in f"{value!r} {value}" and "AWS_KEY" in repr(value)
