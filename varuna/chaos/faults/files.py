"""Faults of files: full disks, a damaged checkpoint, a journal that lost its end."""

import os
from contextlib import suppress
from pathlib import Path

from varuna.chaos.injector import FaultSkipped, Injector, as_host, fill
from varuna.chaos.job import JobStuck, within_patience
from varuna.checkpoint.format.manifest import Manifest
from varuna.checkpoint.load import all_checkpoints
from varuna.checkpoint.store.store import local_folder, open_store

WAIT_SECONDS = 30.0
"""Time limit for a second checkpoint."""


def fill_disk(run: Injector) -> None:
    """The machine cannot run workers; the job continues without it until the disk is free."""
    (machine,) = run.at_work()
    host, logs = as_host(machine), run.log_dir
    run.happens("a full disk for the logs, then kill -9 of the worker of", machine)
    host.mount(logs, 4096)
    fill(host.path(logs) / "fill")
    run.outlive([machine], lambda: run.kill_worker(machine), repair=lambda: host.unmount(logs))


def flip_checkpoint(run: Injector) -> None:
    """One bit changes in the newest checkpoint; then a worker is killed."""
    (machine,) = run.at_work()
    place, newest = _newest_checkpoint(run)
    key, entry = run.random.choice(sorted(newest.tensors.items()))
    run.happens(f"a flipped bit in {key} of checkpoint {newest.facts.step}, then kill -9 of", machine)
    run.flipped.add(newest.facts.step)
    with suppress(FileNotFoundError):  # a newer one has replaced it
        _flip(place / f"varuna_ckpt_{newest.facts.step}" / entry.file, entry.first)
    run.kill_worker(machine)
    run.recovers()


def _newest_checkpoint(run: Injector) -> tuple[Path, Manifest]:
    """Return the store and its newest checkpoint; wait for a second one, which a restart then loads."""
    try:
        for _ in within_patience("fewer than two checkpoints", seconds=WAIT_SECONDS, pause_seconds=0.05):
            place = run.job.status().store
            folder = local_folder(place) if place else None
            if folder is None:
                continue
            found = [one.manifest for one in all_checkpoints(open_store(place)) if not one.problem]
            whole = [manifest for manifest in found if manifest is not None]
            if len(whole) >= 2:
                return Path(folder), whole[-1]
    except JobStuck:
        raise FaultSkipped("the job has not two checkpoints in a folder of this machine") from None
    raise AssertionError("patience ends before the loop does")


def cut_journal(run: Injector) -> None:
    """The end of the journal is lost while the manager is down."""
    run.at_work()
    (journal,) = run.job.home.glob("jobs/*/journal.jsonl")
    run.happens("kill -9 of the manager, and a journal that lost its end")
    run.job.kill_manager()
    size = journal.stat().st_size
    left = run.random.randrange(size // 2, size)
    os.truncate(journal, left)
    run.history[-1].what += f" ({left} of {size} bytes are left)"
    run.resume_manager()


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
