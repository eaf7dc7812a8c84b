"""A job is refused at its start if another job writes to its store, unless it takes the store over."""

import os
import signal
from pathlib import Path

import pytest

from tests.morph.jobs import TRAIN, Job

SAVES_NOTHING = "EVERY = 0\n"
NEVER = ["--save_every", "off"]
OFTEN = ["--save_every", "1"]


def start(folder: Path, store: Path, *options: str, prefix: str = "") -> Job:
    folder.mkdir()
    script = prefix + TRAIN.replace('model.resume("store")', f'model.resume("{store}")')
    script = script.replace('checkpoint("store"', f'checkpoint("{store}"')
    assert script.count(str(store)) == 2
    return Job(folder, machines=1, script=script, options=options)


def test_a_second_job_on_a_claimed_store_is_refused_at_its_start(tmp_path: Path) -> None:
    """The message names the other job, its host and process and the way out; the first job goes on."""
    store = tmp_path / "store"
    with start(tmp_path / "first", store, *NEVER, prefix=SAVES_NOTHING) as first:
        first.wait_for_steps(1)
        holder = first.worker(1)
        with start(tmp_path / "second", store) as second:
            assert second.finish() == 1
            assert f"this job does not start: rank 0 (stage 0, replica 0): {store}" in second.text
            other = f"job {first.contact().job} (host {os.uname().nodename}, pid {holder}, since "
            assert f"is claimed by {other}" in second.text
            assert "take the store over with --force" in second.text
            assert second.losses == {}
        first.wait_for_steps(1)


def test_a_store_of_a_killed_job_is_free_for_the_next_job(tmp_path: Path) -> None:
    """Also if the next job resumes from checkpoints of the killed one, under its name."""
    store = tmp_path / "store"
    with start(tmp_path / "first", store) as first:
        first.wait_for_steps(12)
        for pid in first.processes():
            os.kill(pid, signal.SIGKILL)
        first.process.wait()
        with start(tmp_path / "second", store) as second:
            second.wait_for_steps(1)
            assert second.last_step >= 10
            os.kill(second.worker(1), signal.SIGKILL)  # the next generation is not refused either
            second.wait_for("generation: 2:")
            second.wait_for_steps(1)


def test_force_takes_the_store_over_and_the_other_job_ends_at_its_next_save(tmp_path: Path) -> None:
    """The other job does not train on without saving."""
    store = tmp_path / "store"
    with start(tmp_path / "first", store, *OFTEN, prefix=SAVES_NOTHING) as first:
        first.wait_for_steps(1)
        with start(tmp_path / "second", store, *OFTEN, "--force", prefix=SAVES_NOTHING) as second:
            second.wait_for_steps(1)
            line = first.wait_for("generation ended: 1")
            assert "StoreOfOtherJob" in line and second.contact().job in line
            assert first.finish() == 1 and "generation: 2" not in first.text
            second.wait_for_steps(1)


@pytest.mark.parametrize("forced", [False, True])
def test_a_store_of_the_environment_is_claimed_at_the_start(forced: bool, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with start(tmp_path / "first", store, *NEVER, prefix=SAVES_NOTHING) as first:
        first.wait_for_steps(1)
        folder = tmp_path / "second"
        folder.mkdir()
        (folder / "varuna.env").write_text(f"VARUNA_CHECKPOINT_STORE={store}\n")
        script = TRAIN.replace('model.resume("store")', "")
        options = ["--no_morphing", *(["--force"] if forced else [])]
        with Job(folder, machines=1, script=script, options=options) as second:
            if forced:
                second.wait_for_steps(1)
            else:
                assert second.finish() == 1 and "is claimed by job" in second.text and second.losses == {}
