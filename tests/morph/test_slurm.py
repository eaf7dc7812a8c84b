"""Agents started by a real Slurm with two nodes on this machine."""

import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.morph.hosts.manager import StubManager
from tests.morph.hosts.slurm import SlurmCluster
from varuna.chaos.hosts.lab import ROOT
from varuna.morph.starters.slurm import SlurmAgent, SlurmStarter, find_ended

STUB = str(ROOT / "tests/morph/hosts/stub_agent.py")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(2) as cluster:
        yield cluster


@pytest.fixture
def manager() -> Iterator[StubManager]:
    with StubManager("127.0.0.1") as manager:
        yield manager


def make_starter(
    cluster: SlurmCluster, folder: Path, *, options: tuple[str, ...] = (), array_seconds: float = 0.1
) -> SlurmStarter:
    return SlurmStarter(
        shared_folder=folder,
        folder=str(folder),
        options=options,
        watch_seconds=0.1,
        array_seconds=array_seconds,
        agent=(STUB,),
        environment=cluster.environment,
    )


def start_both(cluster: SlurmCluster, folder: Path, manager: StubManager) -> list[SlurmAgent]:
    """Start agents like the manager: each in its own thread, which may be late on a busy machine."""
    starter = make_starter(cluster, folder, array_seconds=2.0)
    with ThreadPoolExecutor() as threads:
        return list(threads.map(starter.start, map(manager.orders, ["m1", "m2"])))


def wait_for_the_end(agent: SlurmAgent) -> str:
    while (end := agent.ended()) is None:
        threading.Event().wait(0.05)
    return end


def test_machines_that_start_together_are_one_array_of_one_node_jobs(
    cluster: SlurmCluster, manager: StubManager, tmp_path: Path
) -> None:
    agents = start_both(cluster, tmp_path, manager)
    arrays, tasks = zip(*(agent.job.split("_") for agent in agents), strict=True)
    assert arrays[0] == arrays[1] and sorted(tasks) == ["0", "1"]
    dialled_in = [manager.accept() for _ in agents]
    assert {agent.hello["machine"] for agent in dialled_in} == {"m1", "m2"}
    nodes = {agent.hello["environment"]["SLURM_JOB_NODELIST"] for agent in dialled_in}
    assert nodes == {"node1", "node2"}
    assert {agent.hello["cwd"] for agent in dialled_in} == {str(tmp_path)}
    assert [agent.ended() for agent in agents] == [None, None]
    cluster.run("scancel", "--batch", "--signal=TERM", *(agent.job for agent in agents))
    for each in dialled_in:  # as when a job's time runs out
        assert each.hear() == {"heard": "SIGTERM"}
    for agent in agents:
        agent.kill()
    for each in dialled_in:  # on a busy node, the SIGTERM of scancel may come before the SIGKILL
        assert all(line == {"heard": "SIGTERM"} for line in each.hear_until_gone())
    assert {wait_for_the_end(agent).split(": ")[0] for agent in agents} == {
        f"Slurm job {agent.job}" for agent in agents
    }
    assert not list(tmp_path.glob("orders-*"))


def test_the_secret_is_in_a_private_file_that_is_removed_once_it_is_read(
    cluster: SlurmCluster, manager: StubManager, tmp_path: Path
) -> None:
    """V46: squeue, scontrol, the script and the logs do not show it."""
    cluster.run("scontrol", "update", "nodename=node1,node2", "state=drain", "reason=test")
    starter = make_starter(cluster, tmp_path)
    agent = starter.start(manager.orders("m1"))
    (orders,) = tmp_path.glob("orders-*/0.json")
    assert stat.S_IMODE(orders.stat().st_mode) == 0o600
    assert stat.S_IMODE(orders.parent.stat().st_mode) == 0o700
    shown = cluster.run("scontrol", "show", "job", agent.job.split("_")[0])
    assert agent.ended() is None, "queued is not ended"
    cluster.run("scontrol", "update", "nodename=node1,node2", "state=resume")
    dialled_in = manager.accept()
    assert not orders.exists()
    shown += cluster.run("squeue", "--long") + cluster.run("scontrol", "show", "job")
    for path in tmp_path.rglob("*"):
        shown += path.read_text() if path.is_file() else ""
    assert manager.secret not in shown and "JobId=" in shown
    dialled_in.tell("say my last words")
    dialled_in.tell("exit 7")
    assert re.search(r"it failed .*my last words", wait_for_the_end(agent))


