"""Carries a snapshot of a checkpoint to its store: a process of its own, so that training goes on.

Writing, hashing and encrypting in a thread would take the interpreter's lock from the training; a
process at the lowest priority takes only what is left over. It imports no torch, and it never
outlives its trainer.

    trainer ──► shared memory: the file's bytes, each tensor at its span; behind them a Task, as JSON
            ──► socket, a line of JSON each: Go, GiveUp; its end is the courier's
    courier ──► the same socket: Progress and Trouble, then Written, Committed or Failed

Started as `python -P -m varuna.checkpoint.writer_process TRAINER_PID MEMORY_FD`, with the socket as
its input.
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
from typing import Any

import msgspec

from varuna.checkpoint.format.manifest import Facts, Json, Manifest, Part, decode_part, folder_of
from varuna.checkpoint.format.part import Layout, Spec
from varuna.checkpoint.save import abandon, commit, part_name, tidy, write_part
from varuna.checkpoint.store.claim import refuse_disowned
from varuna.checkpoint.store.store import Store, local_folder, open_store, retrying
from varuna.errors import CheckpointError, some
from varuna.processes import die_with_parent

REPORT_SECONDS = 0.5
"""Progress is told at most so often."""
POLL_SECONDS, REMOTE_POLL_SECONDS = (0.05, 1.0), (0.2, 2.0)
"""How often to look for other writers' parts: at first, and in the long run."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # the number of a system call that libc has no name for
IOPRIO_WHO_PROCESS, IOPRIO_IDLE = 1, 3 << 13


# ---------------------------------------------------------------- what the two tell each other


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be saved where, and by whom, but for the tensors."""

    url: str
    options: dict[str, Any] = {}  # of the store
    retry_seconds: float
    facts: Facts
    writer: str
    trees: dict[str, Json]
    commits: bool  # one of the writers does, when all parts are there
    writers: Sequence[str]  # all that write a part of this checkpoint
    keep_last: int | None = None
    patience_seconds: float = 600.0  # a committer gives up when nothing comes from the others for so long


class Task(msgspec.Struct, frozen=True):
    """All that the courier needs to know of a save."""

    order: Order
    specs: Sequence[Spec]
    layout: Layout


class Go(msgspec.Struct, frozen=True, tag=True):
    """The memory is filled: carry it. The task stands in it from `first` to `stop`."""

    first: int
    stop: int


class GiveUp(msgspec.Struct, frozen=True, tag=True):
    """The save under way is not wanted any more."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What the courier does at this moment."""

    doing: str


class Trouble(msgspec.Struct, frozen=True, tag=True):
    """Something that the user should know, and that ends nothing."""

    what: str


class Written(msgspec.Struct, frozen=True, tag=True):
    part: Part


class Committed(msgspec.Struct, frozen=True, tag=True):
    manifest: Manifest


class Failed(msgspec.Struct, frozen=True, tag=True):
    reason: str


ToCourier = Go | GiveUp
ToTrainer = Progress | Trouble | Written | Committed | Failed


class GivenUp(Exception):
    """The trainer does not want this save any more."""


# ---------------------------------------------------------------- the process


def main() -> None:
    trainer, memory = (int(argument) for argument in sys.argv[1:])
    die_with_parent(trainer)  # a child that it forked may keep the socket open
    take_what_is_left_over()
    line = Line(socket.socket(fileno=sys.stdin.fileno()))
    orders: SimpleQueue[Go] = SimpleQueue()
    threading.Thread(target=line.listen, args=(orders.put,), daemon=True).start()
    while True:
        line.send(carry_out(orders.get(), memory, line))


def take_what_is_left_over() -> None:
    """Of the processor and of the disk. Threads that are started later inherit it."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if platform.machine() in IOPRIO_SET:
        call = IOPRIO_SET[platform.machine()]
        ctypes.CDLL(None).syscall(call, IOPRIO_WHO_PROCESS, 0, IOPRIO_IDLE)


class Line:
    """The socket to the trainer."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._told = 0.0
        self._given_up = threading.Event()

    def listen(self, go: Callable[[Go], None]) -> None:
        with suppress(ConnectionError):
            for text in self._end.makefile("rb"):
                message: ToCourier = msgspec.json.decode(text, type=ToCourier)
                if isinstance(message, Go):
                    self._given_up.clear()  # that was the save before, which had just ended
                    go(message)
                else:
                    self._given_up.set()
        os._exit(0)  # whatever is under way: the trainer has let go of it

    def send(self, message: ToTrainer) -> None:
        self._end.sendall(msgspec.json.encode(message) + b"\n")

    def tell(self, doing: str, *, at_once: bool = False) -> None:
        """Now and then; and here ends a save that is not wanted any more."""
        if self._given_up.is_set():
            raise GivenUp
        now = time.monotonic()
        if at_once or now - self._told >= REPORT_SECONDS:
            self._told = now
            self.send(Progress(doing))

    def pause(self, seconds: float, doing: str) -> None:
        """A wait that is meant to be: it is told of while it lasts, and so is no stall."""
        stop = time.monotonic() + seconds
        while (left := stop - time.monotonic()) > 0:
            self.tell(doing)
            self._given_up.wait(min(left, REPORT_SECONDS))


