"""Real jobs whose disks are full: nothing ends, nothing is lost, and space that is freed is used."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.morph.jobs import TRAIN, Job, check

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


def test_a_full_home_ends_neither_the_manager_nor_the_resumed_job(
    tmp_path: Path, reference: dict[int, float]
) -> None:
    """REL-3: the journal lacks the last generation, but its number is not used again."""
    with small_disk(tmp_path / "home", 256) as filler, Job(tmp_path, machines=2) as job:
        job.wait_for_steps(12)
        fill(filler)
        os.kill(job.worker(1), signal.SIGKILL)
        job.wait_for("generation: 2: 1 stage x 2 replicas")
        job.wait_for("varuna: journal: ")
        assert "journal.jsonl cannot be written: No space left on device; the job continues" in job.lines[-1]
        job.wait_for_steps(3)
        assert "No space left on device" in job.status()["problems"]["journal"]
        assert "journal: " in job.varuna("status").stdout

        job.process.kill()
        job.process.wait()
        filler.unlink()
        job.restart("--resume")
        job.wait_for("generation: 3: 1 stage x 2 replicas")
        job.wait_for_steps(3)
        fill(filler)
        os.kill(job.worker(2), signal.SIGKILL)
        job.wait_for("generation: 4: 1 stage x 2 replicas")
        job.wait_for("varuna: journal: ")
        filler.unlink()
        job.wait_for("varuna: journal: solved")
        job.process.kill()
        job.process.wait()
        job.restart("--resume")
        job.wait_for("with generation 4")
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
