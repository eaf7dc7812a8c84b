"""Real jobs whose disks are full: nothing ends, nothing is lost, and space that is freed is used."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.morph.jobs import TRAIN, Job, check
from varuna.morph.protocol.orders import AgentOrders

SAVES_ON_REQUEST = "EVERY = 0\n"
"""A script that names its store, but does not save by itself."""


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system with this much space. Yield the file that fills it on demand."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder)], check=True)
    try:
        yield folder / "fill"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def fill_home(filler: Path) -> None:
    """Leave no space, not even in the last page of the journal: blank lines count for nothing."""
    (journal,) = filler.parent.glob("jobs/*/journal.jsonl")
    with journal.open("ab") as file:
        file.write(b"\n" * (-journal.stat().st_size % 4096))
    fill(filler)


def test_a_full_home_ends_neither_the_manager_nor_the_resumed_job(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """REL-3: the journal lacks the last generation, but its number is not used again."""
    with small_disk(tmp_path / "home", 256) as filler, Job(tmp_path, machines=2) as job:
        job.wait_for_steps(12)
        fill_home(filler)
        os.kill(job.worker(1), signal.SIGKILL)
        _, problem = job.wait_for_all("generation: 2: 1 stage x 2 replicas", "varuna: journal: ")
        assert "journal.jsonl cannot be written: No space left on device; the job continues" in problem
        job.wait_for_steps(3)
        assert "No space left on device" in job.status()["problems"]["journal"]
        assert "journal: " in job.varuna("status").stdout

        job.process.kill()
        job.process.wait()
        filler.unlink()
        job.restart("--resume")
        job.wait_for(": 1 stage x 2 replicas")  # if an agent is slow, after a generation of the other one
        number = len(numbers := [line.split(":")[1].strip() for line in job.generations])
        assert number >= 3 and numbers == [str(one + 1) for one in range(number)], "no number is used twice"
        job.wait_for_steps(3)
        fill_home(filler)
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for_all(f"generation: {number + 1}: 1 stage x 2 replicas", "varuna: journal: ")
        filler.unlink()
        job.wait_for("varuna: journal: solved")
        job.process.kill()
        job.process.wait()
        job.restart("--resume")
        job.wait_for(f"with generation {number + 1}")
        check(job, reference)


def test_a_full_store_does_not_cost_the_steps_since_the_last_save(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """REL-3: the change waits until the job can save."""
    script = SAVES_ON_REQUEST + TRAIN
    with (
        small_disk(tmp_path / "store", 2048) as filler,
        Job(tmp_path, machines=2, script=script, options=["--save_every", "off"]) as job,
    ):
        job.wait_for_steps(5)
        fill(filler)
        job.write_list(1)
        job.wait_for("varuna: change postponed: 127.0.0.2 leaves: the job cannot save: ")
        job.wait_for_steps(3)
        status = job.status()
        assert status["phase"] == "running" and "cannot save" in status["reason"]
        assert status["generation"] == 1
        filler.unlink()
        job.wait_for_change("generation: 2: 1 stage x 1 replica")
        check(job, reference)


NOISY = """
def misbehave(step):
    print("." * 5000)

EVERY = 0
"""


def test_a_full_disk_of_the_logs_does_not_end_the_script(tmp_path: Path) -> None:
    """REL-3: a single machine has nowhere else to go; output is lost until there is space again."""
    with (
        small_disk(tmp_path / "varuna_logs", 1024) as filler,
        Job(tmp_path, machines=1, script=NOISY + TRAIN) as job,
    ):
        job.wait_for_steps(3)
        fill(filler)
        before = job.status()["iteration"]
        while job.status()["iteration"] < before + 10:
            assert job.process.poll() is None
        filler.unlink()
        job.wait_for_steps(3)
        assert len(job.generations) == 1, "nothing restarted"


IMPATIENT = """
import functools
import varuna.morph.run.manager as manager
from varuna.cli.run import main
manager.AgentOrders = functools.partial(manager.AgentOrders, patience_seconds=3.0)
main()
"""


def test_training_goes_on_without_a_manager_for_a_time_and_then_no_process_is_left(tmp_path: Path) -> None:
    """REL-2, V45: a minute, as docs/launching.md, morphing.md and clusters.md say; here three seconds."""
    assert next(f.default for f in msgspec.structs.fields(AgentOrders) if f.name == "patience_seconds") == 60
    with Job(tmp_path, machines=2, manager=(sys.executable, "-c", IMPATIENT)) as job:
        job.wait_for_steps(5)
        job.process.kill()
        job.process.wait()
        log = next(tmp_path.glob("varuna_logs/*/generation_1/rank_0.out"))
        seen = log.read_text().count("\n")
        limit = time.monotonic() + 60
        while log.read_text().count("\n") < seen + 3:
            assert time.monotonic() < limit, "training does not go on"
        while job.processes():
            assert time.monotonic() < limit, job.processes()
            time.sleep(0.1)
