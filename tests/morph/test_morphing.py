"""Real jobs continue after faults with the losses of an undisturbed job."""

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.morph.jobs import STEPS, TRAIN, Job, check
from varuna.chaos.hosts.lab import ROOT, Lab


def test_losses_do_not_change_when_machines_join_and_leave_and_processes_are_killed(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V39, V42, V47"""
    with Job(tmp_path, machines=2) as job:
        job.wait_for_steps(12)
        os.kill(job.worker(1), signal.SIGKILL)
        job.wait_for("generation: 2: 1 stage x 2 replicas")
        assert "rank 0 (stage 0, replica 0) was killed by SIGKILL" in job.lines[-1]
        assert re.search(r"from step [1-9]", job.lines[-1])

        job.wait_for_steps(3)
        job.write_list(1, 2, 3)
        assert "on 127.0.0.1, 127.0.0.2, 127.0.0.3" in job.wait_for("generation: 3: 1 stage x 3 replicas")

        (tmp_path / "machines").write_text("127.0.0.1\n127.0.0.1\n127.0.0.2\n127.0.0.3\n-oProxyCommand=no\n")
        job.wait_for("machines, line 5: '-oProxyCommand=no' is not a machine address")
        (tmp_path / "machines").write_text("")
        job.wait_for("list ignored")
        job.wait_for_steps(3)

        job.write_list(2, 3)
        job.wait_for("generation: 4: 1 stage x 2 replicas")
        assert "on 127.0.0.2, 127.0.0.3" in job.lines[-1]
        job.wait_for_steps(3)

        os.kill(job.agent(3), signal.SIGKILL)
        assert "on 127.0.0.2" in job.wait_for("generation: 5: 1 stage x 1 replica")
        assert "on 127.0.0.2, 127.0.0.3" in job.wait_for("generation: 6: 1 stage x 2 replicas")
        job.wait_for_steps(3)

        assert job.varuna("drain", "127.0.0.2").returncode == 0
        assert "on 127.0.0.3" in job.wait_for("generation: 7: 1 stage x 1 replica")
        job.wait_for_steps(3)
        assert "step" in job.varuna("logs", "0").stdout
        assert "not a machine of this job" in job.varuna("drain", "10.0.0.1").stderr
        check(job, reference)
        report = check_ledger(job)
        assert report["generations"] == 7 and report["interruptions"] == 6


def test_a_silent_agent_is_replaced_and_a_killed_manager_is_resumed(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V42, V45, V47"""
    with Job(tmp_path, machines=2, stages=2) as job:
        job.wait_for_steps(12)
        os.kill(job.agent(2), signal.SIGSTOP)
        job.wait_for("machine lost: 127.0.0.2: no heartbeat")
        job.wait_for("no plan: 127.0.0.1: too few devices")
        job.wait_for("generation: 2: 2 stages x 1 replica")
        job.wait_for_steps(3)

        job.process.kill()
        job.process.wait()
        log = next(tmp_path.glob("varuna_logs/*/generation_2/rank_0.out"))
        seen = log.read_text().count("\n")
        while log.read_text().count("\n") < seen + 10:  # it trains on without its manager
            pass
        job.restart("--resume")
        job.wait_for("agent joined: 127.0.0.2, with generation 2")
        job.wait_for_steps(3)
        assert job.status()["generation"] == 2
        assert job.status()["ledger"]["generations"] == 2
        check(job, reference)
        check_ledger(job)


def check_ledger(job: Job) -> dict[str, Any]:
    """PRO-4: the causes of a real job add up to what was paid, and every step counts once."""
    (folder,) = job.folder.glob("varuna_logs/*")
    page = job.folder / "ledger.html"
    answer = job.varuna("ledger", str(folder), "--price", "1.5", "--html", str(page), "--json")
    report: dict[str, Any] = json.loads(answer.stdout)
    assert report["useful_seconds"] + sum(report["lost_seconds"].values()) == pytest.approx(
        report["paid_seconds"]
    )
    assert report["steps"] == STEPS and report["useful_seconds"] > 0 < report["lost_seconds"]["morphing"]
    assert report["money"]["paid"] == pytest.approx(report["paid_seconds"] / 3600 * 1.5)
    assert page.read_text().startswith("<!DOCTYPE html>") and "http-equiv" not in page.read_text()
    assert "machine-seconds trained" in job.text
    return report


def test_losses_do_not_change_when_ssh_machines_are_cut_off_return_and_die(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V29, V42, V47: separate hosts; a machine that returns joins after its old workers are killed."""
    (tmp_path / "varuna").symlink_to(ROOT / "varuna")  # other machines find the library in the code's folder
    with Lab(3) as lab:
        with Job(
            tmp_path,
            machines=3,
            addresses=[host.address for host in lab.hosts],
            options=["--ssh", shlex.join(lab.ssh)],
        ) as job:
            one, two, three = job.addresses
            job.wait_for_steps(12)
            lab.hosts[1].cut()
            assert f"on {one}, {three}" in job.wait_for("generation: 2: 1 stage x 2 replicas")
            assert f"{two} was lost: no heartbeat" in job.lines[-1]
            job.wait_for_steps(3)
            lab.hosts[1].reconnect()
            assert f"on {one}, {three}, {two}" in job.wait_for("generation: 3: 1 stage x 3 replicas")
            job.wait_for_steps(3)
            lab.hosts[0].kill()
            assert f"on {three}, {two}" in job.wait_for("generation: 4: 1 stage x 2 replicas")
            job.wait_for_steps(3)
            check(job, reference)
        assert not [found for host in lab.hosts for found in host.processes().values() if "varuna" in found]


def test_a_worker_can_report_a_notice_for_its_machine(tmp_path: Path, reference: dict[int, float]) -> None:
    """V41"""
    script = """
def misbehave(step):
    if os.environ["VARUNA_MACHINE"] == "127.0.0.2":
        from varuna import notify_manager_preempt
        notify_manager_preempt(seconds=30, reason="the cloud wants it back")
"""
    with Job(tmp_path, machines=2, script=script + TRAIN) as job:
        job.wait_for("notice: 127.0.0.2: the cloud wants it back")
        assert "on 127.0.0.1" in job.wait_for("generation: 2: 1 stage x 1 replica")
        check(job, reference)


def test_a_job_that_crashes_repeatedly_ends_with_the_reason(tmp_path: Path) -> None:
    """V33, V43"""
    script = """
def misbehave(step):
    if step == 5:
        raise ZeroDivisionError("the fifth step is cursed")
"""
    with Job(tmp_path, machines=1, script=script + TRAIN) as job:
        assert job.finish() == 1
        last = job.text.split("varuna: failed: 4 times without progress in between")[1]
        assert 'raise ZeroDivisionError("the fifth step is cursed")' in last
        told = [line for line in job.text.splitlines() if line.startswith("Traceback")]
        assert len(told) == 2  # by the first generation that ended so, and by the verdict
        assert "is over: failed: 4 times without progress" in job.varuna("status").stderr
        assert len(job.generations) == 4
        assert job.processes_left() == []


def test_a_stopped_job_saves_and_resumes_from_there(tmp_path: Path, reference: dict[int, float]) -> None:
    """V31, V40"""
    with Job(tmp_path, machines=1) as job:
        job.wait_for_steps(3)
        assert job.varuna("stop").returncode == 0
        job.wait_for("SIGUSR1: a checkpoint was saved")
        job.wait_for("varuna: stopped: `varuna stop`")
        assert job.process.wait() == 0
        job.restart("--resume")
        job.wait_for_change("generation: 1: ")
        check(job, reference)


OWN_HANDLER = """
import os, signal
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_pre_hook

def handler(*_):
    print("handler at", model.iteration)
    model.on_demand_checkpoint("store")
    raise SystemExit(0)

signal.signal(signal.SIGUSR1, handler)

def signal_once(moment, iteration, rank):
    if (model.iteration, os.environ["RANK"]) == (iteration, rank) and not Path(moment).exists():
        Path(moment).touch()
        os.kill(os.getpid(), signal.SIGUSR1)

def delay(op, microbatch):
    if op == "B" and microbatch == 1:
        signal_once("backward", 4, "1")
    return 0.0

register_optimizer_step_pre_hook(lambda *_: signal_once("optimizer", 9, "0"))
EVERY = 0
"""


def test_a_handler_of_the_script_runs_at_the_same_step_on_all_machines(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """V40: the signal comes during a backward pass, then during an optimizer step."""
    with Job(tmp_path, machines=2, stages=2, script=OWN_HANDLER + TRAIN) as job:
        for moment, step in [("backward", 5), ("optimizer", 10)]:
            job.wait_for("varuna: stopped: all workers saved and exited after SIGUSR1")
            assert (tmp_path / moment).exists() and job.process.wait() == 0
            (logs,) = sorted(tmp_path.glob("varuna_logs/*/generation_1"))[-1:]
            found = {re.findall(r"handler at (\d+)", log.read_text())[-1] for log in logs.glob("*.out")}
            assert found == {str(step)}
            job.restart("--resume")
            job.wait_for_change("generation: 1: ")
        check(job, reference)
