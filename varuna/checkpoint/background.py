"""Saves while training goes on: a snapshot in memory, and a courier that carries it to the store.

    training thread   copies the tensors into memory that it shares with the courier, and goes on
    courier           writes them to the store (courier.py: a process of its own)
    listening thread  starts the courier, sleeps until it tells something, and settles the future

The step that starts a save waits for the copy in memory alone.
"""

import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress

import msgspec
import torch
from torch import Tensor

from varuna.checkpoint.format.manifest import Manifest, Part
from varuna.checkpoint.format.part import Layout, Spec
from varuna.checkpoint.format.tensors import check_dense
from varuna.checkpoint.writer_process import (
    Committed,
    Failed,
    GiveUp,
    Go,
    Order,
    Progress,
    Task,
    ToCourier,
    ToTrainer,
    Trouble,
    Written,
)
from varuna.errors import CheckpointError

__all__ = ["Background", "Order"]

log = logging.getLogger("varuna")

GROWTH_BYTES = 4 << 20
"""Memory grows by whole such pieces, and by one more: a task that gets a little longer is no reason to."""
KILL_SECONDS = 2.0
"""A killed process that has not ended by then is stuck in the kernel, and left there."""
WORD_SECONDS = 30.0
"""Whoever waits for the last save is told so often how it stands."""
HELD_SIGNALS = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
"""They may reach the whole process group, and the trainer alone decides what they mean."""

IN_MEMORY = "memory"

Outcome = Manifest | Part


class Background:
    """One save at a time, each by the same courier through the same memory.

    The memory lies in RAM, or in a file in `tempdir` that has no name; it goes with the processes that
    hold it. A courier that does not give up a save within `timeout_seconds` is killed.
    """

    def __init__(self, tempdir: str | os.PathLike[str] | None = None, *, timeout_seconds: float = 10) -> None:
        self._tempdir = tempdir
        self._timeout_seconds = timeout_seconds
        self._memory: Memory | None = None
        self._courier: Courier | None = None
        self._save: Save | None = None
        self._owner = os.getpid()

    def start(
        self, order: Order, specs: Sequence[Spec], layout: Layout, tensors: Mapping[str, Tensor]
    ) -> "Future[Outcome]":
        """The tensors may change as soon as this returns. What goes wrong, goes wrong in the future."""
        assert not self.busy, "the save before is still under way"
        self._save = save = Save(order.facts.step)
        try:
            self._memory = self._memory or Memory(self._tempdir)
            if self._courier is None or self._courier.ended.is_set():
                self._courier = Courier(self._memory.fd)  # it gets ready while the tensors are copied
            go = self._memory.take(Task(order, specs, layout), tensors)
            self._courier.carry(go, save)
        except BaseException as error:
            save.fail(str(error) or type(error).__name__, error)
            if not isinstance(error, Exception):  # Ctrl-C: the script's own affair
                raise
        return save.future

    @property
    def busy(self) -> bool:
        return self._save is not None and not self._save.future.done()

    @property
    def doing(self) -> str:
        """The save under way and how it stands, in words; "" where there is none."""
        return str(self._save) if self._save is not None and self.busy else ""

    @property
    def stalled_seconds(self) -> float:
        """For how long nothing has been heard of the save under way."""
        return time.monotonic() - self._save.heard_at if self._save is not None and self.busy else 0.0

    def wait(self, seconds: float | None = None) -> bool:
        """Whether nothing is under way (any more)."""
        return self._save is None or bool(wait_for([self._save.future], seconds).done)

    def abandon(self, reason: str) -> None:
        """Gives up the save under way. The courier takes away what it wrote of it, unless it hangs."""
        if self._save is None or self._courier is None or not self.busy:
            return
        self._save.reason = reason
        self._courier.send(GiveUp())
        if self.wait(self._timeout_seconds):
            return
        self._courier.kill()
        if not self._courier.ended.wait(KILL_SECONDS):
            self._forget()  # a later save gets a courier and memory of its own
            self._save.reason += " (its process hangs in the kernel and cannot even be killed)"
            self._save.fail(reason)

    def close(self, wait_seconds: float = 600) -> None:
        """Waits for the save under way, unless nothing is heard of it for so long, and ends the courier."""
        if os.getpid() != self._owner:
            return  # a forked child that ends: the save is its parent's
        while self.busy and self.stalled_seconds < wait_seconds:
            log.warning("waiting for %s", self.doing)
            self.wait(min(WORD_SECONDS, wait_seconds))
        self.abandon(f"nothing was heard of it for {wait_seconds:g} s")
        if self._courier is not None:
            self._courier.send_home()
        self._forget()

    def _forget(self) -> None:
        if self._memory is not None:
            self._memory.release()
        self._courier = self._memory = None


class Save:
    """One save as the trainer sees it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.heard_at = time.monotonic()
        self.future: Future[Outcome] = Future()
        self.future.set_running_or_notify_cancel()  # it is abandoned, not cancelled
        self.reason = ""  # why it was given up
        self._doing = "starting"
        self._settling = threading.Lock()

    def __str__(self) -> str:
        return f"the background save of checkpoint {self.step} ({self._doing})"

    def hear(self, message: ToTrainer) -> None:
        self.heard_at = time.monotonic()
        match message:
            case Progress():
                self._doing = message.doing
            case Trouble():
                log.warning(message.what)
            case Written():
                self.succeed(message.part)
            case Committed():
                self.succeed(message.manifest)
            case Failed():
                self.fail(message.reason)

    def succeed(self, outcome: Outcome) -> None:
        with self._settling:
            if not self.future.done():
                self.future.set_result(outcome)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Two may find that it failed, each in a thread of its own: the first is believed."""
        with self._settling:
            if not self.future.done():
                error = CheckpointError(f"checkpoint {self.step} was not saved: {self.reason or reason}")
                error.__cause__ = cause
                log.error(str(error))
                self.future.set_exception(error)


