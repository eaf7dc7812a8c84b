"""Real workers: their input, the report of a failure, and that all end with the job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.launch.jobs import HOLD, ROOT, SHOW, launcher, log, run, started


def seen(folder: Path, rank: int) -> tuple[list[str], dict[str, str], str]:
    arguments, environment, cwd = json.loads((folder / f"seen_{rank}.json").read_text())
    return arguments, environment, cwd


def test_a_script_without_flags_gets_environment_variables_and_each_worker_has_a_log(
    tmp_path: Path,
) -> None:
    """V29, V30, V32, V34"""
    job = run(launcher(tmp_path, "--lr", "0.1", devices=3, stages=2, batch=5), tmp_path, SHOW)
    assert job.returncode == 0, job.stderr
    assert "2 of 3 devices are used; idle: machine 0: device 2" in job.stdout
    assert "finished: every worker ended normally" in job.stdout
    assert "[rank 0] out of rank 0" in job.stdout
    assert "out of rank 1" not in job.stdout
    for rank in (0, 1):
        arguments, environment, cwd = seen(tmp_path, rank)
        assert (arguments, cwd) == (["--lr", "0.1"], str(tmp_path))
        assert environment["VARUNA_STAGE_TO_RANK_MAP"] == "0;1;"
        assert environment["OMP_NUM_THREADS"] == "1"
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert "VARUNA_RESUME_STEP" not in environment
        assert log(tmp_path, f"rank_{rank}.out") == f"out of rank {rank}\n"
        assert log(tmp_path, f"rank_{rank}.err") == f"err of rank {rank}\n"


STRICT = """
import argparse
parser = argparse.ArgumentParser()
for flag in ("--rank", "--local_rank", "--chunk_size", "--batch-size", "--resume_step", "--lr"):
    parser.add_argument(flag)
parser.add_argument("--stage_to_rank_map", required=True)
parser.parse_args()
"""


def test_a_script_with_the_flags_gets_them_before_its_own_arguments(tmp_path: Path) -> None:
    """V30"""
    command = launcher(tmp_path, "--lr", "0.1", devices=2, stages=1, batch=5)
    command[3:3] = ["--resume_step", "7"]
    job = run(command, tmp_path, STRICT + SHOW)
    assert job.returncode == 0, job.stderr
    for rank in (0, 1):
        assert seen(tmp_path, rank)[0] == [
            f"--rank={rank}",
            f"--local_rank={rank}",
            "--stage_to_rank_map=0,1;",
            "--chunk_size=2",
            f"--batch-size={3 - rank}",
            "--resume_step=7",
            "--lr",
            "0.1",
        ]


GATHER = """
import torch.distributed as dist
dist.init_process_group("gloo")
ranks = [None] * dist.get_world_size()
dist.all_gather_object(ranks, dist.get_rank())
print("gathered", ranks)
dist.destroy_process_group()
"""


def test_torch_finds_its_peers_from_the_environment(tmp_path: Path) -> None:
    """V30"""
    job = run(launcher(tmp_path, devices=2, stages=2), tmp_path, GATHER)
    assert "[rank 0] gathered [0, 1]" in job.stdout, job.stderr


# ---------------------------------------------------------------- failing

SECOND_HAND = """
import os
from pathlib import Path
from varuna.errors import PeerLost
def deep():
    raise ValueError("bad sample")
mine = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
if os.environ["RANK"] == "0":
    while not Path("rank_1_started").exists():
        pass
    raise PeerLost("rank 1 is gone")
Path("rank_1_started").touch()
while not mine.with_name("rank_0.error.json").exists():
    pass
