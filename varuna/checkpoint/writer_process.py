"""The writer process: writes a snapshot of a checkpoint to its store while training continues.

A thread that writes, hashes and encrypts would take the interpreter lock from training. This process
runs at the lowest priority, does not import torch, and ends with its trainer.

    trainer  fills shared memory: the bytes of the file, each tensor at its span, then a SaveTask as JSON
             sends lines of JSON over a socket: StartSave, CancelSave; closing the socket ends the writer
    writer   answers over the same socket: SaveProgress, SaveWarning, then one of PartWritten,
             CheckpointCommitted and SaveFailed

Start it as `python -P -m varuna.checkpoint.writer_process TRAINER_PID MEMORY_FD`, with the socket as
its standard input.
"""

import ctypes
import mmap
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import msgspec

from varuna.checkpoint.format.manifest import Facts, Json, Manifest, PartManifest, decode_part, folder_of
from varuna.checkpoint.format.part import FileTensor, PartLayout
from varuna.checkpoint.save import commit, part_name, remove_old, remove_part, write_part
from varuna.checkpoint.store.claim import refuse_disowned
from varuna.checkpoint.store.store import Store, local_folder, open_store, retrying
from varuna.errors import CheckpointError, list_some
from varuna.processes import die_with_parent

REPORT_SECONDS = 0.5
"""Shortest time between two progress messages."""
POLL_SECONDS, REMOTE_POLL_SECONDS = (0.05, 1.0), (0.2, 2.0)
"""First and longest pause between two looks for the parts of other writers."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # number of a system call without a libc function
IOPRIO_WHO_PROCESS, IOPRIO_IDLE = 1, 3 << 13


class SaveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A part to save, without its tensors."""

    url: str
    retry_seconds: float
    facts: Facts
    writer: str
    trees: dict[str, Json]
    commits: bool  # this writer commits the checkpoint when all parts exist
    writers: Sequence[str]  # all writers of this checkpoint
    keep_last: int | None = None
    claim: str = ""  # token of the claim under which the checkpoint is committed
    patience_seconds: float = 600.0  # the committer fails if the others write nothing for this long


class SaveTask(msgspec.Struct, frozen=True):
    """Everything the writer needs for one save, except the bytes of the tensors."""

    order: SaveOrder
    specs: Sequence[FileTensor]
    layout: PartLayout


class StartSave(msgspec.Struct, frozen=True, tag=True):
    """The memory is filled. The task is at bytes [first, stop)."""

    first: int
    stop: int


class CancelSave(msgspec.Struct, frozen=True, tag=True):
    pass


class SaveProgress(msgspec.Struct, frozen=True, tag=True):
    activity: str


class SaveWarning(msgspec.Struct, frozen=True, tag=True):
    """A problem to log; the save continues."""

    text: str


class PartWritten(msgspec.Struct, frozen=True, tag=True):
    part: PartManifest


class CheckpointCommitted(msgspec.Struct, frozen=True, tag=True):
    manifest: Manifest


class SaveFailed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToWriter = StartSave | CancelSave
ToTrainer = SaveProgress | SaveWarning | PartWritten | CheckpointCommitted | SaveFailed


class SaveCancelled(Exception):
    """The trainer has cancelled this save."""


def main() -> None:
    trainer, memory = (int(argument) for argument in sys.argv[1:])
    die_with_parent(trainer)  # a forked child of the trainer may keep the socket open
    # Use only spare CPU and disk time. Threads that start later inherit this.
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if call := IOPRIO_SET.get(platform.machine()):
        ctypes.CDLL(None).syscall(call, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE)
    connection = TrainerConnection(socket.socket(fileno=sys.stdin.fileno()))
    saves: SimpleQueue[StartSave] = SimpleQueue()
    threading.Thread(target=connection.receive, args=(saves.put,), daemon=True).start()
    while True:
        connection.send(run_save(saves.get(), memory, connection))


