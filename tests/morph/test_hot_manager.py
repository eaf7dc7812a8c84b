"""The manager side of morphs in place, with real managers and agents, and workers that only obey orders."""

import os
import signal
from pathlib import Path

from tests.morph.jobs import PATIENT, Job

OBEY = """
import os, signal, time
from pathlib import Path
from varuna.morph.run.order_page import apply_environment, open_orders
from varuna.morph.run.progress_page import open_progress
from varuna.morph.state import MorphParts

progress, orders = open_progress(), open_orders()
progress.hot(True)
joins, step = "VARUNA_JOINS" in os.environ, 0
if joins and Path("bad_joiner").exists():
    Path("bad_joiner").unlink()  # the next one does not fail
    raise SystemExit("this joiner fails")

def save(*_):
    progress.on_demand(True)
    raise SystemExit

signal.signal(signal.SIGUSR1, save)
progress.waits(joins)
print("pid", os.getpid(), flush=True)
while joins or not Path("hurry").exists():
    if orders.is_pending:
        order = orders.take()
        assert (order.rank is not None and order.previous[order.rank] is None) == joins
        if order.rank is None:
            break
        joins = False
        apply_environment(order, os.environ)
        progress.morphed(order.generation, MorphParts(), seconds=0.01, num_bytes=2**20, iteration=step)
        rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
        assert "VARUNA_JOINS" not in os.environ and rank == str(order.rank)
        assert os.environ["VARUNA_GENERATION"] == str(order.generation)
        print("pid", os.getpid(), "is rank", rank, "of", size, "on", os.environ["LOCAL_RANK"], flush=True)
    if not joins:
        step += 1
        progress.enter()
        progress.leave(step, 0.001)
    time.sleep(0.01)
"""


def test_workers_keep_their_processes_while_machines_join_and_leave(tmp_path: Path) -> None:
    """HOT-1, HOT-2, HOT-5: also their logs, under the new ranks; no worker is saved or restarted."""
    with Job(tmp_path, machines=2, script=OBEY, manager=PATIENT) as job:
        job.wait_for("[rank 0] pid")
        (tmp_path / "bad_joiner").touch()
        job.write_list(1, 2, 3)
        assert "nothing happens to the other workers" in job.wait_for("join failed: 127.0.0.3: retry in 2 s")
        job.wait_for("this joiner fails")
        first, second = job.worker(1), job.worker(2)
        job.wait_for("1 stage x 3 replicas")
        assert "pause 0.010 s, 3.15 MB moved" in job.wait_for("morphed: "), job.text
        third = job.worker(3)
        assert (job.worker(1), job.worker(2)) == (first, second)
        job.write_list(2, 3)
        job.wait_for_all(f"[rank 0] pid {second} is rank 0 of 2 on 0", "morphed: ")
        assert (job.worker(2), job.worker(3)) == (second, third)
        log = job.varuna("logs", "1")
        assert f"pid {third}\n" in log.stdout, log
        assert f"pid {third} is rank 1 of 2 on 0" in log.stdout
        assert job.finish() == 0, job.text
    assert "saving" not in job.text and len(job.generations) == 3
    assert job.processes_left() == []


def test_the_other_workers_of_a_machine_go_on_when_one_of_them_is_killed(tmp_path: Path) -> None:
    """HOT-1, HOT-3: also on the only machine. They keep their devices. The third returns by a restart."""
    options = ("--gpus-per-node", "3")
    with Job(tmp_path, machines=1, script=OBEY, options=options, manager=PATIENT) as job:
        job.wait_for("[rank 0] pid")
        job.wait_for_reports(12)
        first, second, third = (worker["pid"] for worker in job.machine(1)["workers"])
        os.kill(second, signal.SIGKILL)
        assert "was killed by SIGKILL" in job.wait_for("recovering: rank 1")
        *_, warm = job.wait_for_all(f"pid {first} is rank 0 of 2 on 0", "morphed: ", "warm restart: ")
        assert "127.0.0.1 gets 3 workers, and has 2" in warm
        job.wait_for("1 stage x 3 replicas")
        assert job.finish() == 0, job.text
    assert "generation ended" not in job.text
    logs = [path.read_text() for path in tmp_path.glob("varuna_logs/*/generation_*/rank_1.out")]
    assert any(f"pid {third} is rank 1 of 2 on 2" in log for log in logs), logs