deep()
"""


def test_the_original_traceback_is_shown_although_another_rank_failed_before(tmp_path: Path) -> None:
    """V33"""
    job = run(launcher(tmp_path, devices=2, stages=2), tmp_path, SECOND_HAND)
    assert job.returncode == 1
    told = job.stderr[job.stderr.index("varuna: failed:") :]
    assert told.startswith("varuna: failed: rank 1 (stage 1, replica 0) raised ValueError: bad sample")
    assert 'script.py", line 6, in deep' in told
    assert "PeerLost" not in told
    assert "worker.py" not in told


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    """V33"""
    script = "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\nsignal.pause()"
    job = run(launcher(tmp_path, devices=2, stages=2), tmp_path, script)
    assert job.returncode == 1
    assert "failed: rank 1 (stage 1, replica 0) was killed by SIGKILL" in job.stderr


def test_an_exit_code_is_shown_with_the_last_lines(tmp_path: Path) -> None:
    """V33"""
    job = run(launcher(tmp_path, devices=1, stages=1), tmp_path, "import sys\nsys.exit('no data here')")
    assert job.returncode == 1
    assert "rank 0 (stage 0, replica 0) exited with code 1, without a Python exception" in job.stderr
    assert job.stderr.count("no data here") == 2  # as it came, and in the reason


# ---------------------------------------------------------------- processes end


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def wait_until_ready(reader: BinaryIO, workers: int) -> None:
    assert [reader.readline() for _ in range(workers)] == [b"ready\n"] * workers


READY = "os.write(pipe, b'ready\\n')\n"
BOTH_READY = """
open(f"ready_{rank}", "w").close()
while not os.path.exists("ready_0") or not os.path.exists("ready_1"):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_and_their_children_end_with_the_launcher(
    tmp_path: Path, pipe: Path, number: signal.Signals
) -> None:
    """V33"""
    command = launcher(tmp_path, str(pipe), devices=2, stages=2)
    with started(command, tmp_path, HOLD + READY + "signal.pause()") as job, pipe.open("rb") as reader:
        wait_until_ready(reader, workers=2)
        job.send_signal(number)
        assert reader.read() == b""  # the end: nobody holds the pipe any more
        job.communicate()
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)


def test_when_the_fork_server_is_killed_the_job_fails_and_no_process_is_left(
    tmp_path: Path, pipe: Path
) -> None:
    """V33"""
    command = launcher(tmp_path, str(pipe), devices=2, stages=2)
    with started(command, tmp_path, HOLD + READY + "signal.pause()") as job, pipe.open("rb") as reader:
        wait_until_ready(reader, workers=2)
        (fork_server,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(fork_server), signal.SIGKILL)
        assert reader.read() == b""
        _, err = job.communicate()
    assert job.returncode == 1 and "was killed by SIGKILL" in err


@pytest.mark.parametrize(
    ("last", "code"), [("raise ValueError", 1), ("sys.exit(0)", 0)], ids=["failing", "finishing"]
)
def test_children_of_a_worker_end_with_it(tmp_path: Path, pipe: Path, last: str, code: int) -> None:
    """V33, also if a worker ignores SIGTERM."""
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if code else ""
    ends = f"if rank == '1' or not {code}: {last}\nsignal.pause()"
    script = HOLD + stubborn + READY + BOTH_READY + ends
    command = launcher(tmp_path, str(pipe), devices=2, stages=2)
    with started(command, tmp_path, script) as job, pipe.open("rb") as reader:
        assert reader.read() == b"ready\nready\n"
        job.communicate()
    assert job.returncode == code


ON_USR1 = """
def handler(signum, frame):
    os.write(pipe, b"child lives\\n" if child.poll() is None else b"child died\\n")
    sys.exit(0)
signal.signal(signal.SIGUSR1, handler)
"""


def test_usr1_reaches_the_workers_but_not_their_children(tmp_path: Path, pipe: Path) -> None:
    """V40, the launcher's part: the script's own handler runs, and children get no signal."""
    command = launcher(tmp_path, str(pipe), devices=2, stages=2)
    script = HOLD + ON_USR1 + READY + "signal.pause()"
    with started(command, tmp_path, script) as job, pipe.open("rb") as reader:
        wait_until_ready(reader, workers=2)
        job.send_signal(signal.SIGUSR1)
        assert reader.read() == b"child lives\n" * 2
        out, _ = job.communicate()
    assert (job.returncode, "finished: every worker" in out) == (0, True)


def test_a_job_under_nohup_outlives_its_terminal(tmp_path: Path, pipe: Path) -> None:
    command = ["nohup", *launcher(tmp_path, str(pipe), devices=1, stages=1)]
    script = HOLD + ON_USR1 + READY + "signal.pause()"
    with started(command, tmp_path, script) as job, pipe.open("rb") as reader:
        wait_until_ready(reader, workers=1)
        job.send_signal(signal.SIGHUP)  # the lower number is handled first
        job.send_signal(signal.SIGUSR1)
        assert reader.read() == b"child lives\n"
        job.communicate()
    assert job.returncode == 0


def test_a_process_ends_at_once_if_its_parent_has_ended() -> None:
    """V33: the parent died after it started the process, and before the process called the kernel."""
    not_the_parent = "1" if os.getpid() != 1 else "2"
    program = f"from varuna.processes import die_with_parent; die_with_parent({not_the_parent}); print('up')"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (process.returncode, process.stdout) == (-signal.SIGKILL, b"")
