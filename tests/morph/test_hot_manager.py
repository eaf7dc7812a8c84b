"""The manager side of morphs in place, with real managers and agents, and workers that only obey orders."""

from pathlib import Path

from tests.morph.jobs import Job

OBEY = """
import os, time
from pathlib import Path
from varuna.morph.run.order_page import apply_environment, open_orders
from varuna.morph.run.progress_page import open_progress

progress, orders = open_progress(), open_orders()
progress.hot(True)
joins, step = "VARUNA_JOINS" in os.environ, 0
if joins and Path("bad_joiners").exists():
    raise SystemExit("this joiner fails")
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
        progress.morphed(order.generation, seconds=0.01, num_bytes=2**20)
        rank, size, number = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "VARUNA_GENERATION"))
        assert "VARUNA_JOINS" not in os.environ and rank == str(order.rank)
        print("pid", os.getpid(), "is rank", rank, "of", size, "in", number, flush=True)
    if not joins:
        step += 1
        progress.enter()
        progress.leave(step, 0.001)
    time.sleep(0.01)
"""


def test_workers_keep_their_processes_while_machines_join_and_leave(tmp_path: Path) -> None:
    """HOT-1, HOT-2, HOT-5: also their logs, under the new ranks; no worker is saved or restarted."""
    with Job(tmp_path, machines=2, script=OBEY) as job:
        job.wait_for("[rank 0] pid")
        (tmp_path / "bad_joiners").touch()
        job.write_list(1, 2, 3)
        assert "nothing happens to the other workers" in job.wait_for("join failed: 127.0.0.3: retry in 2 s")
        job.wait_for("this joiner fails")
        (tmp_path / "bad_joiners").unlink()
        first, second = job.worker(1), job.worker(2)
        job.wait_for("generation: 3: 1 stage x 3 replicas")
        assert "pause 0.010 s, 3.15 MB moved" in job.wait_for("morphed: 3: in place"), job.text
        third = job.worker(3)
        assert (job.worker(1), job.worker(2)) == (first, second)
        job.write_list(2, 3)
        line = job.wait_for("[rank 0] pid")
        assert line == f"[rank 0] pid {second} is rank 0 of 2 in 4"
        job.wait_for("morphed: 4: in place")
        assert (job.worker(2), job.worker(3)) == (second, third)
        log = job.varuna("logs", "1")
        assert f"pid {third}\n" in log.stdout, log
        assert f"pid {third} is rank 1 of 2 in 4" in log.stdout
        assert job.finish() == 0, job.text
    assert "saving" not in job.text and len(job.generations) == 3
    assert job.processes_left() == []