def test_killing_a_queued_job_keeps_its_array_and_removes_its_orders(
    cluster: SlurmCluster, manager: StubManager, tmp_path: Path
) -> None:
    cluster.run("scontrol", "update", "nodename=node1,node2", "state=drain", "reason=test")
    first, second = start_both(cluster, tmp_path, manager)
    first.kill()
    assert "no longer knows it" in wait_for_the_end(first) or "cancelled" in wait_for_the_end(first)
    assert len(list(tmp_path.glob("orders-*/*.json"))) == 1
    cluster.run("scontrol", "update", "nodename=node1,node2", "state=resume")
    assert manager.accept().hello["machine"] == "m2"
    second.kill()
    wait_for_the_end(second)


def test_a_lost_node_is_reported_and_its_machine_is_submitted_again(
    cluster: SlurmCluster, manager: StubManager, tmp_path: Path
) -> None:
    """V42: as a new job, because Slurm delays requeued jobs by two minutes."""
    starter = make_starter(cluster, tmp_path)
    agent = starter.start(manager.orders("m1"))
    dialled_in = manager.accept()
    node = dialled_in.hello["environment"]["SLURM_JOB_NODELIST"]
    cluster.kill(node)
    dialled_in.wait_until_gone()
    cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")
    assert "its node was lost" in wait_for_the_end(agent)
    again = starter.start(manager.orders("m1"))
    assert again.job != agent.job
    other = manager.accept().hello["environment"]["SLURM_JOB_NODELIST"]
    assert {node, other} == {"node1", "node2"}
    again.kill()
    wait_for_the_end(again)
    cluster.boot(node)
    cluster.run("scontrol", "update", f"nodename={node}", "state=resume")


SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print("workers:", int(total), flush=True)
dist.destroy_process_group()
"""


def test_a_whole_job_runs_on_slurm(cluster: SlurmCluster, tmp_path: Path) -> None:
    """Only the starter differs from other machines; no job stays in the queue."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "machines").write_text("alpha\nbeta\n")
    options = {
        "starter": "slurm",
        "manager_ip": "127.0.0.1",
        "machine_list": "machines",
        "gpus_per_node": "1",
        "batch_size": "4",
        "nstages": "2",
        "chunk_size": "2",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    run = subprocess.run(
        [sys.executable, "-m", "varuna.run_varuna", *flags, "train.py"],
        cwd=tmp_path,
        env={**cluster.environment, "PYTHONPATH": str(ROOT), "VARUNA_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "workers: 2" in run.stdout
    while cluster.run("squeue", "-h"):
        threading.Event().wait(0.05)


def test_an_error_of_sbatch_is_reported(cluster: SlurmCluster, manager: StubManager, tmp_path: Path) -> None:
    starter = make_starter(cluster, tmp_path, options=("--partition=none",))
    with pytest.raises(ValueError, match=r"sbatch failed: .*invalid partition"):
        starter.start(manager.orders("m1"))
    assert not list(tmp_path.glob("orders-*"))


def test_a_missing_slurm_and_an_invalid_option_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"'x; rm' is not an sbatch option"):
        SlurmStarter(shared_folder=tmp_path, options=("x; rm",))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="Slurm is missing: sbatch, squeue, scancel not found"):
        SlurmStarter(shared_folder=tmp_path)


def test_only_final_states_count_as_ended() -> None:
    listing = "1_0|PENDING|Resources\n1_1|RUNNING|None\n1_2|NODE_FAIL|None\n1_3|FAILED|NonZeroExitCode\n"
    listing += "1_4|COMPLETING|None\n1_5|PREEMPTED|None\n1_6|CONFIGURING|None\n"
    assert find_ended([f"1_{task}" for task in range(8)], listing) == {
        "1_2": "its node was lost",
        "1_3": "it failed (NonZeroExitCode)",
        "1_5": "it was preempted",
        "1_7": "Slurm no longer knows it",
    }
