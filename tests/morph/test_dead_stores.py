"""A store that dies is replaced before it is needed; a job whose store dies restarts and says why.

And a job that hangs before its first step is found.
"""

import os
import signal
import time
from pathlib import Path

from tests.morph.jobs import Job, check
from tests.morph.test_decide import World, begun
from varuna.morph import events
from varuna.morph.state import WorkerProgress


def stores(job: Job) -> list[int]:
    """Return the processes of the job's stores, the oldest first."""
    found = []
    for pid in job.processes():
        try:
            if Path(f"/proc/{pid}/comm").read_text() == "varuna-store\n":
                found.append(pid)
        except OSError:
            pass
    return sorted(found)


def wait_for_stores(job: Job, count: int, without: int) -> None:
    deadline = time.monotonic() + 60
    while len(found := stores(job)) < count or without in found:
        assert time.monotonic() < deadline, job.text
        time.sleep(0.05)


def test_a_dead_spare_store_is_replaced(tmp_path: Path, reference: dict[int, float]) -> None:
    """REL-2: on the old code nobody noticed, and the next generation waited for 30 minutes."""
    with Job(tmp_path, machines=1) as job:
        job.wait_for_steps(5)
        running, spare = stores(job)
        os.kill(spare, signal.SIGKILL)
        job.wait_for("store ended: 127.0.0.1: its process was killed by SIGKILL; it opens another one")
        wait_for_stores(job, 2, without=spare)
        job.write_list(1, 2)
        job.wait_for_change("generation: 2: 1 stage x 2 replicas")
        job.wait_for_steps(2)
        assert running not in stores(job)
        check(job, reference)
        assert len(job.generations) == 2


def test_a_job_whose_store_dies_saves_and_restarts(tmp_path: Path, reference: dict[int, float]) -> None:
    """REL-2: no step is lost, because training needs the store only to share errors."""
    with Job(tmp_path, machines=2, stages=2) as job:
        job.wait_for_steps(5)
        running = max(stores(job), key=lambda pid: len(os.listdir(f"/proc/{pid}/fd")))  # has connections
        os.kill(running, signal.SIGKILL)
        job.wait_for_change("generation: 2: ")
        assert "the store of the job on 127.0.0.1 has ended: its process was killed by SIGKILL" in job.text
        check(job, reference)


def end_store(world: World, machine: str, port: int) -> None:
    trains = world.iteration > 0
    world.happens(events.StoreEnded(machine, world.agents[machine], port, "it was killed", trains))
    world.carry_out()


def test_the_next_generation_waits_for_the_new_store_of_a_machine() -> None:
    """REL-2"""
    world = begun("a", "b")
    assert world.state.members["a"].store_port == 2000
    end_store(world, "a", 2000)
    world.happens(events.MachineListRead(("a", "b", "c")))
    world.passes(3, steps=1)
    assert len(world.generations) == 1
    world.happens(events.StoreReady("a", world.agents["a"], 2001))
    world.passes(1, steps=1)
    assert world.launched[1].generation.master_port == 2001


def test_the_end_of_the_jobs_store_restarts_it_without_a_loss_once_it_trains() -> None:
    """REL-2: a store of another machine or of an older generation does not matter."""
    world = begun("a", "b")
    port = world.launched[0].generation.master_port
    end_store(world, "b", port)
    end_store(world, "a", port + 7)
    assert len(world.generations) == 1
    end_store(world, "a", port)
    assert world.launched[1].why == "the store of the job on a has ended: it was killed"
    assert world.state.losses == 0


def test_a_store_that_ends_before_the_first_step_again_and_again_ends_the_job() -> None:
    """REL-2: with growing waits in between, and the reason."""
    world = World(("a",))
    world.passes(1)
    for number in range(4):
        assert world.verdict is None
        world.happens(events.StoreReady("a", world.agents["a"], 3000 + number))
        end_store(world, "a", world.launched[-1].generation.master_port)
        world.passes(10)
    assert world.verdict is not None
    reason = "4 times without progress in between; last, the store of the job on a has ended: it was killed"
    assert world.verdict.verdict.reason == reason


def test_a_hang_between_wrapping_the_model_and_the_first_step_is_found() -> None:
    """REL-2: but nothing is known about a script that has not wrapped a model."""
    world = World(("a",))
    world.passes(4000)
    assert len(world.generations) == 1

    def tick(activity: int) -> None:
        progress = (WorkerProgress(0, activity=activity),)
        world.happens(events.Tick({"a": (world.agents["a"], world.workers.get("a"), progress)}))
        world.carry_out()

    for activity in range(1, 4):  # it captures, plans and compiles, each for 29 minutes
        for _ in range(29 * 60):
            world.now += 1
            tick(activity)
    assert len(world.generations) == 1
    for _ in range(120):
        world.now += 1
        tick(3)
    assert world.generations == [("a",), ("a",)]
    assert world.launched[1].why == "no progress for 1801 s before the first step"