class Courier:
    """The process that carries, and the thread that listens to it."""

    def __init__(self, memory: int) -> None:
        self.ended = threading.Event()
        self._line, courier_end = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        self._save: Save | None = None
        self._last_words = ""
        self._lock = threading.Lock()  # for the save and the last words: one of the two finds the other
        threading.Thread(
            target=self._live, args=(courier_end, memory), name="varuna-courier", daemon=True
        ).start()

    def carry(self, go: Go, save: Save) -> None:
        with self._lock:
            self._save, last_words = save, self._last_words
        if last_words:
            save.fail(last_words)
        self.send(go)

    def send(self, message: ToCourier) -> None:
        with suppress(OSError):  # where it is gone the listening thread finds out, and how it went
            self._line.sendall(msgspec.json.encode(message) + b"\n")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def send_home(self) -> None:
        """Other than closing it, this ends the line even where a forked child holds it too."""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self.ended.wait(KILL_SECONDS)

    def _live(self, courier_end: socket.socket, memory: int) -> None:
        """The kernel ends a courier with the thread that started it; this one lasts as long as it does."""
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)  # the courier inherits it
        try:
            last_words = self._listen(self._launch(courier_end, memory))
        except OSError as error:
            last_words = f"its process could not be started: {error}"
        with self._lock:
            self._last_words, save = last_words, self._save
        if save is not None:
            save.fail(last_words)
        self.ended.set()

    def _launch(self, courier_end: socket.socket, memory: int) -> "subprocess.Popen[bytes]":
        modules = os.pathsep.join(
            path or os.getcwd() for path in sys.path
        )  # what is found here is found there
        with courier_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "varuna.checkpoint.writer_process",
                    str(os.getpid()),
                    str(memory),
                ],
                stdin=courier_end.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=[memory],
                env={**os.environ, "PYTHONPATH": modules},
            )
        return self._process

    def _listen(self, process: "subprocess.Popen[bytes]") -> str:
        """Until the courier has ended; then how it did."""
        with self._line, suppress(ConnectionError):
            for text in self._line.makefile("rb"):
                if text.endswith(b"\n") and self._save is not None:
                    self._save.hear(msgspec.json.decode(text, type=ToTrainer))
        code = process.wait()
        if code >= 0:
            return f"its process ended by itself with status {code} (see what it wrote to stderr)"
        return f"its process was killed by {signal.Signals(-code).name} (did the machine run out of memory?)"


class Memory:
    """Bytes that this process fills and the courier reads; kept from save to save."""

    def __init__(self, tempdir: str | os.PathLike[str] | None) -> None:
        self.fd = os.memfd_create("varuna-checkpoint") if tempdir is None else nameless_file(tempdir)
        self._where = IN_MEMORY if tempdir is None else os.fspath(tempdir)
        self._size = 0
        self._bytes = torch.empty(0, dtype=torch.uint8)  # the whole of it
        self._header = b""
        self._places: dict[str, Tensor] = {}  # parts of it, one for each tensor
        self._pinned: bool | None = None  # None where it was not tried

    @torch.inference_mode()  # autograd's bookkeeping takes longer than a small copy
    def take(self, task: Task, tensors: Mapping[str, Tensor]) -> Go:
        for key in task.layout.spans:
            check_dense(key, tensors[key])
        text = msgspec.json.encode(task)
        first = task.layout.size
        stop = first + len(text)
        if stop > self._size:
            self._grow((stop // GROWTH_BYTES + 2) * GROWTH_BYTES)
        if task.layout.header != self._header:  # it names every tensor's type, shape and place
            self._lay_out(task)
        self._copy(tensors)
        self._bytes[first:stop] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return Go(first, stop)

    def release(self) -> None:
        self._let_go()
        os.close(self.fd)

    def _grow(self, size: int) -> None:
        try:
            # Taken now: where it is lacking later, touching the mapping would end this process.
            os.posix_fallocate(self.fd, self._size, size - self._size)
        except OSError as error:
            os.ftruncate(self.fd, self._size)
            raise CheckpointError(
                f"there is no room for a snapshot of {size} bytes in {self._where}: {error} "
                "(make room, or save without tempdir, which needs no snapshot)"
            ) from error
        self._let_go()
        mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._size = size

    def _let_go(self) -> None:
        """Of the mapping, which lasts as long as tensors that lie in it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
        self._pinned = None
        self._header, self._places = b"", {}
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def _lay_out(self, task: Task) -> None:
        """Once for many saves: making these tensors takes longer than filling small ones."""
        spans = task.layout.spans
        self._places = {
            spec.key: self._bytes[slice(*spans[spec.key])].view(getattr(torch, spec.dtype)).view(spec.shape)
            for spec in task.specs
        }
        self._header = task.layout.header

    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        devices = {tensors[key].device for key in self._places if tensors[key].is_cuda}
        if devices and self._pinned is None and self._where == IN_MEMORY:
            self._pinned = self._pin()
        for key, place in self._places.items():
            place.copy_(tensors[key], non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

    def _pin(self) -> bool:
        """So that a GPU copies into it by itself, five times faster; a file on a disk cannot be pinned."""
        register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
        if int(register(self._bytes.data_ptr(), self._size, 0)) == 0:
            return True
        with suppress(RuntimeError):  # the refusal comes up once more, in whatever is launched next
            torch.zeros(1, device="cuda")
        return False


def nameless_file(folder: str | os.PathLike[str]) -> int:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