# ---------------------------------------------------------------- one save


def carry_out(go: Go, memory: int, line: Line) -> Written | Committed | Failed:
    try:
        view = memoryview(mmap.mmap(memory, go.stop, prot=mmap.PROT_READ))
        task = msgspec.json.decode(view[go.first : go.stop], type=Task)
        return carry(task, view, line)
    except GivenUp:
        return Failed("it was given up")
    except (OSError, ValueError, CheckpointError) as error:
        return Failed(str(error))
    except Exception:  # one of ours: the trainer's log is where it will be looked for
        return Failed(traceback.format_exc())


def carry(task: Task, memory: memoryview, line: Line) -> Written | Committed:
    order = task.order
    plain_store = open_store(order.url, options=order.options)
    store = retrying(
        plain_store,
        seconds=order.retry_seconds,
        on_wait=lambda what: line.send(Trouble(what)),
        seed=os.getpid(),
        sleep=lambda seconds: line.pause(seconds, "waiting for the store, which fails"),
    )
    try:
        part = write(task, memory, store, line)
        if not order.commits:
            return Written(part)
        parts = [part, *wait_for_parts(order, store, line)]
        line.tell("writing the manifest", at_once=True)
        refuse_disowned(store)
    except Exception:
        with suppress(OSError):
            abandon(plain_store, order.facts, order.writer)
        raise
    # From here on the manifest may be in the store, whatever is reported: the parts that it names stay.
    manifest = commit(store, parts)
    clear_away(manifest, order.keep_last, store, line)
    return Committed(manifest)


def write(task: Task, memory: memoryview, store: Store, line: Line) -> Part:
    order, layout = task.order, task.layout

    def bytes_of(key: str) -> memoryview:
        first, stop = layout.spans[key]
        return memory[first:stop]

    def on_progress(position: int) -> None:
        line.tell(f"writing, {position / 1e6:.0f} of {layout.size / 1e6:.0f} MB are on their way")

    line.tell("opening the store", at_once=True)
    return write_part(
        store,
        order.facts,
        order.writer,
        task.specs,
        layout,
        bytes_of,
        order.trees,
        on_progress=on_progress,
    )


def wait_for_parts(order: Order, store: Store, line: Line) -> list[Part]:
    """The other writers' parts; gives up when nothing at all has come to the folder for too long."""
    folder = folder_of(order.facts.step)
    documents = {
        writer: f"{part_name(order.facts, writer)}.json" for writer in order.writers if writer != order.writer
    }
    pause, longest = POLL_SECONDS if local_folder(order.url) else REMOTE_POLL_SECONDS
    seen: dict[str, int] = {}
    changed_at = time.monotonic()
    while True:
        here = {entry.name: entry.size for entry in store.list(folder)}
        missing = [writer for writer, document in documents.items() if document not in here]
        if not missing:
            break
        doing = f"waiting for the parts of {some(missing)}"
        if here != seen:
            line.tell(doing, at_once=not seen)
            seen, changed_at = here, time.monotonic()
        elif time.monotonic() - changed_at > order.patience_seconds:
            raise CheckpointError(
                f"the parts of {some(missing)} are missing, nothing came for {order.patience_seconds:g} s "
                "(are those ranks alive, and do they write to the same store?)"
            )
        line.pause(pause, doing)
        pause = min(2 * pause, longest)
    places = [f"{folder}/{document}" for document in documents.values()]
    return [decode_part(store.read(place), f"{store.url}/{place}") for place in places]


def clear_away(manifest: Manifest, keep_last: int | None, store: Store, line: Line) -> None:
    """The checkpoint is saved by now, so nothing here makes it fail."""
    try:
        line.tell("removing old checkpoints", at_once=True)
        tidy(store, manifest, keep_last=keep_last)
    except GivenUp:
        pass
    except OSError as error:
        line.send(Trouble(f"checkpoint {manifest.facts.step} is saved, but old ones stay: {error}"))


if __name__ == "__main__":
    main()
