"""Workers meet in the job's store, also if their script calls torch.distributed by itself."""

import inspect
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tests.launch.jobs import launcher, log, run, start
from tests.ports import free_port

MEET = """
import os, sys
assert "torch" not in sys.modules
import torch, torch.distributed as dist
dist.init_process_group("gloo" METHOD)
group = dist.new_group([0, 1])
total = torch.ones(1)
dist.all_reduce(total, group=group)
store = dist.distributed_c10d._get_default_store()
while hasattr(store, "underlying_store"):
    store = store.underlying_store
print(f"{dist.get_rank()} of {dist.get_world_size()}: {type(store).__name__} {total.item():g}")
dist.destroy_process_group()
"""
TCP = """, init_method="tcp://%s:%s" % (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]),
    rank=int(os.environ["RANK"]), world_size=2"""


@pytest.mark.parametrize("method", ["", ', init_method="env://"', TCP])
@pytest.mark.parametrize("options", [[], ["port"]])
def test_a_script_that_calls_torch_itself_uses_the_jobs_store(
    tmp_path: Path, method: str, options: list[str]
) -> None:
    """SEC-2: no worker of a job uses a store that strangers can reach."""
    command = launcher(tmp_path, devices=2, stages=2)
    if options:
        command[3:3] = ["--master-port", str(free_port())]
    done = run(command, tmp_path, MEET.replace("METHOD", method))
    assert done.returncode == 0, done.stderr
    assert "0 of 2: JobStore 2" in log(tmp_path, "rank_0.out")
    assert "1 of 2: JobStore 2" in log(tmp_path, "rank_1.out")


def test_a_script_without_torch_does_not_import_it(tmp_path: Path) -> None:
    script = "import sys; assert not {'torch', 'cryptography'} & set(sys.modules)"
    assert run(launcher(tmp_path, devices=1, stages=1), tmp_path, script).returncode == 0


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = launcher(tmp_path, devices=1, stages=1)
        command[3:3] = ["--master-port", port]
        done = run(command, tmp_path, "")
    assert done.returncode == 1
    assert f"127.0.0.1:{port}: Address already in use (see --master-port)" in done.stderr


def on_machine(folder: Path, number: int, port: int, *options: str) -> subprocess.Popen[str]:
    command = launcher(folder, devices=1, stages=2)
    command[3:3] = ["--nservers", "2", "--node-rank", str(number), "--master-port", str(port), *options]
    return start(command, folder)


def run_on_two_machines(folder: Path, *options: str) -> tuple[list[str], str]:
    """Run one launcher for each of two machines; return the outputs of the ranks, and all errors."""
    (folder / "script.py").write_text(MEET.replace("METHOD", ""))
    port = free_port()
    with on_machine(folder, 0, port, *options) as first, on_machine(folder, 1, port, *options) as second:
        said = [job.communicate()[0] for job in (first, second)]
        errors = "".join(path.read_text() for path in folder.glob("logs/*/*.err"))
        assert [job.returncode for job in (first, second)] == [0, 0], (said, errors)
    return [path.read_text() for path in sorted(folder.glob("logs/*/rank_?.out"))], "".join(said)


def test_machines_started_by_hand_meet_with_a_job_key(tmp_path: Path) -> None:
    """SEC-2: `--job-key` is the same file on each machine."""
    key = tmp_path / "key"
    made = run([*launcher(tmp_path, devices=1, stages=1)[:3], "--make-job-key", str(key)], tmp_path)
    assert made.returncode == 0, made.stderr
    assert key.stat().st_mode & 0o777 == 0o600
    outputs, _ = run_on_two_machines(tmp_path, "--job-key", str(key))
    assert sorted(outputs) == ["0 of 2: JobStore 2\n", "1 of 2: JobStore 2\n"]


def test_machines_started_by_hand_without_a_key_are_warned(tmp_path: Path) -> None:
    """SEC-2: what is open is said, with the way out."""
    (tmp_path / "script.py").write_text(MEET.replace("METHOD", ""))
    port = free_port()
    with on_machine(tmp_path, 0, port) as first, on_machine(tmp_path, 1, port) as second:
        errors = [job.communicate()[1] for job in (first, second)]
    assert all("warning: this job has no --job-key" in error for error in errors)
    outputs = [path.read_text() for path in sorted(tmp_path.glob("logs/*/rank_?.out"))]
    assert sorted(outputs) == ["0 of 2: TCPStore 2\n", "1 of 2: TCPStore 2\n"]


def test_a_bad_key_is_refused_with_the_way_out(tmp_path: Path) -> None:
    key = tmp_path / "key"
    command = launcher(tmp_path, devices=1, stages=1)
    command[3:3] = ["--job-key", str(key)]
    missing = run(command, tmp_path, "")
    assert missing.returncode == 2 and "--make-job-key" in missing.stderr
    key.write_text("{}")
    key.chmod(0o644)
    readable = run(command, tmp_path, "")
    assert readable.returncode == 2 and f"chmod 600 {key}" in readable.stderr
    key.chmod(0o600)
    empty = run(command, tmp_path, "")
    assert empty.returncode == 2 and str(key) in empty.stderr


def test_torchs_rendezvous_has_what_workers_replace() -> None:
    """`use_job_store` of varuna/morph/run/worker.py relies on private names of torch."""
    supported = f"written for torch 2.11 to 2.13, installed is torch {torch.__version__}"
    module = sys.modules["torch.distributed.rendezvous"]
    handlers = getattr(module, "_rendezvous_handlers", {})
    assert {"env", "tcp"} <= set(handlers), supported
    for scheme in ("env", "tcp"):
        assert list(inspect.signature(handlers[scheme]).parameters) == ["url", "timeout", "kwargs"], supported
        assert inspect.isgeneratorfunction(handlers[scheme]), supported
    for name in ("get", "set", "add", "wait", "check", "compare_set", "clone", "append", "multi_get"):
        assert hasattr(torch.distributed.Store, name), supported


KILL_THE_STORE = """
import os, signal, time
from pathlib import Path

def kill_store():
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            if name == "varuna-store" and rest.split()[1] == str(os.getppid()):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:
            pass

if os.environ["RANK"] == "1":
    while not Path("waits").exists():
        time.sleep(0.01)
    kill_store()
    signal.pause()
import torch.distributed as dist
Path("waits").touch()
dist.init_process_group("gloo")
"""


def test_a_rank_that_waits_for_others_fails_at_once_when_the_store_ends(tmp_path: Path) -> None:
    """REL-2: the store's process is watched, and the error names its address."""
    done = run(launcher(tmp_path, devices=2, stages=2), tmp_path, KILL_THE_STORE)
    assert done.returncode == 1
    assert "the job's store has ended: its process was killed by SIGKILL" in done.stderr
    assert "StoreLost: the job's store at 127.0.0.1:" in done.stderr