class TrainerConnection:
    """The socket to the trainer."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._reported_at = 0.0
        self._cancelled = threading.Event()

    def receive(self, start: Callable[[StartSave], None]) -> None:
        with suppress(ConnectionError):
            for text in self._end.makefile("rb"):
                message: ToWriter = msgspec.json.decode(text, type=ToWriter)
                if isinstance(message, StartSave):
                    self._cancelled.clear()  # it was for the save before, which had just ended
                    start(message)
                else:
                    self._cancelled.set()
        os._exit(0)  # also during a save: the trainer has closed the socket

    def send(self, message: ToTrainer) -> None:
        self._end.sendall(msgspec.json.encode(message) + b"\n")

    def report(self, activity: str, *, at_once: bool = False) -> None:
        """Send the activity if a report is due. Raises SaveCancelled if the trainer has cancelled."""
        if self._cancelled.is_set():
            raise SaveCancelled
        now = time.monotonic()
        if at_once or now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self.send(SaveProgress(activity))

    def pause(self, seconds: float, activity: str) -> None:
        """Wait and keep reporting, so that the trainer does not see a stalled save."""
        stop = time.monotonic() + seconds
        while (left := stop - time.monotonic()) > 0:
            self.report(activity)
            self._cancelled.wait(min(left, REPORT_SECONDS))


def run_save(
    message: StartSave, memory: int, connection: TrainerConnection
) -> PartWritten | CheckpointCommitted | SaveFailed:
    try:
        view = memoryview(mmap.mmap(memory, message.stop, prot=mmap.PROT_READ))
        task = msgspec.json.decode(view[message.first : message.stop], type=SaveTask)
        return save(task, view, connection)
    except SaveCancelled:
        return SaveFailed("it was cancelled")
    except (OSError, ValueError, CheckpointError) as error:
        return SaveFailed(str(error))
    except Exception:  # a bug: the trainer logs the traceback
        return SaveFailed(traceback.format_exc())


def save(
    task: SaveTask, memory: memoryview, connection: TrainerConnection
) -> PartWritten | CheckpointCommitted:
    order, layout = task.order, task.layout

    def on_progress(position: int) -> None:
        connection.report(f"writing, sent {position / 1e6:.0f} of {layout.size / 1e6:.0f} MB")

    plain_store = open_store(order.url)
    store = retrying(
        plain_store,
        seconds=order.retry_seconds,
        on_wait=lambda text: connection.send(SaveWarning(text)),
        seed=os.getpid(),
        sleep=lambda seconds: connection.pause(seconds, "waiting to retry a failed store operation"),
    )
    try:
        connection.report("opening the store", at_once=True)
        part = write_part(
            store,
            order.facts,
            order.writer,
            task.specs,
            layout,
            lambda key: memory[slice(*layout.spans[key])],
            order.trees,
            on_progress=on_progress,
        )
        if not order.commits:
            return PartWritten(part)
        parts = [part, *wait_for_parts(order, store, connection)]
        connection.report("writing the manifest", at_once=True)
        refuse_disowned(store, order.claim)
    except Exception:
        with suppress(OSError):
            remove_part(plain_store, order.facts, order.writer)
        raise
    # After a failed commit the manifest may still be in the store, so the parts stay.
    manifest = commit(store, parts)
    remove_old_checkpoints(manifest, order.keep_last, store, connection)
    return CheckpointCommitted(manifest)


def wait_for_parts(order: SaveOrder, store: Store, connection: TrainerConnection) -> list[PartManifest]:
    """Return the parts of the other writers. Fails if the folder does not change for too long."""
    folder = folder_of(order.facts.step)
    documents = {
        writer: f"{part_name(order.facts, writer)}.json" for writer in order.writers if writer != order.writer
    }
    pause, longest = POLL_SECONDS if local_folder(order.url) else REMOTE_POLL_SECONDS
    seen: dict[str, int] = {}
    changed_at = time.monotonic()
    while True:
        current = {entry.name: entry.size for entry in store.list(folder)}
        missing = [writer for writer, document in documents.items() if document not in current]
        if not missing:
            break
        activity = f"waiting for the parts of {list_some(missing)}"
        if current != seen:
            connection.report(activity, at_once=not seen)
            seen, changed_at = current, time.monotonic()
        elif time.monotonic() - changed_at > order.patience_seconds:
            raise CheckpointError(
                f"the parts of {list_some(missing)} are missing: nothing was written for "
                f"{order.patience_seconds:g} s (check that these ranks run and write to the same store)"
            )
        connection.pause(pause, activity)
        pause = min(2 * pause, longest)
    places = [f"{folder}/{document}" for document in documents.values()]
    return [decode_part(store.read(place), f"{store.url}/{place}") for place in places]


def remove_old_checkpoints(
    manifest: Manifest, keep_last: int | None, store: Store, connection: TrainerConnection
) -> None:
    """Remove old checkpoints. The new one is complete, so a failure here is only a warning."""
    try:
        connection.report("removing old checkpoints", at_once=True)
        remove_old(store, manifest, keep_last=keep_last)
    except SaveCancelled:
        pass
    except OSError as error:
        connection.send(
            SaveWarning(f"checkpoint {manifest.facts.step} is saved, but old ones were not removed: {error}")
        )


if __name__ == "__main__":
    main()
