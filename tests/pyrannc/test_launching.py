"""How jobs start, over machines and without a launcher's help; and how they end when one rank does."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.ports import free_port
from tests.pyrannc.jobs import train_plainly
from tests.pyrannc.launched_script import COUNTS
from varuna.chaos.hosts.lab import Lab

ROOT = Path(__file__).parent.parent.parent
PATIENCE_SECONDS = 180

SILENT = """
import logging, os, signal, sys, threading
def seen():
    return (
        {number: signal.getsignal(number) for number in signal.valid_signals()}, sys.excepthook,
        {name: list(logging.getLogger(name).handlers) for name in (None, "pyrannc", "varuna")},
        threading.active_count(), sorted(os.listdir()), sorted(os.listdir(os.environ["HOME"])),
    )
import torch, torch.distributed as dist  # whose doings are not ours
before = seen()
import pyrannc
assert seen() == before, (before, seen())
assert not dist.is_initialized()
"""


def test_import_has_no_side_effects(tmp_path: Path) -> None:
    """R17: no process group, file, handler, hook or thread, though the variables of a job are there."""
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    environment = {**os.environ, **job, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SILENT]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_torchrun_over_two_machines_trains_as_one_process(tmp_path: Path) -> None:
    """R1, R17: two hosts with two ranks each, two stages, uneven batches; no process group in the script.

    Where the first host is, the process group knows, whatever the environment says later.
    """
    with Lab(2) as lab:
        jobs = []
        for number, host in enumerate(lab.hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
            torchrun += [f"--node-rank={number}", f"--master-addr={lab.hosts[0].address}"]
            script = [
                "--master-port=29511",
                "-m",
                "tests.pyrannc.launched_script",
                str(tmp_path),
                "train",
                "2",
            ]
            command = host.command([*torchrun, *script])
            jobs.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        for job in jobs:
            output, _ = job.communicate(timeout=PATIENCE_SECONDS)
            assert job.returncode == 0, output
    expected = train_plainly("WithLoss", counts=COUNTS)
    for rank in range(4):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert found["stages"] == [(0, 2), (1, 3)] and found["local"] != list(expected["state"])
        for part in ("state", "gradients"):
            for name, value in expected[part].items():
                torch.testing.assert_close(found[part][name], value, rtol=1e-9, atol=1e-11)


MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


@pytest.mark.parametrize(
    ("what", "stages", "family", "said"),
    [
        ("raise", 1, MPI, ["the samples of this rank are bad", "rank 1", "between two calls of the model"]),
        (
            "die",
            2,
            SLURM,
            [
                "pyrannc.process.RankLost: rank 1 (stage 1, replica 0) is lost",
                "forward: again\nstate_dict: again\n",
            ],
        ),
    ],
)
def test_without_a_launcher_all_ranks_end_when_one_fails(
    tmp_path: Path, what: str, stages: int, family: tuple[str, str], said: list[str]
) -> None:
    """R17: as mpirun and srun start them; an exception between two calls, a kill -9 within one.

    The call in which a rank is lost raises RankLost, and so does each later one.
    """
    port = str(free_port())
    jobs = []
    for rank in range(2):
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
            **{family[0]: str(rank), family[1]: "2"},
            **{"MASTER_PORT": port, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        }
        command = [sys.executable, "-m", "tests.pyrannc.launched_script", str(tmp_path), what, str(stages)]
        jobs.append(
            subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
            )
        )
    errors = [job.communicate(timeout=PATIENCE_SECONDS)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1 if what == "raise" else -9], errors
    for words in said:
        assert words in errors[0]
    for job in jobs:
        wait_for_the_end_of_the_group(job.pid)


def wait_for_the_end_of_the_group(leader: int) -> None:
    """Its helpers end when they notice that it has ended."""
    deadline = time.monotonic() + 20
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            time.sleep(0.05)
        raise AssertionError(f"processes of group {leader} live on")
